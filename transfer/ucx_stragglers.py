"""Workers that were cut off and of which UCX still holds a flight.

Owns those of one engine, and what waits for their memory. Knows no peers and no sockets. Cutting
an endpoint completes its flights, with one exception: memory that other workers' flights use as
well stays registered until they are done, and the flight waits for that, in a list of its worker.
Such a worker is progressed from time to time, and never destroyed before.

::

    break_off() ──▶ quiet ───────────────────────────────────────────────▶ released ──▶ closed
       └──▶ kept, progressed ──flights complete──▶ settled, forgotten ────────┘
                └── after STRAGGLER_LIMIT_S ──▶ settled, still kept
                └── too many of them, or the engine ends ──▶ settled, ``Worker.close``: which
                                                     keeps it for the life of the process

Invariant: ``settle`` is called once. It comes before the flights have completed only in the last
two cases, and loudly: the endpoint is closed by then, and the flights keep their buffers alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from transfer.ucx_binding import Worker

_LOG = logging.getLogger(__name__)
MAX_STRAGGLERS = 64
STRAGGLER_LIMIT_S = 1.0  # of looking: for the flights of one, before its operations end
FIRST_PAUSE_S = 0.002
MAX_PAUSE_S = 0.25


@dataclass(eq=False)
class _Straggler:
    worker: Worker
    settle: Callable[[], None]
    waited_s: float = 0.0
    settled: bool = False
    released: bool = False

    def end_wait(self) -> None:
        """Tell whoever waits for the memory; only the first call counts."""
        if not self.settled:
            self.settled = True
            self.settle()


class Stragglers:
    """Those of one engine. Lives on the ucx loop; without any, there is no timer."""

    def __init__(self) -> None:
        self._kept: dict[int, _Straggler] = {}  # by the worker's id, the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = FIRST_PAUSE_S

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, worker: Worker, settle: Callable[[], None]) -> None:
        """Take a worker that was broken off and is not quiet.

        Args:
            settle: called when its flights have completed, or are given up.
        """
        if len(self._kept) >= MAX_STRAGGLERS:
            self.look()
        if len(self._kept) >= MAX_STRAGGLERS:
            self._give_up(next(iter(self._kept.values())), f"{MAX_STRAGGLERS} others wait as well")
        self._kept[id(worker)] = _Straggler(worker, settle)
        self._pause_s = FIRST_PAUSE_S
        self._stop_timer()
        self._start_timer()

    def release(self, worker: Worker) -> None:
        """Close a worker, whether kept or not, as soon as it is quiet."""
        straggler = self._kept.get(id(worker))
        if straggler is None:
            worker.close()
        else:
            straggler.released = True

    def look(self) -> None:
        """Progress every worker, and let go of those that are quiet."""
        for straggler in list(self._kept.values()):
            straggler.worker.progress()
            if straggler.worker.quiet:
                self._forget(straggler)
                if straggler.released:
                    straggler.worker.close()

    def end(self) -> None:
        """Give up whatever is left; the engine ends."""
        self.look()
        self._stop_timer()
        for straggler in list(self._kept.values()):
            self._give_up(straggler, "the engine ends")

    def _forget(self, straggler: _Straggler) -> None:
        del self._kept[id(straggler.worker)]
        straggler.end_wait()

    def _give_up(self, straggler: _Straggler, reason: str) -> None:
        _LOG.warning("ucx has not completed what was cut off, and is not waited for: %s", reason)
        self._forget(straggler)
        straggler.worker.close()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._pause_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self.look()
        for straggler in self._kept.values():
            straggler.waited_s += self._pause_s  # not by the clock: this process may have slept
            if straggler.waited_s >= STRAGGLER_LIMIT_S and not straggler.settled:
                _LOG.error(
                    "ucx has kept a flight for %s s after its connection was cut; its buffer "
                    "stays alive, and the operation ends",
                    STRAGGLER_LIMIT_S,
                )
                straggler.end_wait()
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if self._kept and self._timer is None:
            self._start_timer()
