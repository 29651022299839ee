"""Whether the disk is to be used: after a failure it is left alone, then tried with one page.

Owns the verdict for writing and for reading. Pure: the time is passed in.

::

             write fails                          retry_s later
    working ─────────────▶ degraded (no writes) ────────────────▶ one write as a trial
       ▲                        ▲   fails                              │
       └────────────────────────┴──────────────────────────────────────┘ succeeds

An index that cannot be written ends writing too; it is tried again by its own timer
(``kvstore/ssd/journal.py``). Reading goes on while only writing fails. Reads that fail
``read_errors_max`` times in a row end both; a read or a write that succeeds is a new start.
"""

from __future__ import annotations


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

    def off(self, reason: str, now_s: float) -> bool:
        """Returns True when it was on."""
        was_on = self.reason is None
        self.reason = reason
        self._trial_s = now_s + self._retry_s
        return was_on

    def on(self) -> bool:
        """Returns True when it was off."""
        was_off = self.reason is not None
        self.reason = None
        return was_off


class DiskHealth:
    """See the module's docstring. Methods that return bool say whether the verdict changed."""

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

    def wrote(self) -> bool:
        was_off = self._writes.on()
        return self._reads.on() or was_off

    def write_failed(self, reason: str, now_s: float) -> bool:
        return self._writes.off(reason, now_s)

    def index_wrote(self) -> bool:
        was_off = self._index_reason is not None
        self._index_reason = None
        return was_off

    def index_failed(self, reason: str) -> bool:
        was_on = self._index_reason is None
        self._index_reason = reason
        return was_on

    def read(self) -> bool:
        self._read_errors = 0
        return self._reads.on()

    def read_failed(self, reason: str, now_s: float) -> bool:
        self._read_errors += 1
        if self._read_errors < self._read_errors_max:
            return False
        return self._reads.off(reason, now_s)
