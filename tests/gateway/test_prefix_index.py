"""Claims about the prefix index: content against a naive model, gaps, cap, removal."""

from __future__ import annotations

import random

import pytest

from gateway.prefix_index import PrefixIndex
from kvstore.events import AllPagesCleared, KvEvent, PagesRemoved, PagesStored
from kvstore.page import PageKey
from transfer.identity import NodeId

A, B = NodeId("a"), NodeId("b")


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def keys(*numbers: int) -> tuple[PageKey, ...]:
    return tuple(key(number) for number in numbers)


def stored(*numbers: int) -> list[KvEvent]:
    return [PagesStored(keys(*numbers))]


def naive_match(held: set[int], numbers: list[int]) -> int:
    count = 0
    while count < len(numbers) and numbers[count] in held:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(8))
def test_index_equals_the_naive_model_under_any_events(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(10_000)
    held: dict[NodeId, set[int]] = {NodeId(f"n{i}"): set() for i in range(3)}
    for node in held:
        index.replace(node, [])
    for _ in range(300):
        node = rng.choice(list(held))
        action = rng.random()
        if action < 0.04:
            index.apply(node, [AllPagesCleared()])
            held[node].clear()
        elif action < 0.07:  # another life of the node
            index.remove(node)
            index.replace(node, [])
            held[node].clear()
        elif action < 0.1:  # events were missed
            held[node] = {rng.randrange(40) for _ in range(rng.randrange(20))}
            index.replace(node, keys(*held[node]))
        else:
            new = [rng.randrange(40) for _ in range(rng.randrange(6))]
            gone = [rng.randrange(40) for _ in range(rng.randrange(4))]
            index.apply(node, [PagesRemoved(keys(*gone)), PagesStored(keys(*new))])
            held[node] = (held[node] - set(gone)) | set(new)
        wanted = [rng.randrange(40) for _ in range(8)]
        for name in held:
            assert index.match(name, keys(*wanted)) == naive_match(held[name], wanted)
        assert index.num_entries == sum(len(h) for h in held.values())


def test_events_mean_nothing_before_the_first_snapshot() -> None:
    index = PrefixIndex(100)
    index.apply(A, stored(1))
    index.expect(A, keys(2))
    index.apply(A, stored(1))
    assert (index.num_entries, index.in_sync(A)) == (0, False)


def test_a_node_that_is_not_in_sync_holds_nothing_until_the_next_snapshot() -> None:
    index = PrefixIndex(100)
    index.replace(A, keys(1, 2))
    index.unsync(A)
    index.apply(A, stored(3))
    assert (index.match(A, keys(1)), index.match(A, keys(3)), index.in_sync(A)) == (0, 0, False)
    index.replace(A, keys(1, 2, 3))
    assert (index.match(A, keys(1, 2, 3)), index.in_sync(A)) == (3, True)


def test_events_after_a_node_was_removed_do_not_bring_it_back() -> None:
    index = PrefixIndex(100)
    index.replace(A, keys(1))
    index.remove(A)
    index.apply(A, stored(2))
    assert (index.num_nodes, index.num_entries) == (0, 0)


def test_pages_stored_twice_or_never_stored_are_counted_once_or_not_at_all() -> None:
    index = PrefixIndex(100)
    index.replace(A, [])
    index.apply(A, stored(1, 2))
    index.apply(A, stored(1, 2))  # a later batch that says the same
    assert (index.num_entries, index.num_pages(A)) == (2, 2)
    unknown_then_known = PagesRemoved(keys(9)), PagesRemoved(keys(1)), PagesRemoved(keys(1))
    counts = []
    for event in unknown_then_known:
        index.apply(A, [event])
        counts.append((index.num_entries, index.num_pages(A)))
    assert counts == [(2, 2), (1, 1), (1, 1)]


def test_a_removed_node_leaves_nothing_behind() -> None:
    index = PrefixIndex(100)
    index.replace(A, keys(1, 2))
    index.replace(B, keys(1))
    index.expect(A, keys(7))
    index.remove(A)
    assert (index.num_nodes, index.num_entries, index.num_expected(A)) == (1, 1, 0)
    index.unexpect(A, keys(7))
    assert index.num_nodes == 1


def test_a_million_distinct_prompts_stay_under_the_cap_and_the_newest_survive() -> None:
    index = PrefixIndex(2000)
    for node in (A, B):
        index.replace(node, [])
    for at in range(10_000):
        first = at * 100  # as many prompts, of one page each
        index.apply(B if at % 2 else A, stored(*range(first, first + 100)))
        assert index.num_entries <= 2000
    assert index.num_evicted == 998_000
    assert index.match(B, keys(first, first + 1, first + 2)) == 3
    assert index.num_entries == index.num_pages(A) + index.num_pages(B)


def test_the_cap_evicts_the_tail_of_a_prompt_before_its_head() -> None:
    index = PrefixIndex(4)
    index.replace(A, keys(1, 2, 3, 4, 5, 6))
    assert index.match(A, keys(1, 2, 3, 4, 5, 6)) == 4


def test_touched_pages_outlive_others() -> None:
    index = PrefixIndex(4)
    index.replace(A, keys(1, 2))
    index.apply(A, stored(3, 4))
    index.touch(A, keys(1, 2))
    index.apply(A, stored(5, 6))
    assert index.match(A, keys(1, 2)) == 2
    assert index.match(A, keys(3)) == 0


def test_expected_pages_count_until_every_expectation_ended() -> None:
    index = PrefixIndex(100)
    index.expect(A, keys(1, 2))
    index.expect(A, keys(1, 2, 3))
    assert index.match(A, keys(1, 2, 3)) == 3
    index.unexpect(A, keys(1, 2, 3))
    assert index.match(A, keys(1, 2, 3)) == 2
    index.unexpect(A, keys(1, 2))
    assert index.num_expected(A) == 0
