"""Which store nodes hold a page: weighted rendezvous hashing.

Owns a pure function of (page key, live store nodes). Every client with the same view computes the
same answer. When a node joins, only its share moves, and the node that a page moved away from is
the next in rank; when a node leaves, only its pages move, to the next in rank.

Each (key, node) pair gets a score; nodes are ranked by it, the highest first. The score mixes
xxh3-64 of the key with xxh3-64 of the node id (splitmix64 finaliser, vectorised over all pairs)
into a uniform ``u`` in (0, 1) and weighs it as ``-weight / ln(u)`` (Schindelhauer & Schomaker
2005), so that a node of double weight holds double the pages. Ties go to the smaller node id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.config import REPLICAS_MAX
from kvstore.page import PageKey
from transfer.identity import NodeId, Role
from transfer.membership import Member, MembershipView

WEIGHT_LABEL = "capacity_weight"
WEIGHT_MAX = 1000.0
REPLICAS_FACT = "replicas"
_PAIRS_MAX = 1 << 18  # (key, node) pairs scored at once: 2 MiB per array

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Ranks = npt.NDArray[np.intp]  # [num_keys, num_ranks] positions in ``Placement.node_ids``


class Placement:
    """Placement over a fixed set of store nodes.

    Args:
        nodes: node ids with their weights, in any order.
    """

    def __init__(self, nodes: Sequence[tuple[NodeId, float]]) -> None:
        ordered = sorted(nodes)
        self.node_ids = [node_id for node_id, _ in ordered]
        self.weights = [weight for _, weight in ordered]
        self._seeds = np.array(
            [xxhash.xxh3_64_intdigest(node_id.encode()) for node_id in self.node_ids],
            dtype=np.uint64,
        )
        self._weights = np.array(self.weights, dtype=np.float64)

    def __len__(self) -> int:
        return len(self.node_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.node_ids == other.node_ids and self.weights == other.weights

    __hash__ = None  # type: ignore[assignment]

    def place(self, keys: Sequence[PageKey]) -> list[NodeId]:
        """Return the first node of every key; there must be at least one node."""
        assert self.node_ids, "no store node to place pages on"
        if len(self.node_ids) == 1:
            return self.node_ids * len(keys)
        return [self.node_ids[i] for i in self.ranks(keys, 1)[:, 0].tolist()]

    def ranks(self, keys: Sequence[PageKey], num_ranks: int) -> Ranks:
        """Return the first ``num_ranks`` nodes of every key (fewer when there are fewer nodes)."""
        num_ranks = min(num_ranks, len(self.node_ids))
        if len(self.node_ids) <= 1 or not keys:
            return np.zeros((len(keys), num_ranks), dtype=np.intp)
        out = np.empty((len(keys), num_ranks), dtype=np.intp)
        step = max(1, _PAIRS_MAX // len(self.node_ids))
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            hashes = np.array([xxhash.xxh3_64_intdigest(key) for key in part], dtype=np.uint64)
            out[start : start + step] = self._best(hashes, num_ranks)
        return out

    def _best(self, hashes: npt.NDArray[np.uint64], num_ranks: int) -> Ranks:
        """Positions of the highest scores; the smallest ``-ln(u) / weight`` are the highest."""
        costs: npt.NDArray[np.float64] = (
            -np.log(_uniform(hashes[:, None] ^ self._seeds[None, :])) / self._weights
        )
        if num_ranks == 1:
            first: Ranks = np.argmin(costs, axis=1)
            return first[:, None]
        ranked: Ranks = np.argsort(costs, axis=1, kind="stable")
        return ranked[:, :num_ranks]


def _uniform(mixed: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Map 64-bit words to (0, 1), all bits diffused (splitmix64)."""
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)


def weight_of(member: Member) -> float:
    """The member's weight by its label; 1.0 when it states none or nonsense."""
    try:
        weight = float(member.info.labels.get(WEIGHT_LABEL, "1"))
    except ValueError:
        return 1.0
    return weight if math.isfinite(weight) and 0 < weight <= WEIGHT_MAX else 1.0


def placement_of(view: MembershipView, *, include_draining: bool = False) -> Placement:
    """Placement over the live store nodes of ``view``; draining ones get no new pages."""
    members = view.with_role(Role.STORE, include_draining=include_draining)
    return Placement([(m.node_id, weight_of(m)) for m in members])


def replicas_of(view: MembershipView) -> int:
    """Copies that the store nodes of ``view`` keep of each page; 1 when none states it."""
    stated = (m.info.contract.get(REPLICAS_FACT, "") for m in view.members)
    counts = [int(text) for text in stated if text.isascii() and text.isdigit()]
    return max(1, min(max(counts, default=1), REPLICAS_MAX))
