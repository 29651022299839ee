"""Whether the disk is to be used: after a failure it is left alone, then tried with one page.

Owns the verdict for writing, for reading and for the index, the log lines that say it aloud, and
the clock around it. The verdict itself (``DiskHealth``) is pure: the time is passed in.

::

             write fails, or hangs               retry_s later
    working ─────────────▶ degraded (no writes) ────────────────▶ one write as a trial
       ▲                        ▲   fails                              │
       └────────────────────────┴──────────────────────────────────────┘ succeeds

An index that cannot be written ends writing too; it is tried again by its own timer
(``kvstore/ssd/journal.py``). Reading goes on while only writing fails. A read that hangs, or
``read_errors_max`` that fail in a row, end both; a read or a write that succeeds is a new start.
"""

from __future__ import annotations

import asyncio
import logging

from kvstore.ssd.config import SsdConfig

log = logging.getLogger(__name__)


class _Switch:
    """Off after a failure; a trial is due ``retry_s`` later."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self.reason: str | None = None
        self._trial_s = 0.0

    def allows(self, now_s: float) -> bool:
        """True while it works, and for one caller each ``retry_s`` while it does not."""
        if self.reason is None:
            return True
        if now_s < self._trial_s:
            return False
        self._trial_s = now_s + self._retry_s
        return True

    def off(self, reason: str, now_s: float) -> None:
        self.reason = reason
        self._trial_s = now_s + self._retry_s

    def on(self) -> None:
        self.reason = None


class DiskHealth:
    """See the module's docstring."""

    def __init__(self, retry_s: float, read_errors_max: int) -> None:
        self._writes = _Switch(retry_s)
        self._reads = _Switch(retry_s)
        self._index_reason: str | None = None
        self._read_errors_max = read_errors_max
        self._read_errors = 0

    @property
    def degraded(self) -> str | None:
        """Why no pages are taken."""
        return self._writes.reason or self._index_reason or self._reads.reason

    def may_write(self, now_s: float) -> bool:
        if self._index_reason is not None:
            return False
        return self._reads.allows(now_s) and self._writes.allows(now_s)

    def may_read(self, now_s: float) -> bool:
        return self._reads.allows(now_s)

    def wrote(self) -> None:
        self._writes.on()
        self._reads.on()

    def write_failed(self, reason: str, now_s: float) -> None:
        self._writes.off(reason, now_s)

    def index_outcome(self, problem: str | None) -> None:
        """The index was written, or what went wrong."""
        self._index_reason = problem

    def read(self) -> None:
        self._read_errors = 0
        self._reads.on()

    def read_failed(self, reason: str, now_s: float) -> None:
        self._read_errors += 1
        if self._read_errors >= self._read_errors_max:
            self._reads.off(reason, now_s)

    def read_hung(self, reason: str, now_s: float) -> None:
        self._reads.off(reason, now_s)


class DiskState:
    """What the rest of the tier reports to and asks: one log line when the verdict changes."""

    def __init__(self, config: SsdConfig) -> None:
        self._config = config
        self._health = DiskHealth(config.retry_s, config.read_errors_max)
        self._now_s = asyncio.get_running_loop().time
        self._said: str | None = None

    @property
    def degraded(self) -> str | None:
        return self._health.degraded

    @property
    def hung_s(self) -> float:
        """A call that takes longer counts as failed."""
        return self._config.hung_s

    def may_write(self) -> bool:
        return self._health.may_write(self._now_s())

    def may_read(self) -> bool:
        return self._health.may_read(self._now_s())

    def wrote(self) -> None:
        self._health.wrote()
        self._say()

    def read(self) -> None:
        self._health.read()
        self._say()

    def write_failed(self, error: OSError) -> None:
        self._health.write_failed(f"write: {error}", self._now_s())
        self._say()

    def write_hung(self) -> None:
        self._health.write_failed(f"a write did not end in {self.hung_s:g} s", self._now_s())
        self._say()

    def read_failed(self, error: OSError) -> None:
        self._health.read_failed(f"read: {error}", self._now_s())
        self._say()

    def read_hung(self) -> None:
        self._health.read_hung(f"a read did not end in {self.hung_s:g} s", self._now_s())
        self._say()

    def index_outcome(self, problem: str | None) -> None:
        self._health.index_outcome(problem)
        self._say()

    def _say(self) -> None:
        degraded, said = self.degraded, self._said
        self._said = degraded
        if degraded is not None and said is None:
            log.error(
                "SSD tier %s takes no pages: %s; the node goes on with memory only, pages on the"
                " SSD are served while they can be read; tried again every %.0f s",
                *(self._config.path, degraded, self._config.retry_s),
            )
        elif degraded is None and said is not None:
            log.warning("SSD tier %s works again", self._config.path)
