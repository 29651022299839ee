"""The members as one watcher of the gateway's registry knows them: the core, without a clock.

Owns who is listed, who is held after the registry began another life, and the version of the view.
Knows neither channel nor loop; every method takes the time.

::

                       the registry lists it
    absent ────────────────────────────────────▶ listed ◀───┐
      ▲  ▲                                        │  │      │ the registry lists it, in the same
      │  └─────── this life of the registry ──────┘  │      │ or in another incarnation
      │           lists it no more                   ▼      │
      └─────────────── HOLD_S over ────────────────  held ──┘
                                   another life of the registry does not list it

A registry that has begun another life knows nobody, and learns of its members one by one. So who
was in the view, and is not listed yet, is *held*: nobody is gone because nobody says so. Of whom a
life has listed it is believed at once. A member that was the registry's own process is not held:
it ended with the life.

Not ``etcd/table.py`` in other words: etcd keeps its members over an outage, and then lets leases
run out that it could not renew, so that there what it *says* is gone is held. What is said here is
true; it is incomplete.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from msgspec import structs

from transfer.identity import Incarnation, NodeId
from transfer.membership import Member, MembershipView
from transfer.registry import LEASE_TTL_S, MAX_MEMBERS

RETURN_MARGIN_S = 3.0  # a try to connect that is under way, and the pause before the next one
HOLD_S = LEASE_TTL_S + RETURN_MARGIN_S


class _Seen(NamedTuple):
    member: Member
    heard_s: float


class RegistryView:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.version = 0  # rises over all lives of the registry
        self._life: Incarnation | None = None
        self._listed: dict[NodeId, _Seen] = {}
        self._held: dict[NodeId, _Seen] = {}
        self._hold_end_s = 0.0

    @property
    def num_held(self) -> int:
        """How many are in the view though the registry does not list them (yet)."""
        return len(self._held)

    def take(self, now_s: float, life: Incarnation, view: MembershipView) -> bool:
        """Take in what the registry says in its life ``life``; True when it is another life."""
        is_other = life != self._life
        if is_other:
            self._hold_all(now_s)
            self._life = life
        self._listed = {
            member.node_id: _Seen(member, now_s - member.heartbeat_age_s) for member in view.members
        }
        for node_id in self._held.keys() & self._listed.keys():
            del self._held[node_id]
        self.version += 1
        return is_other

    def tick(self, now_s: float) -> list[NodeId]:
        """End the hold when it is time; return who did not come back."""
        if not self._held or now_s < self._hold_end_s:
            return []
        late = sorted(self._held)
        self._held.clear()
        self.version += 1
        return late

    def next_timer_s(self) -> float | None:
        """Return when ``tick`` wants to be called, or None."""
        return self._hold_end_s if self._held else None

    def forgive(self, now_s: float) -> None:
        """Start the hold anew: this process itself stood still and could hear nobody."""
        self._hold_end_s = now_s + HOLD_S

    def view(self, now_s: float) -> MembershipView:
        """Return the members as they are now, sorted by node id."""
        members = tuple(
            structs.replace(seen.member, heartbeat_age_s=max(0.0, now_s - seen.heard_s))
            for _, seen in sorted((self._held | self._listed).items())
        )
        return MembershipView(version=self.version, members=members)

    def _hold_all(self, now_s: float) -> None:
        """Hold who is in the view; whoever was held already has had no time to come back."""
        known = sorted((self._held | self._listed).items())
        others = (
            (node_id, seen)
            for node_id, seen in known
            if seen.member.info.identity.incarnation != self._life
        )
        self._held = dict(islice(others, MAX_MEMBERS))  # lives that follow each other add none
        self._hold_end_s = now_s + HOLD_S
