"""Who is in the cluster: the shared vocabulary of membership.

Owns ``NodeInfo``/``NodeStatus``/``Member``, the immutable ``MembershipView`` and the
``Membership`` interface that nodes hold. Knows no roles' work. Implementations: the embedded
registry (``transfer/registry.py``, served by the gateway) and, later, etcd.

A view is a snapshot: readers keep it, compare ``version``, never mutate. Members are sorted by
node id so that every reader iterates in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec

from transfer.channel import MAX_FACTS, FactName, Facts
from transfer.identity import Identity, NodeId, Role

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


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says with every heartbeat.

    Attributes:
        draining: takes no new work.
        gauges: load as numbers: ``num_running``, ``num_waiting``, ``num_tokens_waiting``,
            ``num_pages``, ``num_free_pages`` (what new work may take: free, or evictable) ...
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


ViewCallback = Callable[[MembershipView], None]


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
