"""Which local pages are free, and how many holders each of the others has.

Owns reference counts only: no memory, no torch. One way to give a page back (``release``, once for
each hold), for every holder: a request's page table, the radix cache, a publish or pull in flight.
A page returns to the free list when its last holder lets go, so a page that a transfer
still touches is never handed to someone else.

Page 0 is the *scratch* page: never allocated; the engine writes there what must not be kept.

Invariant: ``num_free + num_held == num_pages - 1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.page import PageId

SCRATCH_PAGE = PageId(0)


class PageAllocator:
    """Reference-counted page ids ``1..num_pages-1``.

    Raises:
        ValueError: fewer than 2 pages (one is the scratch page).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: must be at least 2 (page 0 is scratch)")
        self.num_pages = num_pages
        self._free: list[PageId] = [PageId(i) for i in range(num_pages - 1, 0, -1)]
        self._refs = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def refs(self, page_id: PageId) -> int:
        return self._refs[page_id]

    def allocate(self, count: int) -> list[PageId] | None:
        """Return ``count`` pages with one holder each, or None (and take nothing)."""
        assert count >= 0, count
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page_id in pages:
            self._refs[page_id] = 1
        return pages

    def retain(self, page_ids: Iterable[PageId]) -> None:
        """Add one holder to each page; the pages must be held already."""
        for page_id in page_ids:
            assert self._refs[page_id] > 0, f"page {page_id} is free"
            self._refs[page_id] += 1

    def release(self, page_ids: Sequence[PageId]) -> None:
        """Take one holder from each page; pages without holders become free."""
        for page_id in page_ids:
            assert self._refs[page_id] > 0, f"page {page_id} is released twice"
            self._refs[page_id] -= 1
            if self._refs[page_id] == 0:
                self._free.append(page_id)

    def check(self) -> None:
        """Assert the invariants; O(num_pages)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert SCRATCH_PAGE not in free
        for page_id in range(1, self.num_pages):
            assert (self._refs[page_id] == 0) == (page_id in free), page_id
