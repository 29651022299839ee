"""The pages of one class (tenant and priority) that may go, in the policy's order.

Owns the order of candidates, as heaps with lazy deletion. Knows no leases and frees nothing: the
ledger says when a page becomes a candidate and whether it still is one.

A candidate is one integer: ``order << 32 | row``. A popped candidate whose order has risen since
goes back with its new order; one that may not go any more is dropped and offered again by the
ledger when it may. So a touch costs nothing here, and a heap holds each page about once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvstore.server.page_table import CANDIDATE, PageTable
from kvstore.server.policies import EvictionPolicy

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
DEMOTIONS_MAX = 8  # per page taken out
_STALE_SLACK = 1024  # candidates that have gone otherwise, kept before a heap is cleaned


class Candidates:
    """Candidates of one priority, coldest first.

    Args:
        belongs: whether a row is (still) of this class.
    """

    def __init__(
        self, table: PageTable, policy: EvictionPolicy, belongs: Callable[[int], bool]
    ) -> None:
        self._table = table
        self._policy = policy
        self._belongs = belongs
        self._heaps: list[list[int]] = [[] for _ in range(policy.num_levels)]
        self._limits = [_STALE_SLACK] * policy.num_levels  # lengths at which heaps are cleaned

    def __len__(self) -> int:
        """At least the number of candidates."""
        return sum(len(heap) for heap in self._heaps)

    def offer(self, row: int) -> None:
        """Make ``row`` a candidate; does nothing when it is one already."""
        if not self._table.queued[row]:
            self._table.queued[row] = CANDIDATE
            self._push(row)

    def _push(self, row: int) -> None:
        policy = self._policy
        level = policy.level(row)
        heap = self._heaps[level]
        heapq.heappush(heap, policy.order(row) << _ROW_BITS | row)
        if len(heap) > self._limits[level]:
            self._clean(level)

    def _clean(self, level: int) -> None:
        """Drop what is no candidate any more, so that pages which go otherwise (a clear, say)
        leave nothing behind. Doubling limits: constant cost per candidate."""
        queued = self._table.queued
        lowest: dict[int, int] = {}
        for item in self._heaps[level]:
            row = item & _ROW_MASK
            if queued[row] == CANDIDATE and self._belongs(row):
                lowest[row] = min(item, lowest.get(row, item))
        heap = list(lowest.values())
        heapq.heapify(heap)
        self._heaps[level] = heap
        self._limits[level] = 2 * len(heap) + _STALE_SLACK

    def pop(self, evictable: Callable[[int], bool], now: int) -> int | None:
        """Take out the coldest candidate that is ``evictable``; None when there is none."""
        for level in range(1, len(self._heaps)):
            self._hand_down(level, evictable, now)
        for level in range(len(self._heaps)):
            row = self._pop_level(level, evictable)
            if row is not None:
                return row
        return None

    def _pop_level(self, level: int, evictable: Callable[[int], bool]) -> int | None:
        heap, queued, policy = self._heaps[level], self._table.queued, self._policy
        while heap:
            item = heapq.heappop(heap)
            row = item & _ROW_MASK
            if queued[row] != CANDIDATE or not self._belongs(row):
                continue
            if not evictable(row):
                queued[row] = 0
            elif policy.level(row) != level or policy.order(row) != item >> _ROW_BITS:
                self._push(row)
            else:
                queued[row] = 0
                return row
        return None

    def _hand_down(self, level: int, evictable: Callable[[int], bool], now: int) -> None:
        for _ in range(DEMOTIONS_MAX):
            if not self._policy.overfull(level):
                return
            row = self._pop_level(level, evictable)
            if row is None:
                return
            self._policy.demote(row, now)
            self.offer(row)
