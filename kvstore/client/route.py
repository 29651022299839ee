"""Which nodes to try for each page of one call, and in which order.

Owns, per page, its ranking, how far down it has come, and how many more answers it is worth asking
for. Pure; knows no links: who can be reached now is passed in.

A page that a node answered for ("absent") costs one of its answers; a node that cannot be reached
costs none, so the next in rank takes its place::

    ranks      A      B      C      D        replicas 2: two answers
               ▲ unreachable   ▲ absent
               └───────▶ B ────┘──▶ C: absent ──▶ done
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.placement import Ranks

Indexes = npt.NDArray[np.intp]
Groups = list[tuple[int, list[int]]]  # (node, pages)

SHORT_MAX = 16  # up to so many pages plain loops are faster than arrays


def split(nodes: Indexes, indexes: Indexes) -> Groups:
    """Group ``indexes`` by their node, in the order of nodes; each group keeps its order."""
    if not len(nodes):
        return []
    order = np.argsort(nodes, kind="stable")
    ordered = nodes[order]
    bounds = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    grouped = indexes[order]
    return [(int(ordered[start]), grouped[start:end].tolist()) for start, end in pairwise(bounds)]


class Route(Protocol):
    """The way of the pages of one call down their rankings. Nodes are positions in ``usable``."""

    def groups(self, indexes: Sequence[int], usable: Sequence[bool]) -> Groups:
        """The next node of each page that has one, with its pages; skips unusable nodes."""
        ...

    def all_groups(self, usable: Sequence[bool]) -> Groups:
        """Every node worth asking, with its pages: for a question asked of all at once."""
        ...

    def answered(self, indexes: Sequence[int]) -> None:
        """The present node of these pages has answered, and they were not there."""
        ...

    def unreachable(self, indexes: Sequence[int]) -> None:
        """The present node of these pages did not answer."""
        ...

    def skipped(self, indexes: Sequence[int]) -> list[int]:
        """Those of these pages for which a node that may hold them was not asked: unusable."""
        ...


def route(ranks: Ranks, num_answers: Indexes) -> Route:
    """Make the way of some pages.

    Args:
        ranks: ``[num_pages, num_ranks]`` positions of nodes.
        num_answers: ``[num_pages]`` how many nodes are worth asking for each page.
    """
    if len(ranks) <= SHORT_MAX:
        return _ShortRoute(ranks.tolist(), num_answers.tolist())
    return _LongRoute(ranks, num_answers)


class _ShortRoute:
    """A ``Route`` of few pages."""

    def __init__(self, ranks: list[list[int]], num_answers: list[int]) -> None:
        self._ranks = ranks
        self._left = num_answers
        self._at = [0] * len(ranks)
        self._skipped = [False] * len(ranks)

    def groups(self, indexes: Sequence[int], usable: Sequence[bool]) -> Groups:
        found: dict[int, list[int]] = {}
        for i in indexes:
            ranks = self._ranks[i]
            if self._left[i] <= 0:
                continue
            while self._at[i] < len(ranks) and not usable[ranks[self._at[i]]]:
                self._at[i] += 1
                self._skipped[i] = True
            if self._at[i] < len(ranks):
                found.setdefault(ranks[self._at[i]], []).append(i)
        return sorted(found.items())

    def all_groups(self, usable: Sequence[bool]) -> Groups:
        found: dict[int, list[int]] = {}
        for i, ranks in enumerate(self._ranks):
            for node in [node for node in ranks if usable[node]][: self._left[i]]:
                found.setdefault(node, []).append(i)
        return sorted(found.items())

    def answered(self, indexes: Sequence[int]) -> None:
        for i in indexes:
            self._at[i] += 1
            self._left[i] -= 1

    def unreachable(self, indexes: Sequence[int]) -> None:
        for i in indexes:
            self._at[i] += 1

    def skipped(self, indexes: Sequence[int]) -> list[int]:
        return [i for i in indexes if self._skipped[i]]


class _LongRoute:
    """A ``Route`` of many pages: vectorised."""

    def __init__(self, ranks: Ranks, num_answers: Indexes) -> None:
        self._ranks = ranks
        self._left = num_answers
        self._at = np.zeros(len(ranks), dtype=np.intp)
        self._skipped = np.zeros(len(ranks), dtype=np.bool_)

    def groups(self, indexes: Sequence[int], usable: Sequence[bool]) -> Groups:
        up = np.array(usable, dtype=np.bool_)
        pages = np.asarray(indexes, dtype=np.intp)
        num_ranks = self._ranks.shape[1]
        while True:
            pages = pages[(self._at[pages] < num_ranks) & (self._left[pages] > 0)]
            nodes = self._ranks[pages, self._at[pages]]
            skipped = ~up[nodes]
            if not skipped.any():
                return split(nodes, pages)
            self._at[pages[skipped]] += 1
            self._skipped[pages[skipped]] = True

    def all_groups(self, usable: Sequence[bool]) -> Groups:
        asked = np.array(usable, dtype=np.bool_)[self._ranks]
        asked &= np.cumsum(asked, axis=1) <= self._left[:, None]
        pages, columns = np.nonzero(asked)
        return split(self._ranks[pages, columns], pages)

    def answered(self, indexes: Sequence[int]) -> None:
        pages = np.asarray(indexes, dtype=np.intp)
        self._at[pages] += 1
        self._left[pages] -= 1

    def unreachable(self, indexes: Sequence[int]) -> None:
        self._at[np.asarray(indexes, dtype=np.intp)] += 1

    def skipped(self, indexes: Sequence[int]) -> list[int]:
        return [i for i in indexes if self._skipped[i]]
