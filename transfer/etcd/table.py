"""The members as one watcher of etcd knows them: the core, without clock or connection.

Owns the seats, the grace after an outage and the version of the view. Every method takes the time.

::

                    PUT                      PUT (same or another incarnation)
      absent ────────────────▶ seated ◀─────────────────┐
        ▲  ▲                    │  │ └──────────────────┘
        │  └─ DELETE, not in a ─┘  │ DELETE in a grace, or not in the first list after an outage
        │     grace                ▼
        └──── grace over ──────── held ──── PUT ──▶ seated

A member is gone when etcd says so, never because etcd says nothing. And when etcd itself stood
still for longer than the leases, it lets them all run out as soon as it wakes: so for ``GRACE_S``
after an outage what etcd says is gone is *held*, until it has registered again.

Members and ``draining`` are published at once, gauges alone at most every ``GAUGE_INTERVAL_S``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from transfer.etcd.records import Keys, Record
from transfer.etcd.wire import Event, KeyValue
from transfer.identity import NodeId
from transfer.membership import Member, MembershipView

GRACE_S = 10.0  # enough to find etcd back (backoff), to get a lease and to register
GAUGE_INTERVAL_S = 0.5


class _Seat(msgspec.Struct, kw_only=True):
    record: Record
    stay: tuple[int, int]  # lease and creation: another stay of the same node differs
    heard_s: float
    held: bool = False


class MemberTable:
    """See the module's docstring."""

    def __init__(self, keys: Keys) -> None:
        self.version = 0
        self._keys = keys
        self._seats: dict[NodeId, _Seat] = {}
        self._grace_end_s = 0.0
        self._gauges_changed = False
        self._published_s = 0.0

    def reset(self, now_s: float, listed: Iterable[KeyValue], *, after_outage: bool) -> None:
        """Take in all keys as they are now; after an outage who is missing is held."""
        if after_outage:
            self._grace_end_s = now_s + GRACE_S
        present = {node_id for kv in listed if (node_id := self._put(now_s, kv)) is not None}
        for node_id in sorted(self._seats.keys() - present):
            self._gone(now_s, node_id)

    def apply(self, now_s: float, events: Iterable[Event]) -> None:
        """Take in what changed."""
        for event in events:
            if event.type != "DELETE" and self._put(now_s, event.kv) is not None:
                continue
            node_id = self._keys.node_of(event.kv.key)
            if node_id is not None:  # deleted, or now of a format that says nothing to us
                self._gone(now_s, node_id)

    def tick(self, now_s: float) -> list[NodeId]:
        """End the grace and publish gauges when it is time; return who did not come back."""
        late = [id_ for id_, seat in sorted(self._seats.items()) if seat.held]
        if now_s < self._grace_end_s:
            late = []
        for node_id in late:
            del self._seats[node_id]
        if late:
            self._publish(now_s)
        self._publish_gauges(now_s)
        return late

    def heard_before(self, now_s: float, ages_s: Mapping[NodeId, float]) -> None:
        """Take in how long ago members were heard, from a watcher that has just come."""
        for node_id, age_s in ages_s.items():
            if (seat := self._seats.get(node_id)) is not None:
                seat.heard_s = min(seat.heard_s, now_s - age_s)

    def stays(self) -> dict[NodeId, tuple[int, int]]:
        """Return lease and creation of everyone that is listed: who is there without a break."""
        return {id_: seat.stay for id_, seat in self._seats.items() if not seat.held}

    def view(self, now_s: float) -> MembershipView:
        """Return the members as they are now, sorted by node id."""
        members = tuple(
            Member(
                info=seat.record.info,
                status=seat.record.status,
                heartbeat_age_s=max(0.0, now_s - seat.heard_s),
            )
            for _, seat in sorted(self._seats.items())
        )
        return MembershipView(version=self.version, members=members)

    def _put(self, now_s: float, kv: KeyValue) -> NodeId | None:
        """Seat who wrote ``kv``; None when it is no member's."""
        if (node_id := self._keys.node_of(kv.key)) is None:
            return None
        record = self._keys.record(kv.key, kv.value)
        if record is None:
            return None
        before = self._seats.get(node_id)
        stay = (kv.lease, kv.create_revision)
        self._seats[node_id] = _Seat(record=record, stay=stay, heard_s=now_s)
        if before is None or _differ(before.record, record):
            self._publish(now_s)
        elif before.record != record:
            self._gauges_changed = True
            self._publish_gauges(now_s)
        return node_id

    def _gone(self, now_s: float, node_id: NodeId) -> None:
        if node_id not in self._seats:
            return
        if now_s < self._grace_end_s:
            self._seats[node_id].held = True
            return
        del self._seats[node_id]
        self._publish(now_s)

    def _publish_gauges(self, now_s: float) -> None:
        if self._gauges_changed and now_s >= self._published_s + GAUGE_INTERVAL_S:
            self._publish(now_s)

    def _publish(self, now_s: float) -> None:
        self.version += 1
        self._gauges_changed = False
        self._published_s = now_s


def _differ(one: Record, other: Record) -> bool:
    """Return whether watchers must hear of it at once."""
    return one.info != other.info or one.status.draining != other.status.draining
