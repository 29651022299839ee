"""The embedded registry: who is in the cluster, decided in one place (the gateway's process).

Owns the ``Registry`` core (leases, contract check, views), the ``RegistryService`` shell that
serves it over channels, and the registry's messages. Knows no roles' work. Nodes hold a seat
through ``registry_client.py``.

The life of a node id::

               register                     heartbeat
    absent ───────────────▶ live ◀──────────────────┐
      ▲  ▲                   │ │  └──────────────────┘
      │  └──── leave ────────┘ │ register with another incarnation: replaces, at the same address
      └─ no heartbeat for LEASE_TTL_S                               (else told who has the seat)

Invariants: all live members that state a contract fact state the same value (the first one sets
it; it is forgotten with the last member that states it). What all members say of themselves takes
at most ``MAX_VIEW_NBYTES``, so that one talkative member cannot cut the others off from the view.
``version`` rises with every view that is published; members and ``draining`` are published at
once, changes of gauges alone at most every ``GAUGE_INTERVAL_S``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from transfer.channel import Caller, Service
from transfer.errors import HelloRefused, RemoteFailed
from transfer.identity import Incarnation, NodeId
from transfer.lazy_timer import LazyTimer
from transfer.membership import (
    Member,
    MembershipView,
    NodeInfo,
    NodeStatus,
    SeatHolder,
    check_contract,
    holder_before,
)
from transfer.rpc_frames import MAX_FRAME_NBYTES, encode_message

logger = logging.getLogger(__name__)

LEASE_TTL_S = 2.0
HEARTBEAT_S = 0.5
GAUGE_INTERVAL_S = 0.5
OWN_PAUSE_S = 0.5  # a timer this late means that the registry's process stood still
MAX_MEMBERS = 4096
MAX_WATCHERS = 2 * MAX_MEMBERS  # every member, and those who only look on
MAX_VIEW_NBYTES = MAX_FRAME_NBYTES // 2  # a view travels as one frame
_SEAT_NBYTES = 128  # of a member in a view, beside what it says

REFUSED = "contract"  # RemoteFailed code of a registration that does not fit

Outcome = Literal["ok", "unknown", "superseded", "taken"]


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="registry.register"):
    """Take a seat; repeated after a lost lease or a restart of the registry."""

    info: NodeInfo
    status: NodeStatus


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="registry.heartbeat"):
    node_id: NodeId
    incarnation: Incarnation
    status: NodeStatus


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="registry.leave"):
    node_id: NodeId
    incarnation: Incarnation


class Watch(msgspec.Struct, frozen=True, kw_only=True, tag="registry.watch"):
    """Stream of ``MembershipView``: the present one, then one after each change, coalesced."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="registry.answer"):
    """``superseded``: another incarnation of the same node id has taken the seat. ``taken``: it
    has had it all the time; ``holder`` says who that is."""

    outcome: Outcome
    holder: SeatHolder | None = None


class _Seat(msgspec.Struct, kw_only=True):
    info: NodeInfo
    status: NodeStatus
    heard_s: float
    nbytes: int  # in an encoded view
    num_signs: int = 0  # heard from it


def _check_own(node_id: NodeId, incarnation: Incarnation, caller: Caller) -> None:
    """Refuse with ``identity`` who speaks for somebody else."""
    if (node_id, incarnation) != (caller.peer.node_id, caller.peer.incarnation):
        raise RemoteFailed("identity", f"{caller.peer.node_id} speaks for {node_id}")


class Registry:
    """The core: synchronous, without a clock. Every method takes the time."""

    def __init__(self, *, lease_ttl_s: float = LEASE_TTL_S) -> None:
        self.version = 0
        self.num_expired = 0
        self._lease_ttl_s = lease_ttl_s
        self._seats: dict[NodeId, _Seat] = {}
        self._nbytes = 0  # of all seats
        self._gauges_changed = False
        self._published_s = 0.0
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every call that may have changed the version or the timer."""
        self._listeners.append(listener)

    def holder(self, now_s: float, info: NodeInfo) -> SeatHolder | None:
        """The live member that ``info`` may not push out, if there is one."""
        seat = self._seats.get(info.identity.node_id)
        if seat is None or now_s >= seat.heard_s + self._lease_ttl_s:
            return None
        holder = SeatHolder(
            incarnation=seat.info.identity.incarnation,
            address=seat.info.address,
            num_signs=seat.num_signs,
            draining=seat.status.draining,
        )
        return holder if holder_before(holder, info) else None

    def register(self, now_s: float, info: NodeInfo, status: NodeStatus) -> None:
        """Seat a node, replacing whoever has its node id; ``holder`` says who should not be.

        Raises:
            HelloRefused: contract facts differ from a live member's, or the registry is full.
        """
        node_id = info.identity.node_id
        others = [seat for id_, seat in sorted(self._seats.items()) if id_ != node_id]
        for seat in others:
            check_contract(info, seat.info)
        if len(others) >= MAX_MEMBERS:
            raise HelloRefused(f"the registry holds {MAX_MEMBERS} members, its maximum")
        nbytes = self._nbytes_with(node_id, info, status)
        before = self._seats.get(node_id)
        self._remove(node_id)
        seat = _Seat(info=info, status=status, heard_s=now_s, nbytes=nbytes)
        seat.num_signs = 0 if before is None else before.num_signs + 1
        self._seats[node_id] = seat
        self._nbytes += nbytes
        self._publish(now_s)

    def heartbeat(
        self, now_s: float, node_id: NodeId, incarnation: Incarnation, status: NodeStatus
    ) -> Outcome:
        """Renew a lease; ``unknown`` asks the node to register again.

        Raises:
            HelloRefused: the view would become too long; the lease is renewed, the status is not.
        """
        seat = self._seats.get(node_id)
        if seat is None:
            return "unknown"
        if seat.info.identity.incarnation != incarnation:
            return "superseded"
        seat.heard_s = now_s
        seat.num_signs += 1
        nbytes = self._nbytes_with(node_id, seat.info, status)
        self._nbytes += nbytes - seat.nbytes
        before, seat.status, seat.nbytes = seat.status, status, nbytes
        if before.draining != status.draining:
            self._publish(now_s)
        elif before.gauges != status.gauges:
            self._gauges_changed = True
            self.tick(now_s)
        return "ok"

    def leave(self, now_s: float, node_id: NodeId, incarnation: Incarnation) -> Outcome:
        """Give the seat up; a late message of a replaced incarnation changes nothing."""
        seat = self._seats.get(node_id)
        if seat is None:
            return "unknown"
        if seat.info.identity.incarnation != incarnation:
            return "superseded"
        self._remove(node_id)
        self._publish(now_s)
        return "ok"

    def tick(self, now_s: float) -> list[NodeId]:
        """Expire leases that have ended and publish gauges when it is time; return the expired."""
        expired = sorted(
            id_ for id_, seat in self._seats.items() if now_s >= seat.heard_s + self._lease_ttl_s
        )
        for id_ in expired:
            self._remove(id_)
        self.num_expired += len(expired)
        gauges_due = self._gauges_changed and now_s >= self._published_s + GAUGE_INTERVAL_S
        if expired or gauges_due:
            self._publish(now_s)
        else:
            self._notify()
        return expired

    def next_timer_s(self) -> float | None:
        """Return when ``tick`` wants to be called, or None."""
        due = [seat.heard_s + self._lease_ttl_s for seat in self._seats.values()]
        if self._gauges_changed:
            due.append(self._published_s + GAUGE_INTERVAL_S)
        return min(due, default=None)

    def forgive(self, now_s: float) -> None:
        """Start all leases anew: this process itself stood still and could hear nobody."""
        for seat in self._seats.values():
            seat.heard_s = now_s

    def view(self, now_s: float) -> MembershipView:
        """Return the members as they are now."""
        members = tuple(
            Member(
                info=seat.info,
                status=seat.status,
                heartbeat_age_s=max(0.0, now_s - seat.heard_s),
            )
            for _, seat in sorted(self._seats.items())
        )
        return MembershipView(version=self.version, members=members)

    def _remove(self, node_id: NodeId) -> None:
        seat = self._seats.pop(node_id, None)
        self._nbytes -= 0 if seat is None else seat.nbytes

    def _nbytes_with(self, node_id: NodeId, info: NodeInfo, status: NodeStatus) -> int:
        """Return the size of a seat; HelloRefused when the view has no room for it."""
        nbytes = _SEAT_NBYTES + len(encode_message(info)) + len(encode_message(status))
        present = self._seats.get(node_id)
        others_nbytes = self._nbytes - (0 if present is None else present.nbytes)
        if others_nbytes + nbytes > MAX_VIEW_NBYTES:
            raise HelloRefused(
                f"{node_id} says {nbytes} bytes of itself, the other members {others_nbytes}: "
                f"together at most {MAX_VIEW_NBYTES}; state fewer labels and gauges"
            )
        return nbytes

    def _publish(self, now_s: float) -> None:
        self.version += 1
        self._gauges_changed = False
        self._published_s = now_s
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


class RegistryService:
    """The shell: adds the registry's handlers to ``service`` and keeps its timer.

    Needs no start: the timer exists while there are members. ``close`` ends the watch streams.
    """

    def __init__(self, registry: Registry, service: Service) -> None:
        self._registry = registry
        self._watchers: dict[asyncio.Event, None] = {}
        self._timer = LazyTimer(self._tick)
        self._closed = False
        registry.on_change(self._changed)
        service.on(Register, self._register)
        service.on(Heartbeat, self._heartbeat)
        service.on(Leave, self._leave)
        service.on_stream(Watch, self._watch)

    def close(self) -> None:
        """Stop the timer and end the watch streams; idempotent."""
        self._closed = True
        self._timer.cancel()
        for watcher in self._watchers:
            watcher.set()

    async def _register(self, message: Register, caller: Caller) -> Answer:
        identity = message.info.identity
        _check_own(identity.node_id, identity.incarnation, caller)
        holder = self._registry.holder(self._now_s(), message.info)
        if holder is not None:
            return Answer(outcome="taken", holder=holder)
        try:
            self._registry.register(self._now_s(), message.info, message.status)
        except HelloRefused as error:
            logger.warning("%s", error)
            raise RemoteFailed(REFUSED, str(error)) from error
        logger.info("%s %s joined", identity.role.value, identity.node_id)
        return Answer(outcome="ok")

    async def _heartbeat(self, message: Heartbeat, caller: Caller) -> Answer:
        node_id, incarnation = message.node_id, message.incarnation
        _check_own(node_id, incarnation, caller)
        try:
            outcome = self._registry.heartbeat(self._now_s(), node_id, incarnation, message.status)
        except HelloRefused as error:
            raise RemoteFailed(REFUSED, str(error)) from error
        return Answer(outcome=outcome)

    async def _leave(self, message: Leave, caller: Caller) -> Answer:
        _check_own(message.node_id, message.incarnation, caller)
        outcome = self._registry.leave(self._now_s(), message.node_id, message.incarnation)
        return Answer(outcome=outcome)

    async def _watch(self, message: Watch, caller: Caller) -> AsyncIterator[MembershipView]:
        if len(self._watchers) >= MAX_WATCHERS:
            raise RemoteFailed("overloaded", f"{MAX_WATCHERS} watch the registry already")
        changed = asyncio.Event()
        self._watchers[changed] = None
        try:
            while not self._closed:
                changed.clear()
                view = self._registry.view(self._now_s())
                yield view
                while self._registry.version == view.version and not self._closed:
                    changed.clear()
                    await changed.wait()
        finally:
            del self._watchers[changed]

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.set()
        self._arm()

    def _arm(self) -> None:
        next_s = self._registry.next_timer_s()
        if next_s is not None and not self._closed:
            self._timer.arm(next_s)

    def _tick(self, now_s: float, late_s: float) -> None:
        if late_s > OWN_PAUSE_S:
            logger.warning("the registry stood still for %.1f s; leases start anew", late_s)
            self._registry.forgive(now_s)
        for node_id in self._registry.tick(now_s):
            logger.warning("%s sent no heartbeat for %.1f s; removed", node_id, LEASE_TTL_S)
        self._arm()
