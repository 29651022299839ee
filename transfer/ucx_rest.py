"""When a ucx connection sleeps, stays awake, or lets others have the core.

Owns the time of the last event, and what may still be spent on waiting awake. Knows no pieces and
no peers. Sleeping and waking up costs as much as moving a small page, and the other side pays for
it too, so a connection that is moving something looks again for ``SPIN_S`` after its last event,
then until ``LINGER_S`` with the core given away at each look. Then it sleeps on the worker's
descriptor; and where UCX does not agree, because the peer has not made room yet, it gives the core
away: the peer may be waiting for just that one. Without that, two sides on one core spend a time
slice on each full queue of shared memory.

::

    event ──SPIN_S──▶ lingers ──LINGER_S, or nothing left to spend──▶ armed ──▶ asleep until the
                                                       descriptor is readable ◀────┤
                            core given away, awake again ◀── UCX has more to do ───┤
              pauses, each twice as long, until the next event ◀── and all is spent ┘

UCX may have more to do for as long as a peer is frozen: what it wants to send on its own account is
no piece of ours. Or it sleeps, and the descriptor is readable again at once, with nothing to be had
from it. Both are paid for like lingering.

Invariant: in any time T lingering and sleeping in vain cost at most ``MAX_LINGERED_S`` + T /
``LINGER_SHARE``, and a look after each pause, however the events come. So a peer that stalls costs
``LINGER_S``, or what there is to spend and 2 / ``MAX_PAUSE_S`` looks a second where it cannot
sleep, and one that trickles a share of a core.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from transfer.ucx_binding import Worker

SPIN_S = 0.0002  # awake after the last event while something is moving: waking up costs as much
LINGER_S = 0.002  # the same, but everybody else goes first
LINGER_SHARE = 8  # of the time, at most one part in so many is spent lingering,
MAX_LINGERED_S = 0.05  # but so much at once
LOOK_S = 0.00005  # the price of a look at a descriptor that was readable for nothing
FIRST_PAUSE_S = 0.001  # when that is spent and UCX does not sleep; doubles until an event,
MAX_PAUSE_S = 0.05  # up to this


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
        self._event_s = float("-inf")
        self._credit_s = MAX_LINGERED_S
        self._credited_s = clock()
        self._looked_s: float | None = None  # while lingering
        self.gave_way = False  # at the last look: that may have taken as long as others liked
        self._slept_s: float | None = None  # nothing has happened since
        self._paused_s: float | None = None  # the last time, and nothing has happened since
        self.pause_s: float | None = None  # until the next look; UCX has been stuck for a while

    def disturb(self) -> None:
        """Something has happened: more may come soon."""
        self._event_s = self._clock()
        self._looked_s = self._slept_s = self._paused_s = self.pause_s = None

    def arm_or_give_way(self, *, busy: bool) -> bool:
        """Arm the worker's descriptor; False if it is to be progressed again instead: after
        ``pause_s``, or at once if that is None.

        Args:
            busy: whether something is moving: under way, asked for, or awaited.
        """
        self.gave_way = False
        now_s = self._clock()
        if busy and self._paused_s is None and self._stays_awake(now_s):
            return False
        if not self._worker.arm():
            if self._paused_s is None and self._may_linger(now_s):
                self._let_others_go()
            else:
                self._pause()
            return False
        if self.pause_s is None and self._woken_in_vain(now_s):
            self._pause()
            return False
        self._looked_s = self.pause_s = None
        self._slept_s = now_s
        return True

    def _pause(self) -> None:
        last_s = self._paused_s
        self._paused_s = FIRST_PAUSE_S if last_s is None else min(2 * last_s, MAX_PAUSE_S)
        self.pause_s = self._paused_s
        self._looked_s = None  # a pause costs nothing

    def _woken_in_vain(self, now_s: float) -> bool:
        """Pay for the look; True if there is nothing left to do so."""
        if self._slept_s is None or now_s - self._slept_s >= MAX_PAUSE_S:
            return False
        if self._paused_s is not None:
            return True
        self._looked_s = max(self._slept_s, now_s - LOOK_S)
        return not self._may_linger(now_s)

    def _let_others_go(self) -> None:
        self.gave_way = True
        self._give_way()

    def _stays_awake(self, now_s: float) -> bool:
        quiet_s = now_s - self._event_s
        if quiet_s < SPIN_S:
            self._looked_s = None
            return True
        if quiet_s >= LINGER_S or not self._may_linger(now_s):
            return False
        self._let_others_go()
        return True

    def _may_linger(self, now_s: float) -> bool:
        """Pay for the time since the last look, if that was spent lingering, or refused sleep."""
        earned_s = (now_s - self._credited_s) / LINGER_SHARE
        self._credit_s = min(MAX_LINGERED_S, self._credit_s + earned_s)
        self._credited_s = now_s
        if self._looked_s is not None:
            self._credit_s -= now_s - self._looked_s
        self._looked_s = now_s
        return self._credit_s > 0
