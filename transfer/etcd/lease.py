"""Why a lease was lost, and so under which incarnation its holder comes back: the core.

Owns the evidence. Knows no connection; every method takes the time.

A node that comes back under its old incarnation says: nothing I promised has been void meanwhile.
That is true where *nobody* can have seen it leave: etcd lost all its data, or stood still, let
every lease run out at once, and all watchers hold their members for a grace (``table.py``).

It is false where the node itself was away: its process stood still (``SIGSTOP``, a machine that
swaps), or etcd kept other members and not this one (the node was cut off, or its whole machine was
suspended, after which no timer is late). The others have seen it leave, dropped their links and
placed its share elsewhere. It comes back under a new incarnation: every link to it is opened anew,
and grants of before are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from transfer.identity import NodeId

# A timer this late: the process stood still for long enough to lose its lease. That is the lease
# (5 s) less what may have passed since it was confirmed (1 s), less some slack: shorter ones happen
# to a busy machine in every outage, and would make nodes come back as others for nothing.
STANDSTILL_S = 3.0

Stays = Mapping[NodeId, tuple[int, int]]


class LeaseHistory:
    """Since when the lease is unconfirmed, and what happened since."""

    def __init__(self) -> None:
        self._asked_s = 0.0  # when the last answer that confirmed the lease was asked for
        self._woke_s: float | None = None

    def confirmed(self, asked_s: float) -> None:
        """The lease was good at some time after ``asked_s``."""
        self._asked_s = max(self._asked_s, asked_s)

    def timer_fired(self, now_s: float, late_s: float) -> None:
        """A timer of this process came late by ``late_s``."""
        if late_s >= STANDSTILL_S:
            self._woke_s = now_s

    @property
    def stood_still(self) -> bool:
        """True when this process stood still since the lease was last known to be good."""
        return self._woke_s is not None and self._woke_s > self._asked_s

    def was_away(self, me: NodeId, before: Stays, listed: Stays) -> bool:
        """Return whether others can have seen the holder of the lost lease leave.

        Args:
            before: who was there while the lease was good.
            listed: who is there now.
        """
        others = (id_ for id_ in sorted(before) if id_ != me)
        return self.stood_still or any(before[id_] == listed.get(id_) for id_ in others)
