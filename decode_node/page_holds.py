"""Which pages transfers in flight hold: pulls into them, write-backs out of them.

Owns the second half of a page's life: a sequence may let go of a page while bytes still move into
or out of it; the page must not be handed out before that ended. Sans-I/O; the holders call
``retain`` before and ``release`` after the transfer, exactly once each.

``num_ending`` counts pages that can be had when transfers end: with memory short, the scheduler
waits for those before it retracts anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.page_allocator import PageAllocator
from kvstore.page import PageId


class PageHolds:
    """References that transfers take on pages.

    Args:
        allocator: counts all holders.
        on_release: called after pages were given back (the scheduler may have waited for them).
    """

    def __init__(self, allocator: PageAllocator, on_release: Callable[[], None]) -> None:
        self._allocator = allocator
        self._release: Callable[[Sequence[PageId]], None] = allocator.release
        self._on_release = on_release
        self._counts: dict[PageId, int] = {}

    def release_by(self, release: Callable[[Sequence[PageId]], None]) -> None:
        """Give references back by ``release``: the page cache's, which must know of it."""
        self._release = release

    def retain(self, page_ids: Sequence[PageId]) -> None:
        self._allocator.retain(page_ids)
        for page_id in page_ids:
            self._counts[page_id] = self._counts.get(page_id, 0) + 1

    def release(self, page_ids: Sequence[PageId]) -> None:
        for page_id in page_ids:
            left = self._counts[page_id] - 1
            if left:
                self._counts[page_id] = left
            else:
                del self._counts[page_id]
        self._release(page_ids)
        self._on_release()

    def count(self, page_id: PageId) -> int:
        return self._counts.get(page_id, 0)

    @property
    def num_held(self) -> int:
        return len(self._counts)

    def num_ending(self, is_cached: Callable[[PageId], bool]) -> int:
        """Pages that nobody but transfers, and perhaps the cache, holds; O(pages held)."""
        refs = self._allocator.refs
        return sum(refs(p) == n + is_cached(p) for p, n in self._counts.items())
