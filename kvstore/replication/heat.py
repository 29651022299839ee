"""Which pages are read so often that one set of replicas is not enough.

Owns a bounded table of recent reads by page. A synchronous core: the time is passed in. Reads count
fully when they happen and half after every ``HALF_LIFE_S``; a page above the threshold should be
held by twice as many nodes for each doubling of its reads beyond it. It stays hot for a while after
it has cooled: once copies take over part of its reads, this node sees fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.page import PageKey

HALF_LIFE_S = 10.0
HOLD_S = 30.0  # a page keeps its number of nodes for at least this long
TRACKED_MAX = 16_384  # pages whose reads are counted
HOT_MAX = 1024  # pages that are spread over more nodes at one time


@dataclass(slots=True)
class _Hot:
    num_nodes: int
    until_s: float
    spread: bool = False  # the copies are there: readers may be told


class HotPages:
    """Counts reads; says how many nodes should hold a page.

    Args:
        threshold: reads within about ``HALF_LIFE_S`` that make a page hot.
        replicas: nodes that hold any page.
    """

    def __init__(self, threshold: int, replicas: int) -> None:
        self._threshold = threshold
        self._replicas = replicas
        self._reads: dict[PageKey, float] = {}
        self._hot: dict[PageKey, _Hot] = {}
        self._halved_s: float | None = None

    def __len__(self) -> int:
        return len(self._hot)

    def note(
        self, keys: Sequence[PageKey], num_nodes_max: int, now_s: float
    ) -> list[tuple[PageKey, int]]:
        """Count one read of each key; returns pages that more nodes should hold, and how many."""
        self._age(now_s)
        reads = self._reads
        out = []
        for key in keys:
            count = reads.get(key, 0.0) + 1.0
            if count == 1.0 and len(reads) >= TRACKED_MAX:
                continue
            reads[key] = count
            if count >= self._threshold:
                num_nodes = self._warm(key, count, num_nodes_max, now_s)
                if num_nodes is not None:
                    out.append((key, num_nodes))
        return out

    def _warm(self, key: PageKey, count: float, num_nodes_max: int, now_s: float) -> int | None:
        doublings = int(count / self._threshold).bit_length()
        wanted = min(self._replicas << doublings, num_nodes_max)
        hot = self._hot.get(key)
        if hot is not None and hot.num_nodes >= wanted:
            hot.until_s = now_s + HOLD_S
            return None
        if wanted <= self._replicas or (hot is None and len(self._hot) >= HOT_MAX):
            return None
        self._hot[key] = _Hot(wanted, now_s + HOLD_S)
        return wanted

    def spread(self, key: PageKey) -> None:
        """The copies of a hot page are where they belong."""
        if key in self._hot:
            self._hot[key].spread = True

    def num_nodes(self, keys: Sequence[PageKey]) -> bytes:
        """One byte per key: nodes that hold it, 0 when it is not hot; empty when none is hot."""
        if not self._hot:
            return b""
        found = bytes(
            hot.num_nodes if (hot := self._hot.get(key)) is not None and hot.spread else 0
            for key in keys
        )
        return found if any(found) else b""

    def clear(self) -> None:
        """Nodes have changed: copies may be elsewhere. What is still read becomes hot again."""
        self._hot.clear()
        self._reads.clear()

    def _age(self, now_s: float) -> None:
        if self._halved_s is None:
            self._halved_s = now_s
        if now_s - self._halved_s < HALF_LIFE_S:
            return
        halvings = int((now_s - self._halved_s) / HALF_LIFE_S)
        self._halved_s += halvings * HALF_LIFE_S
        factor = 0.5 ** min(halvings, 64)
        halved = ((key, count * factor) for key, count in self._reads.items())
        self._reads = {key: count for key, count in halved if count >= 1.0}
        self._hot = {key: hot for key, hot in self._hot.items() if hot.until_s > now_s}
