"""Which store node holds a page: weighted rendezvous hashing.

Owns a pure function of (page key, live store nodes). Every client with the same view computes the
same answer; when a node joins or leaves, only the pages that move to it or were on it move.

Each (key, node) pair gets a score; the highest wins. The score mixes xxh3-64 of the key with
xxh3-64 of the node id (splitmix64 finaliser, vectorised over all pairs) into a uniform ``u`` in
(0, 1) and weighs it as ``-weight / ln(u)`` (Schindelhauer & Schomaker 2005), so that a node of
double weight holds double the pages. Ties go to the smaller node id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.page import PageKey
from transfer.identity import NodeId, Role
from transfer.membership import Member, MembershipView

WEIGHT_LABEL = "capacity_weight"
WEIGHT_MAX = 1000.0

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Placement:
    """Placement over a fixed set of store nodes.

    Args:
        nodes: node ids with their weights, in any order.
    """

    def __init__(self, nodes: Sequence[tuple[NodeId, float]]) -> None:
        ordered = sorted(nodes)
        self.node_ids = [node_id for node_id, _ in ordered]
        self._seeds = np.array(
            [xxhash.xxh3_64_intdigest(node_id.encode()) for node_id in self.node_ids],
            dtype=np.uint64,
        )
        self._weights = np.array([weight for _, weight in ordered], dtype=np.float64)

    def place(self, keys: Sequence[PageKey]) -> list[NodeId]:
        """Return the node of every key; there must be at least one node."""
        assert self.node_ids, "no store node to place pages on"
        if len(self.node_ids) == 1:
            return self.node_ids * len(keys)
        hashes = np.array([xxhash.xxh3_64_intdigest(key) for key in keys], dtype=np.uint64)
        scores = self._weights / -np.log(_uniform(hashes[:, None] ^ self._seeds[None, :]))
        return [self.node_ids[i] for i in np.argmax(scores, axis=1).tolist()]


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


def placement_of(view: MembershipView) -> Placement:
    """Placement over the live store nodes of ``view`` that are not draining."""
    return Placement([(m.node_id, weight_of(m)) for m in view.with_role(Role.STORE)])
