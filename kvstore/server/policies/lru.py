"""Least recently used first."""

from __future__ import annotations

from kvstore.server.policies.base import EvictionPolicy


class Lru(EvictionPolicy):
    """Oldest touch first."""

    name = "lru"

    def order(self, row: int) -> int:
        return self.by_recency(row)
