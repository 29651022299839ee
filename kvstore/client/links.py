"""The store nodes that one client can use now: placement and links, following the membership.

Owns the links: one per incarnation of a store node in the view, gone when the node is. Groups keys
by the node that holds them, in messages of bounded size.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.client.background import Background
from kvstore.client.link import StoreLink
from kvstore.config import PAGES_PER_MESSAGE_MAX, StoreClientConfig
from kvstore.page import PageKey, PageSpec
from kvstore.placement import Placement, placement_of
from transfer.channel import Hello, Network
from transfer.identity import NodeId, Role
from transfer.interface import Transfer
from transfer.membership import MembershipView, NodeInfo


class KeyGroup(NamedTuple):
    """Positions (in the caller's list) of keys that live on one node; one message's worth."""

    link: StoreLink
    indexes: list[int]


class StoreLinks:
    """Links to all live store nodes.

    Attributes:
        epoch: rises when the set of nodes that pages are placed on changes.
    """

    def __init__(
        self, *, network: Network, hello: Hello, config: StoreClientConfig, counters: Counter[str]
    ) -> None:
        self._network = network
        self._hello = hello
        self._config = config
        self._counters = counters
        self._links: dict[NodeId, StoreLink] = {}
        self._placement = Placement([])
        self._placed: list[tuple[NodeInfo, bool]] = []
        self._closed = False
        self.epoch = 0

    def follow(self, view: MembershipView) -> None:
        """Take over a new view. Links of nodes that left are aborted; draining ones stay open."""
        stores = view.with_role(Role.STORE, include_draining=True)
        placed = [(member.info, member.status.draining) for member in stores]
        if placed == self._placed or self._closed:
            return
        self._placed = placed
        self._placement = placement_of(view)
        self.epoch += 1
        links = {}
        for member in stores:
            link = self._links.pop(member.node_id, None)
            if link is not None and link.info != member.info:
                link.abort()
                link = None
            links[member.node_id] = link or self._link(member.info)
        for gone in self._links.values():
            gone.abort()
        self._links = links

    def _link(self, info: NodeInfo) -> StoreLink:
        link = StoreLink(
            info,
            network=self._network,
            hello=self._hello,
            config=self._config,
            counters=self._counters,
        )
        link.connect()
        return link

    def all(self) -> list[StoreLink]:
        """The links of all nodes, by node id."""
        return list(self._links.values())

    def group(self, keys: Sequence[PageKey], indexes: Sequence[int]) -> list[KeyGroup]:
        """Split ``indexes`` by the node of ``keys[i]``; empty when there is no store node."""
        if not self._placement.node_ids or self._closed:
            return []
        by_node: dict[NodeId, list[int]] = {}
        nodes = self._placement.place([keys[i] for i in indexes])
        for i, node_id in zip(indexes, nodes, strict=True):
            by_node.setdefault(node_id, []).append(i)
        return [
            KeyGroup(self._links[node_id], mine[start : start + PAGES_PER_MESSAGE_MAX])
            for node_id, mine in sorted(by_node.items())
            for start in range(0, len(mine), PAGES_PER_MESSAGE_MAX)
        ]

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def abort(self) -> None:
        self._closed = True
        for link in self._links.values():
            link.abort()


class ClientParts(NamedTuple):
    """What the operations of one client share."""

    spec: PageSpec
    config: StoreClientConfig
    transfer: Transfer
    links: StoreLinks
    background: Background
    counters: Counter[str]

    @property
    def num_pages_per_batch(self) -> int:
        return max(1, self.config.batch_nbytes // self.spec.page_nbytes)
