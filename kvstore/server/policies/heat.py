"""Coldest first: uses, weighed by how long ago they were.

The heat itself is kept for all pages, whatever the policy (``kvstore/server/heat.py``).
"""

from __future__ import annotations

from kvstore.server.policies.base import DEPTH_BITS, EvictionPolicy

_STEPS = 1 << 16  # heats closer than this part of a half-life count as equal
_DEPTH_MAX = (1 << DEPTH_BITS) - 1


class Heat(EvictionPolicy):
    """Lowest heat first; among equals the deepest page."""

    name = "heat"

    def order(self, row: int) -> int:
        depth: int = min(self._table.depth[row], _DEPTH_MAX)
        return int(self._table.heat[row] * _STEPS) << DEPTH_BITS | _DEPTH_MAX - depth
