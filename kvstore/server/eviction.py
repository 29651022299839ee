"""Whom to evict next: least recently used leaves first.

Owns the order of candidates, as a heap with lazy deletion. Knows no leases and frees nothing: the
directory says when a page becomes evictable (``offer``) and whether it still is (``pop``).

A popped candidate whose page was touched since goes back with its new stamp; a page that is not
evictable any more is dropped and offered again by the directory when it becomes so. So a touch
costs nothing, and the heap holds each page at most once.

Order: oldest stamp; within one stamp (one request) the deepest page, so that what is left of a
prompt is always a prefix; then the oldest grant.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvstore.server.entry import Entry


class EvictionQueue:
    """Candidates for eviction, coldest leaf first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, entry: Entry) -> None:
        """Make ``entry`` a candidate; does nothing when it is one already."""
        if not entry.queued:
            entry.queued = True
            item = (entry.stamp, -entry.identity.depth, entry.slot.generation, entry)
            heapq.heappush(self._heap, item)

    def pop(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """Take out the coldest candidate that is ``evictable``; None when there is none."""
        while self._heap:
            stamp, _, _, entry = heapq.heappop(self._heap)
            entry.queued = False
            if not evictable(entry):
                continue
            if entry.stamp == stamp:
                return entry
            self.offer(entry)
        return None

    def clear(self) -> None:
        for *_, entry in self._heap:
            entry.queued = False
        self._heap.clear()
