"""Which full pages lie in the local pool, by content key: shared by every sequence of the node.

Owns key → page id of **full, immutable** pages, with one allocator reference for each; decides
what to evict. Sans-I/O: no clock (recency is an order), no memory. Knows no sequences.

Invariants:

* A page is cached only while its parent is: every cached page can be reached from the root.
* Pages with a holder besides the cache are never evicted, children go before their parents.
* The event log says exactly what is cached.
* Who else holds a cached page got it from here, and gives it back with ``release``.

Every call costs what it touches, however many pages are cached. Recency: ``tick`` rises with each
use and when the last other holder lets go; a chain is touched deepest page first, so that a page is
not older than its cached descendants of the same chain. Pages that can go lie in a heap by tick::

    insert, match ──▶ in use ──release──▶ lone ──no child (left)──▶ idle: in the heap ──▶ evicted
                        ▲                   │                         │
                        └──────match────────┴────────────match────────┘

A page has at most one entry in the heap. One that was used or got a child since is put right when
it comes up, so each use pays for one look at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from engine.page_allocator import PageAllocator
from kvstore.events import KvEventLog
from kvstore.page import PageId, PageKey


@dataclass(slots=True, eq=False)
class _Cached:
    key: PageKey
    page_id: PageId
    parent: PageKey | None
    namespace: bytes
    num_children: int = 0
    tick: int = 0  # of the last use
    lone: bool = False  # nobody but the cache holds it
    in_heap: bool = False

    @property
    def idle(self) -> bool:
        return self.lone and not self.num_children


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
        self._by_id: dict[PageId, _Cached] = {}
        self._heap: list[tuple[int, _Cached]] = []  # every idle page; ticks differ
        self._tick = 0
        self._num_lone = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def holds(self, page_id: PageId) -> bool:
        """True when the cache is one of the page's holders."""
        return page_id in self._by_id

    @property
    def num_evictable(self) -> int:
        """Pages that only the cache holds."""
        return self._num_lone

    def match(self, keys: Sequence[PageKey]) -> list[PageId]:
        """Return the pages of the longest cached prefix of ``keys``, each with a new holder.

        The caller gives them back with ``release``.
        """
        found: list[_Cached] = []
        for key in keys:
            cached = self._pages.get(key)
            if cached is None:
                break
            found.append(cached)
        return self._use(found)

    def release(self, page_ids: Sequence[PageId]) -> None:
        """Take one holder from each page, cached or not, parents first (a page table)."""
        self._allocator.release(page_ids)
        for page_id in reversed(page_ids):
            cached = self._by_id.get(page_id)
            if cached is not None and not cached.lone and self._allocator.refs(page_id) == 1:
                cached.lone = True
                self._num_lone += 1
                self._touch([cached])
                self._enter_heap(cached)

    def page_of(self, key: PageKey) -> PageId | None:
        """Return the page of ``key``, without a holder."""
        cached = self._pages.get(key)
        return None if cached is None else cached.page_id

    def match_one(self, key: PageKey) -> PageId:
        """Return the page of a cached key with a new holder."""
        return self._use([self._pages[key]])[0]

    def insert(
        self,
        key: PageKey,
        parent: PageKey | None,
        page_id: PageId,
        tokens: bytes,
        namespace: bytes = b"",
    ) -> bool:
        """Cache a full page that will not be written any more; True if it was taken.

        The caller holds the page, and gives it back with ``release``. ``tokens`` are those of the
        page, int32 little-endian; ``namespace`` is the root of its key chain.

        False when the key is cached already (the caller's page stays private to it), or when the
        parent is not cached.
        """
        if key in self._pages:
            return False
        new = _Cached(key, page_id, parent, namespace)
        chain = [new]
        if parent is not None:
            cached_parent = self._pages.get(parent)
            if cached_parent is None:
                return False
            cached_parent.num_children += 1
            chain.insert(0, cached_parent)
        self._allocator.retain([page_id])
        self._pages[key] = self._by_id[page_id] = new
        self._touch(chain)
        self._log.stored([key], parent=parent, tokens=tokens)
        return True

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages that only the cache holds, oldest first; return how many.

        A page goes after the last of its children, whatever its age. Costs what it frees; nothing
        when all pages are in use.
        """
        removed: list[PageKey] = []
        while len(removed) < count and self._num_lone and self._heap:
            tick, cached = self._heap[0]
            if cached.idle and cached.tick > tick:
                heapreplace(self._heap, (cached.tick, cached))
                continue
            heappop(self._heap)
            cached.in_heap = False
            if cached.idle:
                self._remove(cached)
                removed.append(cached.key)
        self.num_evicted += len(removed)
        self._log.removed(removed)
        return len(removed)

    def clear(self) -> int:
        """Forget every page (their other holders keep them); return how many."""
        count = len(self._pages)
        self._allocator.release(list(self._by_id))
        self._pages.clear()
        self._by_id.clear()
        self._heap.clear()
        self._num_lone = 0
        self._log.clear()
        return count

    def clear_namespace(self, namespace: bytes) -> int:
        """Forget the pages of one namespace, as ``clear`` does; O(pages)."""
        gone = [cached for cached in self._pages.values() if cached.namespace == namespace]
        for cached in gone:
            del self._pages[cached.key], self._by_id[cached.page_id]
            self._num_lone -= cached.lone
        self._heap = [entry for entry in self._heap if entry[1].namespace != namespace]
        heapify(self._heap)
        self._allocator.release([cached.page_id for cached in gone])
        self._log.removed([cached.key for cached in reversed(gone)])
        return len(gone)

    def _use(self, chain: Sequence[_Cached]) -> list[PageId]:
        """Add a holder to each page of ``chain``."""
        for cached in chain:
            self._num_lone -= cached.lone
            cached.lone = False
        self._touch(chain)
        page_ids = [cached.page_id for cached in chain]
        self._allocator.retain(page_ids)
        return page_ids

    def _touch(self, chain: Sequence[_Cached]) -> None:
        for cached in reversed(chain):
            self._tick += 1
            cached.tick = self._tick

    def _enter_heap(self, cached: _Cached) -> None:
        """Queue an idle page; one that is queued at an older tick is put right when it comes up."""
        if cached.idle and not cached.in_heap:
            cached.in_heap = True
            heappush(self._heap, (cached.tick, cached))

    def _remove(self, cached: _Cached) -> None:
        assert cached.lone, cached
        del self._pages[cached.key], self._by_id[cached.page_id]
        self._num_lone -= 1
        if cached.parent is not None:
            parent = self._pages[cached.parent]
            parent.num_children -= 1
            self._enter_heap(parent)
        self._allocator.release([cached.page_id])

    def check(self) -> None:
        """Assert the invariants; O(pages)."""
        self._check_heap()
        children = dict.fromkeys(self._pages, 0)
        for cached in self._pages.values():
            assert self._allocator.refs(cached.page_id) >= 1, cached
            lone = self._allocator.refs(cached.page_id) == 1
            assert cached.lone == lone, "a cached page changed holders without the cache"
            if cached.parent is not None:
                assert cached.parent in self._pages, "a page is cached without its parent"
                children[cached.parent] += 1
        assert all(self._pages[k].num_children == n for k, n in children.items())
        assert self._num_lone == sum(c.lone for c in self._pages.values())
        assert len(self._by_id) == len(self._pages), "one page under two keys"
        assert all(self._by_id[c.page_id] is c for c in self._pages.values())
        assert set(self._log.held()) == set(self._pages), "the event log differs from the cache"

    def _check_heap(self) -> None:
        queued = [cached.key for _, cached in self._heap]
        assert len(queued) == len(set(queued)), "a page is in the heap twice"
        assert set(queued) == {key for key, cached in self._pages.items() if cached.in_heap}
        assert all(cached.in_heap for cached in self._pages.values() if cached.idle)
        assert all(tick <= cached.tick for tick, cached in self._heap)
