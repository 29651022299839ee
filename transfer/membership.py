"""Who is in the cluster: the shared vocabulary of membership.

Owns ``NodeInfo``/``NodeStatus``/``Member``, the immutable ``MembershipView`` and the
``Membership`` interface that nodes hold, and what all implementations share: who follows a view,
what members must agree on, and who gets a seat that two ask for. Knows no roles' work.
Implementations: the embedded registry (``transfer/registry.py``, served by the gateway) and etcd
(``transfer/etcd``).

A view is a snapshot: readers keep it, compare ``version``, never mutate. Members are sorted by
node id so that every reader iterates in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Protocol

import msgspec

from transfer.channel import MAX_FACTS, FactName, Facts
from transfer.errors import HelloRefused
from transfer.identity import Identity, NodeId, Role

logger = logging.getLogger(__name__)

TAKEN_RETRY_S = 0.25  # until a seat that somebody has is asked for again

# Contract fact of prefill, decode and store nodes: the engine in which the cluster keeps pages.
PAGE_STORE_FACT = "page_store"
OWN_PAGE_STORE = "kvferry"  # the cluster's own store nodes; meant, too, where nothing is stated
# What a node on another engine says of it with its heartbeats.
PAGE_STORE_LOST = "page_store_lost"  # gauge: 1 while the engine does not answer
PAGE_STORE_LOSSES = "page_store_losses"  # counter: how often it stopped answering

Gauges = Annotated[dict[FactName, float], msgspec.Meta(max_length=4 * MAX_FACTS)]


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says once, when it joins. Fixed for the life of its incarnation.

    Attributes:
        identity: node id, role, incarnation.
        address: where its channel service listens.
        transport: name of its bulk transport.
        contract: facts on which all members that state them must agree (see ``Hello``).
        labels: free facts for people and routing: device, pid, num_pages ...
    """

    identity: Identity
    address: Annotated[str, msgspec.Meta(max_length=1024)]
    transport: Annotated[str, msgspec.Meta(max_length=64)] = ""
    contract: Facts = {}
    labels: Facts = {}

    @property
    def other_page_store(self) -> str | None:
        """Address of the engine in which the node keeps pages; None: the cluster's own stores."""
        stated = self.contract.get(PAGE_STORE_FACT, OWN_PAGE_STORE)
        return None if stated == OWN_PAGE_STORE else stated


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says with every heartbeat.

    Attributes:
        draining: takes no new work.
        gauges: load as numbers: ``num_running``, ``num_waiting``, ``num_tokens_waiting``,
            ``num_pages``, ``num_free_pages`` (what new work may take: free, or evictable),
            ``num_evictable_pages`` (of these: in a cache, and held by nobody else) ...
        counters: totals that only grow in one incarnation: ``transfer_bytes_read`` ...
    """

    draining: bool = False
    gauges: Gauges = {}
    counters: Gauges = {}


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One live node as the registry sees it."""

    info: NodeInfo
    status: NodeStatus
    heartbeat_age_s: float = 0.0

    @property
    def node_id(self) -> NodeId:
        return self.info.identity.node_id


class MembershipView(msgspec.Struct, frozen=True, kw_only=True):
    """All live members at one version, sorted by node id."""

    version: int = 0
    members: tuple[Member, ...] = ()

    def with_role(self, role: Role, *, include_draining: bool = False) -> tuple[Member, ...]:
        return tuple(
            m
            for m in self.members
            if m.info.identity.role is role and (include_draining or not m.status.draining)
        )

    def get(self, node_id: NodeId) -> Member | None:
        return next((m for m in self.members if m.node_id == node_id), None)

    @property
    def has_store(self) -> bool:
        """Pages can move between members: over a store node, or the engine that members name."""
        return bool(self.with_role(Role.STORE)) or any(
            member.info.other_page_store for member in self.members
        )


ViewCallback = Callable[[MembershipView], None]


class Superseded(HelloRefused):
    """Another process has joined under the same node id."""


class SeatTaken(HelloRefused):
    """Another process has this node id, and is alive."""

    def __init__(self, node_id: NodeId, holder: SeatHolder) -> None:
        super().__init__(
            f"node id {node_id} is taken: the process at {holder.address or 'no address'} "
            f"(incarnation {holder.incarnation}) has joined under it and is alive. Give this "
            "process a --node-id of its own, or stop that one first"
        )


class SeatHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a seat that another process of the same node id asks for.

    A process that was killed cannot say so: its seat is there until its lease ends. It is alive
    when ``num_signs`` changes.

    Attributes:
        num_signs: of life: whatever changes with each of them, and never without one.
        draining: about to leave.
    """

    incarnation: str
    address: str
    num_signs: int
    draining: bool = False

    def is_alive(self, before: SeatHolder) -> bool:
        """It has given a sign of life since ``before`` was seen, and will stay."""
        same = before.incarnation == self.incarnation
        return same and before.num_signs != self.num_signs and not self.draining


def holder_before(holder: SeatHolder, info: NodeInfo) -> bool:
    """Whether ``holder`` keeps ``info`` from its seat as long as it lives.

    Not itself, nor the process whose address it has: that one is gone, this is its restart.
    """
    mine = holder.incarnation == info.identity.incarnation
    return not mine and (not info.address or holder.address != info.address)


class SeatQuery:
    """Whether a process gets its seat, judged by who has it each time it asks.

    ::

        nobody has it ─────────────────────────▶ free
        somebody, seen for the first time ─────▶ wait, and ask again after ``TAKEN_RETRY_S``
        the same one, no sign of life since ───▶ wait: dead perhaps, then its lease ends
        the same one, heard since, leaving ────▶ wait
        the same one, heard since, staying ────▶ taken
    """

    def __init__(self, node_id: NodeId) -> None:
        self._node_id = node_id
        self._first: SeatHolder | None = None  # the present holder, as it was first seen

    def is_free(self, holder: SeatHolder | None) -> bool:
        """False: wait, and ask again; the log has once for whom.

        Raises:
            SeatTaken: the holder lives, and will stay.
        """
        if holder is None:
            return True
        first = self._first
        if first is None:
            text = "%s waits until the seat of the process at %s is free, or that one is heard"
            logger.warning(text, self._node_id, holder.address)
        elif holder.is_alive(first):
            raise SeatTaken(self._node_id, holder)
        if first is None or first.incarnation != holder.incarnation:
            self._first = holder
        return False


class Subscribers:
    """The present view and who wants to hear of new ones."""

    def __init__(self) -> None:
        self.view = MembershipView()
        self._callbacks: list[ViewCallback] = []

    def add(self, callback: ViewCallback) -> None:
        self._callbacks.append(callback)
        callback(self.view)

    def publish(self, view: MembershipView) -> None:
        self.view = view
        for callback in self._callbacks:
            callback(view)


def check_contract(new: NodeInfo, live: NodeInfo) -> None:
    """Compare what both state.

    Raises:
        HelloRefused: a fact differs; the message prints both sides.
    """
    both = sorted(new.contract.keys() & live.contract.keys())
    differing = [key for key in both if new.contract[key] != live.contract[key]]
    if differing:
        raise HelloRefused(
            f"cannot join, the cluster differs: {_facts(new, differing)} "
            f"against {_facts(live, differing)}; start the node with the "
            "cluster's values, or stop the members that state the others"
        )


def _facts(info: NodeInfo, keys: Iterable[str]) -> str:
    facts = ", ".join(f"{key}={info.contract[key]}" for key in keys)
    return f"{info.identity.role.value} {info.identity.node_id} ({facts})"


class Membership(Protocol):
    """A node's seat in the cluster.

    ``view`` is the last view received; it stays readable while the registry is away. A node whose
    lease was lost registers again by itself.
    """

    @property
    def view(self) -> MembershipView: ...

    @property
    def connected(self) -> bool:
        """True while the registry answers."""
        ...

    @property
    def superseded(self) -> bool:
        """True for good once another process has taken the seat under the same node id.

        This process is listed no more and does not come back: its owner should end it.
        """
        ...

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        """Register and keep heart-beating with ``status()`` until ``leave``.

        Waits without limit for a registry that does not answer yet, logging what it waits for
        and how to start it.

        Raises:
            HelloRefused: the cluster's contract differs; both sides are in the message.
            PeerClosed: ``leave`` was called meanwhile.
        """
        ...

    def subscribe(self, callback: ViewCallback) -> None:
        """Call ``callback`` on every new view, and at once with the present one."""
        ...

    async def leave(self) -> None:
        """Deregister and stop; idempotent."""
        ...
