"""The store nodes that one client can use now: placement and links, following the membership.

Owns the links: one per incarnation of a store node in the view, gone when the node is. Says which
nodes to ask for pages, in messages of bounded size.

Where a page may be: on the first ``replicas`` nodes of its ranking; on a draining node, until that
has handed its pages on; and while the view is *young* one rank further down for every node that
has joined lately: the node that a page moved away from is the next in rank. A view is young for
``YOUNG_S`` after a join, and as long as a store node says that it is still moving pages.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.client.background import Background
from kvstore.client.hot_keys import HotKeys
from kvstore.client.link import StoreLink
from kvstore.client.releases import Releases
from kvstore.client.route import Groups, Route, route
from kvstore.config import MATCH_KEYS_MAX, PAGES_PER_MESSAGE_MAX, StoreClientConfig
from kvstore.page import PageKey, PageSpec
from kvstore.placement import Placement, Ranks, placement_of, replicas_of
from transfer.channel import Hello, Network
from transfer.identity import NodeId, Role
from transfer.interface import Transfer
from transfer.membership import MembershipView, NodeInfo

YOUNG_S = 5.0  # after a join: the nodes may not have noticed it yet
MOVING_S_MAX = 600.0  # how long a join is remembered while nodes are moving pages
MOVING_GAUGE = "repairing"
JOINS_MAX = 3  # ranks added for joins at most
SPARE_RANKS = 2  # nodes tried in place of those that cannot be reached


class KeyGroup(NamedTuple):
    """Positions (in the caller's list) of keys to ask one node for; one message's worth."""

    link: StoreLink
    indexes: list[int]


class _Nodes(NamedTuple):
    """Nodes that pages are placed on, and their links in the same order."""

    placement: Placement
    links: list[StoreLink]

    def usable(self) -> list[bool]:
        return [link.usable for link in self.links]

    def first(self, key: PageKey) -> StoreLink | None:
        """The first node in rank, if it can be reached."""
        only = len(self.links) == 1
        link = self.links[0 if only else self.placement.ranks([key], 1)[0, 0]]
        return link if link.usable else None

    def groups(self, groups: Groups, size: int) -> list[KeyGroup]:
        return [
            KeyGroup(self.links[node], mine[start : start + size])
            for node, mine in groups
            for start in range(0, len(mine), size)
        ]


class Course:
    """A ``Route`` over live links."""

    def __init__(self, nodes: _Nodes, route: Route) -> None:
        self._nodes = nodes
        self._route = route

    def groups(self, indexes: Sequence[int]) -> list[KeyGroup]:
        """The next node of each page that has one."""
        groups = self._route.groups(indexes, self._nodes.usable())
        return self._nodes.groups(groups, PAGES_PER_MESSAGE_MAX)

    def all_groups(self) -> list[KeyGroup]:
        """All nodes worth asking whether they hold the pages."""
        return self._nodes.groups(self._route.all_groups(self._nodes.usable()), MATCH_KEYS_MAX)

    def answered(self, indexes: Sequence[int]) -> None:
        self._route.answered(indexes)

    def unreachable(self, indexes: Sequence[int]) -> None:
        self._route.unreachable(indexes)

    def skipped(self, indexes: Sequence[int]) -> list[int]:
        return self._route.skipped(indexes)


class StoreLinks:
    """Links to all live store nodes. Make it inside a running loop.

    Attributes:
        epoch: rises when the set of nodes that pages are placed on changes.
        replicas: nodes that hold each page, as the store nodes state it.
        hot: pages that lie on more nodes than that.
    """

    def __init__(
        self, *, network: Network, hello: Hello, config: StoreClientConfig, counters: Counter[str]
    ) -> None:
        self._network = network
        self._hello = hello
        self._config = config
        self._counters = counters
        self._links: dict[NodeId, StoreLink] = {}
        self._all = _Nodes(Placement([]), [])  # draining ones, too
        self._lasting = _Nodes(Placement([]), [])
        self._placed: list[tuple[NodeInfo, bool]] = []
        self._joins: deque[float] = deque(maxlen=JOINS_MAX)  # when nodes have joined
        self._moving = False  # some node says so
        self._closed = False
        self.epoch = 0
        self.replicas = 1
        self.hot = HotKeys(xxhash.xxh3_64_intdigest(hello.identity.incarnation.encode()))

    def follow(self, view: MembershipView) -> None:
        """Take over a new view. Links of nodes that left are aborted; draining ones stay open."""
        stores = view.with_role(Role.STORE, include_draining=True)
        self._moving = any(m.status.gauges.get(MOVING_GAUGE, 0.0) > 0 for m in stores)
        placed = [(member.info, member.status.draining) for member in stores]
        if placed == self._placed or self._closed:
            return
        self._placed = placed
        self.replicas = replicas_of(view)
        self.epoch += 1
        self._follow_links([member.info for member in stores])
        everywhere, lasting = placement_of(view, include_draining=True), placement_of(view)
        self._all = _Nodes(everywhere, [self._links[n] for n in everywhere.node_ids])
        self._lasting = _Nodes(lasting, [self._links[n] for n in lasting.node_ids])

    def _follow_links(self, infos: Sequence[NodeInfo]) -> None:
        links = {}
        first = not self._links
        for info in infos:
            link = self._links.pop(info.identity.node_id, None)
            if link is not None and link.info != info:
                link.abort()
                link = None
            if link is None:
                link = self._link(info)
                if not first:
                    self._joins.append(_now_s())
            links[link.node_id] = link
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

    @property
    def present(self) -> bool:
        """There are store nodes."""
        return bool(self._links) and not self._closed

    @property
    def num_answers(self) -> int:
        """Nodes to ask for a page before it counts as absent."""
        since_s = _now_s() - (MOVING_S_MAX if self._moving else YOUNG_S)
        num_young = sum(joined_s > since_s for joined_s in self._joins)
        num_young = max(num_young, int(self._moving))
        num_draining = len(self._all.links) - len(self._lasting.links)
        wanted = self.replicas + num_young + num_draining
        return max(1, min(wanted, len(self._all.links)))

    def only_reader(self, key: PageKey) -> StoreLink | None:
        """The node of ``key``, if it alone is worth asking and can be asked."""
        if self.num_answers > 1 or not self._all.links or key in self.hot:
            return None
        return self._all.first(key)

    def first_writer(self, key: PageKey) -> StoreLink | None:
        """Where ``key`` is put, if that can be reached."""
        return self._lasting.first(key) if self._lasting.links else None

    def reading(self, keys: Sequence[PageKey], *, spread: bool = False) -> Course:
        """Where to look for ``keys``; with ``spread``, hot ones in turn on all that hold them."""
        num_answers = self.num_answers
        ranks = self._all.placement.ranks(keys, num_answers + SPARE_RANKS)
        answers = np.full(len(keys), num_answers, dtype=np.intp)
        anywhere = spread and bool(self._all.links)  # else it is nobody's turn
        for i, turn in self.hot.turns(keys, _now_s()) if anywhere else ():
            ranks[i] = self._turned(keys[i], ranks[i].tolist(), turn)
            answers[i] += 1
        return Course(self._all, route(ranks, answers))

    def _turned(self, key: PageKey, ranks: list[int], turn: int) -> Ranks:
        """A ranking of the same length that begins with its node at ``turn``."""
        everybody: list[int] = self._all.placement.ranks([key], turn + 1)[0].tolist()
        first = everybody[-1]
        rest = [node for node in ranks if node != first]
        return np.array([first, *rest][: len(ranks)], dtype=np.intp)

    def writing(self, keys: Sequence[PageKey]) -> Course:
        """Where to put ``keys``: the first node that can be reached."""
        ranks = self._lasting.placement.ranks(keys, 1 + SPARE_RANKS)
        answers = np.ones(len(keys), dtype=np.intp)
        return Course(self._lasting, route(ranks, answers))

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
    releases: Releases
    counters: Counter[str]

    @property
    def num_pages_per_batch(self) -> int:
        return max(1, self.config.batch_nbytes // self.spec.page_nbytes)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
