"""Keeps an event loop turning for a moment, when an answer or the next request is expected at once.

Owns one ``Vigil`` and the callback that puts itself on the loop again and again while it lasts.
A loop that turns looks at all its descriptors each time, so nothing has to wake it; all its other
work goes on. Knows no sockets and no protocol.

A request over a sleeping loop wakes four threads, each of which costs more than the request does.

::

    Answers.asked ──quick peer──▶ LoopVigil turns ──Answers.answered──▶ sleeps in epoll again
    LoopVigil.arrived, in series ─────▲   └── SPIN_S over, others want the core ──▶ sleeps

Invariant: without requests nothing turns; who is slow to answer is not waited for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from transfer.vigil import OFTEN_S, Vigil


class LoopVigil:
    """One per loop. Make it inside the running loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: in seconds; the loop's own may be too coarse (uvloop's: 1 ms).
        """
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self._vigil = Vigil()
        self._awaited: dict[Answers, None] = {}
        self._in_series = False  # requests arrive one after the other
        self._turning = False
        self._begun = False  # since the last turn

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
            self._turn_on()

    def expect(self, answers: Answers, now_s: float) -> None:
        """Stay awake for an answer."""
        if self._vigil.begin(now_s):
            self._awaited[answers] = None
            self._turn_on()

    def met(self, answers: Answers) -> None:
        """The answer is here, or will not come."""
        if self._awaited.pop(answers, answers) is None:
            self._vigil.paid()

    def _turn_on(self) -> None:
        self._begun = True
        if not self._turning:
            self._turning = True
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
        if self._begun:  # other work came in between
            self._begun = False
            return self._vigil.look_from(self.clock())
        return self._vigil.lasts(self.clock())


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
        if self._answer_s <= OFTEN_S:
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
