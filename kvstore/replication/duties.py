"""Who should hold a page besides this node: the decision behind every copy.

Owns the present and the settled view of the store nodes. A synchronous core, vectorised over keys;
knows no pages, no network.

A page belongs on the first ``replicas`` nodes of its ranking. A node that holds a page owes it to
those of them that may lack it; a page that does not belong here is *surplus*: it goes as soon as
all those who should hold it do. So one rule covers a fresh page (the others get a copy), a lost
node (its place is taken by the next in rank), a join (the new node gets its share), draining (this
node belongs nowhere) and a page that was put here because its first node did not answer.

``since`` the settled nodes only pages whose holders have changed matter: after the loss of one of
N nodes these are R/N of all. A node that came back with another incarnation counts as changed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.page import PageKey
from kvstore.placement import Placement, Ranks
from transfer.identity import NodeId

_NOBODY = -1  # in arrays only: a node of the settled view that is not there any more


class Nodes(NamedTuple):
    """The store nodes that pages belong on, and which life of each."""

    placement: Placement
    incarnations: Mapping[NodeId, str]


NO_NODES = Nodes(Placement([]), {})


class Owed(NamedTuple):
    """What follows for some pages.

    Attributes:
        to: pages by the node that should hold them, too.
        surplus: pages that do not belong here.
    """

    to: dict[NodeId, list[PageKey]]
    surplus: list[PageKey]


class Duties:
    """The duties of one node.

    Args:
        own: this node's id; it need not be among the nodes.
        replicas: how many nodes should hold each page.
    """

    def __init__(self, own: NodeId, replicas: int) -> None:
        self.nodes = NO_NODES
        self.settled = NO_NODES  # where all pages were where they belong
        self._own = own
        self._replicas = replicas

    def follow(self, nodes: Nodes) -> bool:
        """Take over new nodes; False when nothing has changed."""
        if nodes == self.nodes:
            return False
        self.nodes = nodes
        return True

    def settle(self) -> None:
        """All pages are where they belong among the present nodes."""
        self.settled = self.nodes

    @property
    def others(self) -> list[NodeId]:
        return [node_id for node_id in self.nodes.placement.node_ids if node_id != self._own]

    def owed(
        self, keys: Sequence[PageKey], *, num_nodes: int | None = None, changed_only: bool = False
    ) -> Owed:
        """Who should hold ``keys``, too: the first ``num_nodes`` nodes instead of ``replicas``.

        ``changed_only`` leaves out pages whose holders are those of the settled nodes.
        """
        placement = self.nodes.placement
        if not self.others or not keys:
            return Owed({}, [])
        ranks = placement.ranks(keys, num_nodes or self._replicas)
        if changed_only:
            changed = self._changed(keys, ranks)
            keys = [keys[i] for i in changed.tolist()]
            ranks = ranks[changed]
        to: dict[NodeId, list[PageKey]] = {}
        here = np.zeros(len(keys), dtype=np.bool_)
        for position, node_id in enumerate(placement.node_ids):
            holds = (ranks == position).any(axis=1)
            if node_id == self._own:
                here = holds
            elif holds.any():
                to[node_id] = [keys[i] for i in np.flatnonzero(holds).tolist()]
        return Owed(to, [keys[i] for i in np.flatnonzero(~here).tolist()])

    def asked_before(self, keys: Sequence[PageKey]) -> dict[NodeId, list[PageKey]]:
        """Who should hold ``keys`` and is asked for them before this node."""
        placement = self.nodes.placement
        if not self.others or not keys:
            return {}
        ranks = placement.ranks(keys, self._replicas)
        own = np.array([node_id == self._own for node_id in placement.node_ids], dtype=np.bool_)
        before = np.cumsum(own[ranks], axis=1) == 0
        to: dict[NodeId, list[PageKey]] = {}
        for position, node_id in enumerate(placement.node_ids):
            asked = ((ranks == position) & before).any(axis=1)
            if asked.any():
                to[node_id] = [keys[i] for i in np.flatnonzero(asked).tolist()]
        return to

    def substitutes(
        self, keys: Sequence[PageKey], down: Container[NodeId]
    ) -> dict[NodeId, list[PageKey]]:
        """Who should hold ``keys`` for now, in place of nodes that do not answer.

        A page that should lie on k nodes of ``down`` goes to the next k in its ranking that answer.
        """
        node_ids = self.nodes.placement.node_ids
        answers = np.array([node_id not in down for node_id in node_ids], dtype=np.bool_)
        num_down = len(node_ids) - int(answers.sum())
        if not num_down or not keys:
            return {}
        ranks = self.nodes.placement.ranks(keys, self._replicas + num_down)
        live = answers[ranks]
        chosen = live & (np.cumsum(live, axis=1) <= self._replicas)
        chosen[:, : self._replicas] = False  # those hold it anyway
        to: dict[NodeId, list[PageKey]] = {}
        for position, node_id in enumerate(node_ids):
            holds = ((ranks == position) & chosen).any(axis=1)
            if node_id != self._own and holds.any():
                to[node_id] = [keys[i] for i in np.flatnonzero(holds).tolist()]
        return to

    def _changed(self, keys: Sequence[PageKey], ranks: Ranks) -> npt.NDArray[np.intp]:
        """Which of ``keys`` had other holders among the settled nodes."""
        settled = self.settled.placement
        if not len(settled):
            return np.arange(len(keys))
        before = settled.ranks(keys, ranks.shape[1])
        if before.shape != ranks.shape:
            return np.arange(len(keys))
        same = np.sort(self._renamed()[before], axis=1) == np.sort(ranks, axis=1)
        return np.flatnonzero(~same.all(axis=1))

    def _renamed(self) -> npt.NDArray[np.intp]:
        """Positions among the settled nodes as positions among the present ones."""
        positions = {node_id: i for i, node_id in enumerate(self.nodes.placement.node_ids)}
        lives, before = self.nodes.incarnations, self.settled.incarnations
        return np.array(
            [
                positions[node_id]
                if node_id in positions and lives.get(node_id) == before.get(node_id)
                else _NOBODY
                for node_id in self.settled.placement.node_ids
            ],
            dtype=np.intp,
        )
