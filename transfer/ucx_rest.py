"""When a ucx connection sleeps, stays awake, or lets others have the core.

Owns the time of the last event. Knows no pieces and no peers. Sleeping and waking up costs as much
as moving a small page, so a connection with something under way looks again for ``SPIN_S`` after
its last event. Then it sleeps on the worker's descriptor; and where UCX does not agree, because the
peer has not made room yet, it gives the core away: the peer may be waiting for just that one.
Without that, two sides on one core spend a time slice on each full queue of shared memory.

::

    event ──SPIN_S──▶ armed ──▶ asleep until the descriptor is readable
                        └── UCX has more to do ──▶ core given away, then awake again
"""

from __future__ import annotations

import os
from collections.abc import Callable

from transfer.ucx_binding import Worker

SPIN_S = 0.0002  # awake after the last event while something is under way: waking up costs as much


class Rest:
    """That of one connection."""

    def __init__(
        self,
        worker: Worker,
        clock: Callable[[], float],
        give_way: Callable[[], None] = os.sched_yield,
    ) -> None:
        """Args:
        clock: the loop's time, in seconds.
        give_way: lets other threads have the core, if any waits for it.
        """
        self._worker = worker
        self._clock = clock
        self._give_way = give_way
        self._awake_until_s = 0.0

    def disturb(self) -> None:
        """Something has happened: more may come soon."""
        self._awake_until_s = self._clock() + SPIN_S

    def arm_or_give_way(self, *, busy: bool) -> bool:
        """Arm the worker's descriptor; False if it is to be progressed again instead.

        Args:
            busy: whether something is under way or awaited.
        """
        if busy and self._clock() < self._awake_until_s:
            return False
        if self._worker.arm():
            return True
        self._give_way()
        return False
