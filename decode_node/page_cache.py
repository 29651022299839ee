"""Which full pages lie in the local pool, by content key: shared by every sequence of the node.

Owns key → page id of **full, immutable** pages, with one allocator reference for each; decides
what to evict. Sans-I/O: no clock (recency is an order), no memory. Knows no sequences.

Invariants:

* A page is cached only while its parent is: every cached page can be reached from the root.
* Pages with a holder besides the cache are never evicted, children go before their parents.
* The event log says exactly what is cached.

Recency: ``_pages`` is ordered, oldest first. A chain is touched deepest page first, so that a page
is never older than its cached descendants of the same chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.page_allocator import PageAllocator
from kvstore.events import KvEventLog
from kvstore.page import PageId, PageKey


@dataclass(slots=True)
class _Cached:
    page_id: PageId
    parent: PageKey | None
    num_children: int = 0


class PageCache:
    """Full pages by key.

    Args:
        allocator: counts the holders; the cache is one of them.
        log: records what enters and leaves.
    """

    def __init__(self, allocator: PageAllocator, log: KvEventLog) -> None:
        self._allocator = allocator
        self._log = log
        self._pages: dict[PageKey, _Cached] = {}
        self._ids: dict[PageId, None] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def holds(self, page_id: PageId) -> bool:
        """True when the cache is one of the page's holders."""
        return page_id in self._ids

    @property
    def num_evictable(self) -> int:
        """Pages that only the cache holds; O(pages)."""
        return sum(self._allocator.refs(c.page_id) == 1 for c in self._pages.values())

    def match(self, keys: Sequence[PageKey]) -> list[PageId]:
        """Return the pages of the longest cached prefix of ``keys``, each with a new holder.

        The caller gives them back with ``allocator.release``.
        """
        found: list[PageId] = []
        for key in keys:
            cached = self._pages.get(key)
            if cached is None:
                break
            found.append(cached.page_id)
        self._touch(keys[: len(found)])
        self._allocator.retain(found)
        return found

    def page_of(self, key: PageKey) -> PageId | None:
        """Return the page of ``key``, without a holder."""
        cached = self._pages.get(key)
        return None if cached is None else cached.page_id

    def match_one(self, key: PageKey) -> PageId:
        """Return the page of a cached key with a new holder."""
        page_id = self._pages[key].page_id
        self._touch([key])
        self._allocator.retain([page_id])
        return page_id

    def insert(self, key: PageKey, parent: PageKey | None, page_id: PageId) -> bool:
        """Cache a full page that will not be written any more; True if it was taken.

        False when the key is cached already (the caller's page stays private to it), or when the
        parent is not cached.
        """
        if key in self._pages:
            return False
        if parent is not None:
            cached_parent = self._pages.get(parent)
            if cached_parent is None:
                return False
            cached_parent.num_children += 1
        self._allocator.retain([page_id])
        self._pages[key] = _Cached(page_id, parent)
        self._ids[page_id] = None
        if parent is not None:
            self._touch([parent])
        self._log.record(stored=[key])
        return True

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages that only the cache holds, oldest first; return how many.

        One pass. A page that is in use counts as used now: it moves to the young end, so that the
        next pass does not meet it again. A parent that was passed because of its children goes
        right after the last of them, whatever its age.
        """
        removed: list[PageKey] = []
        passed: set[PageKey] = set()
        for key in list(self._pages):
            if len(removed) >= count:
                break
            if not self._is_evictable(key):
                self._touch([key])
                passed.add(key)
                continue
            last: PageKey | None = key
            while last is not None and len(removed) < count and self._is_evictable(last):
                parent = self._pages[last].parent
                self._remove(last)
                removed.append(last)
                last = parent if parent in passed else None
        self.num_evicted += len(removed)
        self._log.record(removed=removed)
        return len(removed)

    def _is_evictable(self, key: PageKey) -> bool:
        cached = self._pages[key]
        return cached.num_children == 0 and self._allocator.refs(cached.page_id) == 1

    def clear(self) -> int:
        """Forget every page (their other holders keep them); return how many."""
        count = len(self._pages)
        self._allocator.release(list(self._ids))
        self._pages.clear()
        self._ids.clear()
        self._log.clear()
        return count

    def _touch(self, keys: Sequence[PageKey]) -> None:
        for key in reversed(keys):
            self._pages[key] = self._pages.pop(key)

    def _remove(self, key: PageKey) -> None:
        cached = self._pages.pop(key)
        del self._ids[cached.page_id]
        if cached.parent is not None:
            self._pages[cached.parent].num_children -= 1
        self._allocator.release([cached.page_id])

    def check(self) -> None:
        """Assert the invariants; O(pages)."""
        children = dict.fromkeys(self._pages, 0)
        for cached in self._pages.values():
            assert self._allocator.refs(cached.page_id) >= 1, cached
            if cached.parent is not None:
                assert cached.parent in self._pages, "a page is cached without its parent"
                children[cached.parent] += 1
        assert all(self._pages[k].num_children == n for k, n in children.items())
        assert len(self._ids) == len(self._pages), "one page under two keys"
        assert all(cached.page_id in self._ids for cached in self._pages.values())
        events = self._log.snapshot().events
        held = {key for event in events for key in getattr(event, "keys", ())}
        assert held == set(self._pages), "the event log differs from the cache"
