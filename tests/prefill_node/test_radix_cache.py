"""The radix cache against its contract and against a naive model (a dict of prefixes)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.page_allocator import PageAllocator
from kvstore.events import KvEventLog
from kvstore.keys import Namespace, page_keys
from kvstore.page import PageId, PageKey
from prefill_node.radix_cache import InsertResult, RadixCache
from tests.kvstore.vllm_events import VllmMirror

SIZE = 4
NS = Namespace(b"n" * 32)
OTHER = Namespace(b"o" * 32)


class Bench:
    """A cache over a pool, and short ways to use it."""

    def __init__(self, num_pages: int = 64) -> None:
        self.allocator = PageAllocator(num_pages)
        self.log = KvEventLog()
        self.cache = RadixCache(self.allocator, SIZE, self.log)

    def compute(self, tokens: list[int], namespace: Namespace = NS) -> list[PageId]:
        """What a request does: fresh pages for all full pages, insert, let go."""
        table = self.insert(tokens, namespace).page_ids
        self.allocator.release(table)
        return table

    def insert(self, tokens: list[int], namespace: Namespace = NS) -> InsertResult:
        num_full = len(tokens) // SIZE
        page_ids = self.allocator.allocate(num_full)
        assert page_ids is not None
        full = tokens[: num_full * SIZE]
        keys = page_keys(namespace, full, SIZE)
        return self.cache.insert(namespace, packed(full), keys, page_ids)

    def match(self, tokens: list[int], namespace: Namespace = NS) -> list[PageId]:
        return self.cache.match(namespace, packed(tokens))

    def check(self) -> None:
        self.cache.check()
        self.allocator.check()


def packed(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def test_match_returns_the_longest_prefix_of_full_pages() -> None:
    bench = Bench()
    table = bench.compute(list(range(13)))
    assert bench.match(list(range(13))) == table[:3]
    assert bench.match(list(range(11))) == table[:2]
    assert bench.match([*range(9), 99, 98, 97]) == table[:2]
    assert bench.match([1, 2, 3, 4]) == []
    assert bench.match([]) == []
    bench.check()


def test_match_retains_for_the_caller() -> None:
    bench = Bench()
    table = bench.compute(list(range(8)))
    held = bench.match(list(range(8)))
    assert [bench.allocator.refs(page_id) for page_id in table] == [2, 2]
    assert bench.cache.evict(10) == 0
    bench.allocator.release(held)
    assert bench.cache.evict(10) == 2
    assert bench.allocator.num_held == 0


def test_evictable_pages_are_those_that_only_the_cache_holds() -> None:
    bench = Bench()
    bench.compute(list(range(16)))
    assert bench.cache.num_evictable == 4
    held = bench.match(list(range(8)))
    assert (bench.cache.num_pages, bench.cache.num_evictable) == (4, 2)
    assert bench.cache.evict(10) == 2
    assert bench.cache.num_evictable == 0
    bench.allocator.release(held)
    assert bench.cache.num_evictable == bench.cache.evict(10) == 2


def test_middle_pages_do_not_match_without_their_prefix() -> None:
    bench = Bench()
    shared = [7, 7, 7, 7]
    bench.compute([1, 1, 1, 1, *shared])
    assert bench.match([2, 2, 2, 2, *shared]) == []
    assert bench.match(shared) == []


def test_namespaces_never_meet() -> None:
    bench = Bench()
    table = bench.compute(list(range(8)))
    assert bench.match(list(range(8)), OTHER) == []
    others = bench.compute(list(range(8)), OTHER)
    assert not set(table) & set(others)
    bench.check()


def test_duplicate_insert_moves_the_caller_to_the_tree_s_pages() -> None:
    bench = Bench()
    first = bench.insert(list(range(8)))
    second = bench.insert(list(range(12)))
    assert second.page_ids[:2] == first.page_ids
    assert len(second.duplicates) == 2
    assert all(bench.allocator.refs(page_id) == 0 for page_id in second.duplicates)
    assert [bench.allocator.refs(page_id) for page_id in second.page_ids] == [3, 3, 2]
    bench.check()


def test_duplicate_that_somebody_else_holds_is_not_freed() -> None:
    bench = Bench()
    bench.compute(list(range(8)))
    page_ids = bench.allocator.allocate(2)
    assert page_ids is not None
    bench.allocator.retain(page_ids)  # a put in flight
    keys = page_keys(NS, list(range(8)), SIZE)
    result = bench.cache.insert(NS, packed(list(range(8))), keys, page_ids)
    assert result.duplicates == page_ids
    assert [bench.allocator.refs(page_id) for page_id in page_ids] == [1, 1]


def test_split_keeps_both_branches() -> None:
    bench = Bench()
    long = bench.compute(list(range(16)))
    branch = bench.compute([*range(8), 50, 51, 52, 53])
    assert bench.match(list(range(16))) == long
    assert bench.match([*range(8), 50, 51, 52, 53]) == branch
    assert branch[:2] == long[:2]
    bench.check()


def test_a_leaf_that_grows_stays_one_edge() -> None:
    bench = Bench()
    for end in (4, 8, 12, 16):
        bench.compute(list(range(end)))
    assert sum(1 for _ in bench.cache._nodes()) == 1
    bench.check()


def test_evict_takes_the_least_recently_used_leaf_first_from_its_tail() -> None:
    bench = Bench()
    old = bench.compute([1] * 8)
    new = bench.compute([2] * 8)
    bench.allocator.release(bench.match([1] * 8))  # old is the recent one now
    assert bench.cache.evict(1) == 1
    assert bench.allocator.refs(new[1]) == 0
    assert bench.cache.evict(2) == 2
    assert bench.allocator.refs(new[0]) == 0
    assert [bench.allocator.refs(page_id) for page_id in old] == [1, 0]
    bench.check()


def test_a_matched_prefix_is_recent_but_the_rest_of_its_edge_is_not() -> None:
    bench = Bench()
    trunk = bench.compute([1] * 16)
    other = bench.compute([2] * 8)
    bench.allocator.release(bench.match([1] * 8))
    assert bench.cache.evict(2) == 2
    assert [bench.allocator.refs(page_id) for page_id in trunk] == [1, 1, 0, 0]
    assert [bench.allocator.refs(page_id) for page_id in other] == [1, 1]


def test_evict_stops_at_a_held_page_and_goes_on_elsewhere() -> None:
    bench = Bench()
    bench.compute([1] * 12)
    held = bench.match([1] * 8)
    bench.compute([2] * 8)
    assert bench.cache.evict(100) == 3  # the held leaf's tail, and both of the other
    assert [bench.allocator.refs(page_id) for page_id in held] == [2, 2]
    bench.check()


def test_clear_leaves_held_pages_to_their_holders() -> None:
    bench = Bench()
    bench.compute([1] * 8)
    held = bench.match([1] * 4)
    assert bench.cache.clear() == 2
    assert bench.allocator.num_held == 1
    assert bench.log.num_held == 0
    bench.check()
    bench.allocator.release(held)
    assert bench.allocator.num_held == 0
    assert bench.match([1] * 8) == []


def test_events_follow_insert_evict_and_clear() -> None:
    bench = Bench()
    tokens = [1] * 8
    keys = page_keys(NS, tokens, SIZE)
    bench.compute(tokens)
    assert bench.log.num_held == 2
    router = VllmMirror()
    router.apply(bench.log.flush(0.0)[0].payload)
    assert router.pages == {keys[0]: (None, (1,) * SIZE), keys[1]: (keys[0], (1,) * SIZE)}
    bench.cache.evict(1)
    router.apply(bench.log.flush(0.0)[0].payload)
    assert set(router.pages) == {keys[0]}
    bench.cache.clear()
    router.apply(bench.log.flush(0.0)[0].payload)
    assert not router.pages


def test_the_heap_stays_small_when_the_same_prefix_is_used_for_ever() -> None:
    bench = Bench()
    bench.compute([1] * 8)
    for _ in range(5000):
        bench.allocator.release(bench.match([1] * 8))
    assert len(bench.cache._leaves) < 200


class NaiveModel:
    """Prefix tuples to page ids; recency per page."""

    def __init__(self) -> None:
        self.pages: dict[tuple[bytes, tuple[int, ...]], PageId] = {}
        self.stamps: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.clock = 0

    def prefixes(self, ns: Namespace, tokens: list[int]) -> list[tuple[bytes, tuple[int, ...]]]:
        ends = range(SIZE, len(tokens) + 1, SIZE)
        return [(ns, tuple(tokens[:end])) for end in ends]

    def match(self, ns: Namespace, tokens: list[int]) -> list[PageId]:
        self.clock += 1
        found = []
        for prefix in self.prefixes(ns, tokens):
            if prefix not in self.pages:
                break
            self.stamps[prefix] = self.clock
            found.append(self.pages[prefix])
        return found

    def insert(self, ns: Namespace, tokens: list[int], page_ids: list[PageId]) -> list[PageId]:
        self.clock += 1
        table = []
        for prefix, page_id in zip(self.prefixes(ns, tokens), page_ids, strict=True):
            table.append(self.pages.setdefault(prefix, page_id))
            self.stamps[prefix] = self.clock
        return table

    def leaves(self) -> list[tuple[bytes, tuple[int, ...]]]:
        parents = {(ns, tokens[:-SIZE]) for ns, tokens in self.pages}
        return [prefix for prefix in self.pages if prefix not in parents]

    def forget(self, page_ids: set[PageId]) -> None:
        self.pages = {k: v for k, v in self.pages.items() if v not in page_ids}


@pytest.mark.parametrize("seed", range(12))
def test_fuzz_against_a_naive_dict_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    bench, model = Bench(num_pages=40), NaiveModel()
    held: list[list[PageId]] = []
    for _ in range(400):
        ns = rng.choice([NS, NS, OTHER])
        tokens = [rng.choice([1, 2]) for _ in range(SIZE * rng.randint(0, 6) + rng.randint(0, 3))]
        tokens = [t for i, t in enumerate(tokens) for t in [tokens[i // SIZE * SIZE]]]
        action = rng.random()
        if action < 0.4:
            found = bench.match(tokens, ns)
            assert found == model.match(ns, tokens)
            held.append(found)
        elif action < 0.75:
            full = tokens[: len(tokens) // SIZE * SIZE]
            _insert(bench, model, ns, full, held)
        elif action < 0.97:
            _evict(bench, model, rng.randint(1, 5))
        else:
            bench.cache.clear()
            model.pages.clear()
        while held and (len(held) > 4 or rng.random() < 0.3):
            bench.allocator.release(held.pop(rng.randrange(len(held))))
        bench.check()
        assert bench.cache.num_pages == len(model.pages)
    for table in held:
        bench.allocator.release(table)
    bench.cache.evict(1000)
    assert bench.allocator.num_held == 0


def _insert(
    bench: Bench, model: NaiveModel, ns: Namespace, full: list[int], held: list[list[PageId]]
) -> None:
    num_pages = len(full) // SIZE
    page_ids = bench.allocator.allocate(num_pages)
    if page_ids is None:
        return
    keys: list[PageKey] = page_keys(ns, full, SIZE)
    result = bench.cache.insert(ns, packed(full), keys, page_ids)
    assert result.page_ids == model.insert(ns, full, page_ids)
    held.append(result.page_ids)


def _evict(bench: Bench, model: NaiveModel, num_pages: int) -> None:
    """Each evicted page must have been a leaf nobody else held, none staler left behind."""
    refs = bench.allocator.refs
    before = {page_id: refs(page_id) for page_id in model.pages.values()}
    num_freed = bench.cache.evict(num_pages)
    freed = {page_id for page_id in model.pages.values() if refs(page_id) == 0}
    assert len(freed) == num_freed
    assert all(before[page_id] == 1 for page_id in freed)
    youngest = max(
        (model.stamps[prefix] for prefix, page_id in model.pages.items() if page_id in freed),
        default=0,
    )
    model.forget(freed)
    free_leaves = [prefix for prefix in model.leaves() if refs(model.pages[prefix]) == 1]
    assert all(model.stamps[prefix] >= youngest for prefix in free_leaves)
    assert num_freed == num_pages or not free_leaves


def test_clearing_a_namespace_leaves_the_others_and_what_requests_hold() -> None:
    bench = Bench()
    prompt = list(range(3 * SIZE))
    bench.compute(prompt)
    bench.compute([*prompt[: 2 * SIZE], *range(90, 90 + SIZE)])
    bench.compute(prompt, OTHER)
    held = bench.match(prompt)
    assert bench.cache.clear_namespace(NS) == 4
    assert bench.cache.clear_namespace(NS) == 0
    bench.check()
    assert [bench.allocator.refs(page_id) for page_id in held] == [1, 1, 1]
    assert bench.match(prompt) == []
    bench.allocator.release([*held, *bench.match(prompt, OTHER)])
    assert bench.cache.num_pages == 3
    bench.compute(prompt)
    assert bench.cache.evict(100) == 6
    bench.check()


def test_clearing_namespaces_at_random_keeps_the_invariants() -> None:
    rng = random.Random(5)
    bench = Bench(num_pages=96)
    spaces = [NS, OTHER, Namespace(b"p" * 32)]
    for _ in range(300):
        space = rng.choice(spaces)
        if rng.random() < 0.15:
            before = bench.cache.num_pages
            assert bench.cache.clear_namespace(space) == before - bench.cache.num_pages
            assert bench.cache.count(space, packed([0] * SIZE)) == 0
        else:
            bench.cache.evict(12)
            bench.compute([rng.randrange(2) for _ in range(rng.randrange(1, 7) * SIZE)], space)
        bench.check()
