"""Where legs go: the links, the prefix index and one router per role, as one thing.

Owns the counting of dispatched legs and the waiting for nodes. Knows no tokens of requests, only
queries. Part of the shell; every choice is made by ``Router``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from gateway.config import DispatcherConfig
from gateway.links import Link, Links
from gateway.prefix_index import PrefixIndex
from gateway.router import Candidate, Dispatch, Query, Router
from transfer.channel import Network
from transfer.identity import Identity, NodeId, Role
from transfer.membership import MembershipView, NodeStatus


class Seat(NamedTuple):
    """One leg's place: the link it uses and its entry in the load book."""

    link: Link
    dispatch: Dispatch


class Placement:
    """Chooses nodes for legs and waits for nodes to come."""

    def __init__(self, config: DispatcherConfig, identity: Identity, network: Network) -> None:
        self.index = PrefixIndex(config.index_pages_max)
        self.routers = {
            Role.PREFILL: Router(config.router, self.index, "prefill"),
            Role.DECODE: Router(config.router, self.index, "decode"),
        }
        self.links = Links(
            identity=identity,
            network=network,
            index=self.index,
            config=config,
            on_change=self._wake,
            on_gone=self._forget,
        )
        self._changed = asyncio.Event()
        self._reported: dict[NodeId, NodeStatus] = {}
        self.has_store = False  # pages can move from prefill to decode

    def follow(self, view: MembershipView) -> None:
        """Take in a new membership view: links, and the load that the nodes report.

        A status that an earlier view had is no report: load of ours that began or ended since
        then would be taken for others'.
        """
        self.has_store = view.has_store
        self.links.follow(view)
        before, self._reported = self._reported, {m.node_id: m.status for m in view.members}
        for member in view.members:
            router = self.routers.get(member.info.identity.role)
            if router is not None and before.get(member.node_id) is not member.status:
                gauges = member.status.gauges
                router.report(
                    member.node_id,
                    num_requests=gauges.get("num_running", 0) + gauges.get("num_waiting", 0),
                    num_tokens=gauges.get("num_tokens_waiting", 0),
                )

    def take(self, role: Role, query: Query, tried: list[Link]) -> Seat | None:
        """Choose an open node of ``role`` that is not in ``tried``, and count the leg on it."""
        links = {link.name: link for link in self.links.usable(role) if link not in tried}
        dispatch = self.routers[role].pick(query, list(links), self._now_s())
        return None if dispatch is None else Seat(links[dispatch.node_id], dispatch)

    def computed(self, seat: Seat) -> None:
        self.routers[seat.link.role].computed(seat.dispatch)

    def release(self, seat: Seat) -> None:
        self.routers[seat.link.role].ended(seat.dispatch, self._now_s())

    def explain(self, role: Role, query: Query) -> list[Candidate]:
        names = [link.name for link in self.links.usable(role)]
        return self.routers[role].explain(query, names, self._now_s())

    async def wait_until(self, ready: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until ``ready()``, looking again at every change of links; False at the deadline."""
        while not ready():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                return ready()
        return True

    def _wake(self) -> None:
        self._changed.set()

    def _forget(self, role: Role, node_id: NodeId) -> None:
        self.routers[role].forget(node_id)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
