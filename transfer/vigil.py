"""How long a thread stays awake for what is probably about to come, before it sleeps.

Waking a core that sleeps costs as much as a small read. So who expects something at once looks
again and again for a short while. Pure: the time is passed in. Knows no threads and no sockets.

::

    asleep ──begin──▶ awake ──paid: it came──▶ (other work, begin again)
      ▲                 └── in vain: SPIN_S over, or a look took GAP_S ──▶ asleep
      └──REST_S── rests ◀── in vain MAX_IN_VAIN times in a row, or a look took LOST_S

    A look that takes long means that somebody else wants the core, or the GIL.

    series of events:  |    | | | |  ...  |         each closer to the one before than OFTEN_S
    awake after it:    no   yes yes yes   no

Invariants: ``lasts`` is False from ``SPIN_S`` after the last ``begin`` on, and while resting. So
nobody burns a core for more than ``SPIN_S`` after the last event; and where it does not pay, as
the machine has other work or the peer is slow, for ``MAX_IN_VAIN`` times that in ``REST_S``.
"""

from __future__ import annotations

SPIN_S = 0.0002  # awake after the last event
OFTEN_S = 0.0005  # events that follow each other faster are a series: more are expected
GAP_S = 0.00006  # a look takes a tenth of that while the core is ours
LOST_S = 0.0005  # a look that took that long gave a whole slice away
MAX_IN_VAIN = 3  # in a row; one or two are the first of a series, on cold cores
REST_S = 0.05  # asleep as usual after that


class Vigil:
    """One per thread that waits. Not thread-safe."""

    def __init__(self, *, spin_s: float = SPIN_S, often_s: float = OFTEN_S) -> None:
        self._spin_s = spin_s
        self._often_s = often_s
        self._until_s = self._looked_s = self._rests_until_s = self._event_s = 0.0
        self._in_vain = 0

    def event(self, now_s: float) -> None:
        """Something came: stay awake for the next if they come often."""
        often = now_s - self._event_s < self._often_s
        self._event_s = now_s
        if often:
            self.begin(now_s)

    def begin(self, now_s: float) -> bool:
        """Stay awake from now on; return False while resting."""
        if now_s < self._rests_until_s:
            return False
        self._until_s = now_s + self._spin_s
        self._looked_s = now_s
        return True

    def look_from(self, now_s: float) -> bool:
        """The looks begin now, after other work; return whether the vigil lasts."""
        self._looked_s = now_s
        return now_s < self._until_s

    def lasts(self, now_s: float) -> bool:
        """Return whether to look once more; asked after each look that found nothing."""
        took_s, self._looked_s = now_s - self._looked_s, now_s
        if took_s <= GAP_S and now_s < self._until_s:
            return True
        self._in_vain += 1
        if took_s > LOST_S or self._in_vain >= MAX_IN_VAIN:
            self._in_vain = 0
            self._rests_until_s = now_s + REST_S
        self._until_s = now_s
        return False

    def paid(self) -> None:
        """What was expected has come in time."""
        self._in_vain = 0
