"""Least frequently used first.

``score`` counts uses since the page came in. No ageing: a page that was hot for an hour stays for
long after; ``heat`` is the policy that forgets.
"""

from __future__ import annotations

from kvstore.server.key_index import Rows
from kvstore.server.policies.base import DEPTH_BITS, EvictionPolicy

_RECENCY_BITS = 48 + DEPTH_BITS


class Lfu(EvictionPolicy):
    """Fewest uses first; among equals the oldest touch."""

    name = "lfu"

    def admitted(self, row: int, now: int) -> None:
        self._table.score[row] = 0

    def touched(self, row: int, now: int) -> None:
        self._table.score[row] += 1

    def touched_many(self, rows: Rows, now: int) -> None:
        self._table.scores[rows] += 1

    def order(self, row: int) -> int:
        num_uses: int = self._table.score[row]
        return num_uses << _RECENCY_BITS | self.by_recency(row)
