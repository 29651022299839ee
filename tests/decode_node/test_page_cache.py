"""The page cache against a naive model, and its rules one by one."""

from __future__ import annotations

import random
import time

import pytest

from decode_node.page_cache import PageCache
from decode_node.page_holds import PageHolds
from engine.page_allocator import PageAllocator
from kvstore.events import KvEventLog, PagesRemoved, PagesStored
from kvstore.events.wire import decode_batch
from kvstore.page import PageId, PageKey


def key(*path: int) -> PageKey:
    return PageKey(bytes(path).ljust(32, b"-"))


TOKENS = bytes(16)


def new_cache(num_pages: int) -> tuple[PageAllocator, PageCache, KvEventLog]:
    allocator, log = PageAllocator(num_pages), KvEventLog()
    return allocator, PageCache(allocator, log), log


def put(allocator: PageAllocator, cache: PageCache, *path: int) -> PageId:
    """Cache a fresh page under ``path`` that nobody but the cache holds."""
    (page_id,) = allocator.allocate(1) or [None]
    assert page_id is not None
    assert cache.insert(key(*path), key(*path[:-1]) if len(path) > 1 else None, page_id, TOKENS)
    cache.release([page_id])
    return page_id


def test_match_returns_the_longest_cached_prefix_with_a_holder_each() -> None:
    allocator, cache, _ = new_cache(8)
    pages = [put(allocator, cache, *range(n)) for n in (1, 2, 3)]
    assert cache.match([key(0), key(0, 1), key(9), key(0, 1, 2)]) == pages[:2]
    assert [allocator.refs(p) for p in pages] == [2, 2, 1]


def test_insert_takes_no_page_without_its_parent_and_none_twice() -> None:
    allocator, cache, _ = new_cache(8)
    a, b = allocator.allocate(2) or []
    assert not cache.insert(key(1, 2), key(1), a, TOKENS)
    assert cache.insert(key(1), None, a, TOKENS)
    assert not cache.insert(key(1), None, b, TOKENS)
    assert [allocator.refs(a), allocator.refs(b)] == [2, 1]
    cache.release([a, b])
    cache.check()


def test_evict_never_frees_a_held_page_nor_its_ancestors() -> None:
    allocator, cache, _ = new_cache(8)
    for path in ([1], [1, 2], [1, 2, 3], [4]):
        put(allocator, cache, *path)
    held = cache.match([key(1), key(1, 2)])
    assert cache.evict(10) == 2
    assert [k in cache for k in (key(1), key(1, 2), key(1, 2, 3), key(4))] == [
        True,
        True,
        False,
        False,
    ]
    cache.release(held)
    assert cache.evict(10) == 2
    assert allocator.num_held == 0


def test_evict_takes_the_least_recently_used_chain_first() -> None:
    allocator, cache, _ = new_cache(8)
    for path in ([1], [1, 2], [3], [3, 4]):
        put(allocator, cache, *path)
    cache.release(cache.match([key(1), key(1, 2)]))
    assert cache.evict(2) == 2
    assert key(1, 2) in cache
    assert key(3) not in cache


def test_clear_leaves_the_pages_of_others_alone() -> None:
    allocator, cache, log = new_cache(8)
    put(allocator, cache, 1)
    held = cache.match([key(1)])
    assert cache.clear() == 1
    assert log.num_held == 0
    assert allocator.num_held == 1
    cache.release(held)
    cache.check()


def test_events_say_what_enters_and_leaves() -> None:
    allocator, cache, log = new_cache(8)
    put(allocator, cache, 1)
    put(allocator, cache, 1, 2)
    cache.evict(1)
    (batch,) = log.flush(0.0)
    assert decode_batch(batch.payload) == [
        PagesStored([key(1), key(1, 2)], "GPU"),
        PagesRemoved([key(1, 2)], "GPU"),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_cache_equals_a_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    allocator, cache, _ = new_cache(24)
    model: dict[tuple[int, ...], PageId] = {}
    held: list[list[PageId]] = []

    def random_path() -> tuple[int, ...]:
        return tuple(rng.randrange(3) for _ in range(rng.randint(1, 4)))

    for _ in range(400):
        action = rng.randrange(5)
        path = random_path()
        if action == 0 and (fresh := allocator.allocate(1)) is not None:
            parent = path[:-1]
            expected = path not in model and (not parent or parent in model)
            parent_key = key(*parent) if parent else None
            assert cache.insert(key(*path), parent_key, fresh[0], TOKENS) == expected
            if expected:
                model[path] = fresh[0]
            held.append(fresh)
        elif action == 1:
            found = cache.match([key(*path[: i + 1]) for i in range(len(path))])
            prefixes = [path[: i + 1] for i in range(len(path))]
            length = next((i for i, p in enumerate(prefixes) if p not in model), len(path))
            assert found == [model[p] for p in prefixes[:length]]
            held.append(found)
        elif action == 2 and held:
            cache.release(held.pop(rng.randrange(len(held))))
        elif action == 3:
            before = len(cache)
            count = rng.randint(1, 4)
            in_use = {page for pages in held for page in pages}
            needed = {
                p[: i + 1] for p, page in model.items() if page in in_use for i in range(len(p))
            }
            evicted = cache.evict(count)
            assert evicted == min(count, len(model) - len(needed)), "a page nobody needs stayed"
            gone = [p for p in model if key(*p) not in cache]
            assert len(gone) == evicted == before - len(cache)
            for p in gone:
                assert not any(model[p] in pages for pages in held), "a held page was evicted"
                del model[p]
            assert all(p[:-1] in model for p in model if len(p) > 1), "a child outlived its parent"
        elif action == 4 and rng.random() < 0.05:
            cache.clear()
            model.clear()
        alone = sum(allocator.refs(page) == 1 for page in model.values())
        assert cache.num_evictable == alone
        cache.check()
        allocator.check()


def test_holds_count_pages_that_will_come_free() -> None:
    allocator, released = PageAllocator(8), []
    holds = PageHolds(allocator, lambda: released.append(1))
    a, b = allocator.allocate(2) or []
    holds.retain([a, b])
    holds.retain([a])
    assert holds.num_ending(lambda _: False) == 0
    allocator.release([a])
    assert holds.num_ending(lambda _: False) == 1
    holds.release([a])
    assert allocator.refs(a) == 1
    holds.release([a, b])
    assert allocator.num_held == 1
    assert holds.num_held == 0
    assert len(released) == 2


def test_a_parent_older_than_its_child_goes_in_the_same_pass() -> None:
    allocator, cache, _ = new_cache(8)
    for path in ([1], [1, 2], [1, 2, 3]):
        put(allocator, cache, *path)
    for path in ([1, 2], [1, 2, 3]):
        cache.release([cache.match_one(key(*path))])
    assert cache.evict(3) == 3
    cache.check()


def test_a_page_used_since_its_child_was_outlives_an_older_one() -> None:
    allocator, cache, _ = new_cache(8)
    for path in ([1], [1, 2], [3]):
        put(allocator, cache, *path)
    cache.release(cache.match([key(1)]))
    assert cache.evict(2) == 2
    assert [k in cache for k in (key(1), key(1, 2), key(3))] == [True, False, False]


def test_a_page_that_was_held_long_is_young_when_it_is_given_back() -> None:
    allocator, cache, _ = new_cache(8)
    put(allocator, cache, 1)
    held = cache.match([key(1)])
    put(allocator, cache, 2)
    cache.release(held)
    assert cache.evict(1) == 1
    assert key(2) not in cache


def test_transfers_give_pages_back_by_the_cache() -> None:
    allocator, cache, _ = new_cache(8)
    holds = PageHolds(allocator, lambda: None)
    holds.release_by(cache.release)
    put(allocator, cache, 1)
    used = cache.match([key(1)])
    holds.retain(used)
    cache.release(used)
    assert (cache.num_evictable, cache.evict(1)) == (0, 0)
    holds.release(used)
    assert (cache.num_evictable, cache.evict(1)) == (1, 1)
    cache.check()


@pytest.mark.parametrize("num_chains", [1, 500, 50_000])
@pytest.mark.parametrize("only_last", [False, True])
def test_a_blocked_evict_does_not_look_at_held_pages(num_chains: int, only_last: bool) -> None:
    """A thousand in a row over 50,000 pages; with ``only_last`` just the leaves are held."""
    num_pages = 50_000
    allocator, cache, _ = new_cache(num_pages + 2)
    for chain in range(num_chains):
        keys = [PageKey(b"%d/%d" % (chain, i)) for i in range(num_pages // num_chains)]
        pages = allocator.allocate(len(keys)) or []
        for i, page in enumerate(pages):
            assert cache.insert(keys[i], keys[i - 1] if i else None, page, TOKENS)
        cache.release(pages)
        if only_last:
            cache.match_one(keys[-1])
        else:
            cache.match(keys)
    assert cache.evict(1) == 0  # forgets what was idle once
    start = time.process_time()
    for _ in range(1000):
        assert cache.evict(1) == 0
        assert cache.num_evictable == (num_pages - num_chains if only_last else 0)
    assert time.process_time() - start < 0.05
    put(allocator, cache, 1)
    assert cache.evict(2) == 1
    cache.check()


def test_pages_used_over_and_over_leave_one_entry_each() -> None:
    allocator, cache, _ = new_cache(8)
    for path in ([1], [2], [3]):
        put(allocator, cache, *path)
    for _ in range(100):
        cache.release(cache.match([key(2)]))
        cache.check()  # one entry in the heap for each page
    assert cache.evict(2) == 2
    assert key(2) in cache


def test_clearing_a_namespace_leaves_the_others_and_what_sequences_hold() -> None:
    allocator, cache, log = new_cache(16)
    a, b = b"a" * 32, b"b" * 32
    for path, namespace in (((1,), a), ((1, 2), a), ((3,), b), ((3, 4), b)):
        (page_id,) = allocator.allocate(1) or [None]
        assert page_id is not None
        parent = key(*path[:-1]) if len(path) > 1 else None
        assert cache.insert(key(*path), parent, page_id, TOKENS, namespace)
        cache.release([page_id])
    held = cache.match([key(1)])
    assert cache.clear_namespace(a) == 2
    assert cache.clear_namespace(a) == 0
    cache.check()
    assert list(log.held()) == [key(3), key(3, 4)]
    assert allocator.refs(held[0]) == 1, "its sequence keeps the page"
    cache.release(held)
    cache.check()
    assert cache.evict(10) == 2
    assert allocator.num_free == 15


def test_clearing_namespaces_at_random_keeps_the_invariants() -> None:
    rng = random.Random(3)
    allocator, cache, _ = new_cache(64)
    spaces = [bytes([n]) * 32 for n in range(3)]
    held: list[PageId] = []
    for _ in range(600):
        space = rng.randrange(3)
        depth = rng.randrange(1, 5)
        path = [space, *(rng.randrange(2) for _ in range(depth))]
        if rng.random() < 0.1:
            cache.clear_namespace(spaces[space])
            assert all(key(*path[:n]) not in cache for n in range(2, len(path) + 1))
        elif rng.random() < 0.4:
            cache.release(held)
            held = cache.match([key(*path[:n]) for n in range(2, len(path) + 1)])
        else:
            cache.evict(8)
            for n in range(2, len(path) + 1):
                (page_id,) = allocator.allocate(1) or [None]
                assert page_id is not None
                parent = key(*path[: n - 1]) if n > 2 else None
                cache.insert(key(*path[:n]), parent, page_id, TOKENS, spaces[space])
                cache.release([page_id])
        cache.check()
