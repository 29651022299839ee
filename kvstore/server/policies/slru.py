"""Segmented LRU: a page must be used again to be protected (Karedla, Love, Wherry 1994).

``score`` holds the logical time at which the page took its place, plus a bit when that place is in
the protected level. Protected pages beyond ``PROTECTED_SHARE`` are handed back, oldest first, to
the young end of probation::

    probation (level 0)  ── used again ──▶  protected (level 1)
         ▲   evicted from here                    │ oldest, when overfull
         └────────────────────────────────────────┘
"""

from __future__ import annotations

import numpy as np

from kvstore.server.key_index import Rows
from kvstore.server.page_table import PageTable
from kvstore.server.policies.base import DEPTH_BITS, EvictionPolicy

PROTECTED_SHARE = 0.8
_PROTECTED = 1 << 62
_DEPTH_MAX = (1 << DEPTH_BITS) - 1


class Slru(EvictionPolicy):
    """See the module's docstring."""

    name = "slru"
    num_levels = 2

    def __init__(self, table: PageTable) -> None:
        super().__init__(table)
        self._num = 0
        self._num_protected = 0

    def admitted(self, row: int, now: int) -> None:
        self._num += 1
        self._table.score[row] = now

    def touched(self, row: int, now: int) -> None:
        self._num_protected += not self._table.score[row] & _PROTECTED
        self._table.score[row] = _PROTECTED | now

    def touched_many(self, rows: Rows, now: int) -> None:
        rows = np.unique(rows)
        scores = self._table.scores
        self._num_protected += int((scores[rows] < _PROTECTED).sum())
        scores[rows] = _PROTECTED | now

    def inherit(self, parent: int, child: int) -> None:
        before = self._table.score[parent]
        super().inherit(parent, child)
        self._num_protected += before < _PROTECTED <= self._table.score[parent]

    def cooled(self, row: int) -> None:
        self.demote(row, 0)

    def left(self, row: int) -> None:
        self._num -= 1
        self._num_protected -= self.level(row)

    def level(self, row: int) -> int:
        return self._table.score[row] >> 62  # type: ignore[no-any-return]

    def order(self, row: int) -> int:
        place: int = self._table.score[row] & ~_PROTECTED
        depth: int = min(self._table.depth[row], _DEPTH_MAX)
        return place << DEPTH_BITS | _DEPTH_MAX - depth

    def overfull(self, level: int) -> bool:
        return level == 1 and self._num_protected > PROTECTED_SHARE * self._num

    def demote(self, row: int, now: int) -> None:
        self._num_protected -= self.level(row)
        self._table.score[row] = now
