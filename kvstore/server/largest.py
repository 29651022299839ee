"""Who has most: a ranking that is asked far more often for its first than for all.

Owns a heap of (value, item) with lazy correction: values change between looks, and only a rise must
be told. Knows nothing of the items, small integers, but their present value.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

_STALE_SLACK = 1024  # entries of the past, kept before the heap is cleaned


class Largest:
    """Items by value; those of value 0 are left out.

    Args:
        value: of an item now; O(1).
    """

    def __init__(self, value: Callable[[int], int]) -> None:
        self._value = value
        self._heap: list[tuple[int, int]] = []  # (-value when it rose, item)
        self._limit = _STALE_SLACK

    def rose(self, item: int) -> None:
        """The value of ``item`` is larger than when it was last told."""
        heapq.heappush(self._heap, (-self._value(item), item))
        if len(self._heap) > self._limit:
            items = dict.fromkeys(item for _, item in self._heap)
            self._heap = [(-value, item) for item in items if (value := self._value(item)) > 0]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _STALE_SLACK

    def ranked(self) -> Iterator[int]:
        """Items, the largest first, each once; O(log n) for the first. Close it before changes."""
        heap, value = self._heap, self._value
        passed: dict[int, int] = {}
        try:
            while heap:
                minus, item = heap[0]
                now = value(item)
                if item in passed or now <= 0:
                    heapq.heappop(heap)
                elif -minus != now:
                    heapq.heapreplace(heap, (-now, item))
                else:
                    heapq.heappop(heap)
                    passed[item] = minus
                    yield item
        finally:
            for item, minus in passed.items():
                heapq.heappush(heap, (minus, item))
