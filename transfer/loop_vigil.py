"""Keeps an event loop turning for a moment, when an answer or the next request is expected at once.

Owns one ``Vigil`` and the callback that puts itself on the loop again and again while it lasts.
A loop that turns looks at all its descriptors each time, so nothing has to wake it; all its other
work goes on. Knows no sockets and no protocol.

A request over a sleeping loop wakes four threads, each of which costs more than the request does.

::

    Answers.asked ──quick peer──▶ LoopVigil turns ──Answers.answered──▶ sleeps in epoll again
    LoopVigil.arrived, in series ─────▲   └── LOOP_SPIN_S over, others want the core ──▶ sleeps

A turn that took long because the loop had work is no sign of that: its processor time tells.

Invariants: without requests nothing turns; who is slow to answer is not waited for; where waiting
is in vain, it takes at most ``MAX_IN_VAIN * LOOP_SPIN_S`` of each ``REST_S`` (3 %).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from transfer.vigil import GAP_S, Vigil

LOOP_SPIN_S = 0.0005  # awake after the last event: between two requests a page is moved and hashed
LOOP_OFTEN_S = 0.001  # answers and requests that come faster are expected


class LoopVigil:
    """One per loop. Make it inside the running loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        """Args:
        clock: in seconds; the loop's own may be too coarse (uvloop's: 1 ms).
        worked: seconds for which this thread has had a core.
        """
        self.clock = clock
        self._worked = worked
        self._looked_s = 0.0  # at the last turn
        self._seen_s = self._worked_s = 0.0  # both clocks at one moment
        self._loop = asyncio.get_running_loop()
        self._vigil = Vigil(spin_s=LOOP_SPIN_S, often_s=LOOP_OFTEN_S)
        self._awaited: dict[Answers, None] = {}
        self._in_series = False  # requests arrive one after the other
        self._turning = False

    @property
    def turning(self) -> bool:
        """True while the loop does not sleep."""
        return self._turning

    def arrived(self) -> None:
        """A request has arrived: stay awake for the next one if they come often."""
        now_s = self.clock()
        if self._in_series:
            self._vigil.paid()
        self._vigil.event(now_s)
        self._in_series = self._vigil.look_from(now_s)
        if self._in_series:
            self._turn_on(now_s)

    def expect(self, answers: Answers, now_s: float) -> None:
        """Stay awake for an answer."""
        if self._vigil.begin(now_s):
            self._awaited[answers] = None
            self._turn_on(now_s)

    def met(self, answers: Answers) -> None:
        """The answer is here, or will not come."""
        if self._awaited.pop(answers, answers) is None:
            self._vigil.paid()

    def _turn_on(self, now_s: float) -> None:
        if not self._turning:
            self._turning = True
            self._looked_s = self._seen_s = now_s
            self._worked_s = self._worked()
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._awaited or self._in_series:
            if self._lasts():
                os.sched_yield()  # to whoever waits for this core, perhaps the peer
                self._loop.call_soon(self._turn)
                return
            self._awaited.clear()
            self._in_series = False
        self._turning = False

    def _lasts(self) -> bool:
        now_s = self.clock()
        took_s, self._looked_s = now_s - self._looked_s, now_s
        if took_s > GAP_S and self._was_ours(now_s):  # other work of this loop came in between
            return self._vigil.look_from(now_s)
        return self._vigil.lasts(now_s)

    def _was_ours(self, now_s: float) -> bool:
        """Whether this thread has had a core since the clocks were last compared."""
        worked_s = self._worked()
        lost_s = (now_s - self._seen_s) - (worked_s - self._worked_s)
        self._seen_s, self._worked_s = now_s, worked_s
        return lost_s <= GAP_S


class Answers:
    """How soon one peer answers. One per channel."""

    __slots__ = ("_answer_s", "_asked_s", "_vigil")

    def __init__(self, vigil: LoopVigil) -> None:
        self._vigil = vigil
        self._asked_s: float | None = None
        self._answer_s = 0.0  # what the last answer took; 0: there was none yet

    def asked(self) -> None:
        """A request was sent."""
        self._asked_s = now_s = self._vigil.clock()
        if self._answer_s <= LOOP_OFTEN_S:
            self._vigil.expect(self, now_s)

    def answered(self) -> None:
        """An answer has come. Times are those since the last request: others may still run."""
        if self._asked_s is not None:
            self._answer_s = self._vigil.clock() - self._asked_s
            self._asked_s = None
            self._vigil.met(self)

    def given_up(self) -> None:
        """Nobody waits any more."""
        self._asked_s = None
        self._vigil.met(self)
