"""Workers that were cut off and of which UCX still holds a flight.

Owns those of one engine, and what waits for their memory. Knows no peers and no sockets. Cutting
an endpoint completes its flights, with one exception: before UCX gives one up it takes its memory
out of its registration cache, and waits until no other flight uses that. Two connections that move
the same bytes do that to each other for a moment. After a peer was killed in the middle of many
reads and writes of the same bytes, over shared memory, flights were seen to stay for good.

Such a worker is progressed from time to time, for ``STRAGGLER_LIMIT_S``. Then it is never
progressed again, and kept for the life of the process, because UCX would call back into it. Where
bytes move only in ``progress`` (tcp, shared memory) that alone makes the memory quiet::

    break_off() ──▶ quiet ───────────────────────────────────────────────▶ released ──▶ closed
       └──▶ kept, progressed ──flights complete──▶ settled, forgotten ────────┘
                └── after STRAGGLER_LIMIT_S, too many, or the engine ends
                      ├── moves only in progress ──▶ progressed no more ──▶ settled: quiet
                      └── devices move (RDMA, CUDA) ──▶ region shut ──▶ settled: in quarantine,
                                     still progressed; closed if its flights complete after all

Invariant: ``settle`` is called once, and after it nobody touches memory that is still in use.
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
        """Never progress the worker again, and end what waits for it."""
        _LOG.warning("ucx has not completed what was cut off, and is not waited for: %s", reason)
        straggler.worker.close()
        self._forget(straggler)

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
        for straggler in list(self._kept.values()):
            straggler.waited_s += self._pause_s  # not by the clock: this process may have slept
            if straggler.waited_s >= STRAGGLER_LIMIT_S and not straggler.settled:
                self._end_wait(straggler)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if self._kept and self._timer is None:
            self._start_timer()

    def _end_wait(self, straggler: _Straggler) -> None:
        reason = f"cut off for {STRAGGLER_LIMIT_S} s"
        if straggler.worker.moves_only_in_progress:
            self._give_up(straggler, reason)
        else:  # a device moves bytes on its own: the flights show when it has stopped
            _LOG.error("ucx may still touch memory of an operation that ends: %s", reason)
            straggler.end_wait()
