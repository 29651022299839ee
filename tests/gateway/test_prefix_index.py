"""Claims about the prefix index: content against a naive model, gaps, cap, removal."""

from __future__ import annotations

import random

import pytest

from gateway.prefix_index import PrefixIndex
from kvstore.events import AllPagesCleared, KvEventBatch, KvEventLog, PagesRemoved, PagesStored
from kvstore.page import PageKey
from transfer.identity import NodeId

A, B = NodeId("a"), NodeId("b")


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def keys(*numbers: int) -> tuple[PageKey, ...]:
    return tuple(key(number) for number in numbers)


def snapshot(seq: int, *numbers: int) -> KvEventBatch:
    return KvEventBatch(seq=seq, events=(PagesStored(keys(*numbers)),), snapshot=True)


def stored(seq: int, *numbers: int) -> KvEventBatch:
    return KvEventBatch(seq=seq, events=(PagesStored(keys(*numbers)),))


def naive_match(held: set[int], numbers: list[int]) -> int:
    count = 0
    while count < len(numbers) and numbers[count] in held:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(8))
def test_index_equals_the_naive_model_under_any_events(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(10_000)
    logs = {NodeId(f"n{i}"): KvEventLog() for i in range(3)}
    held: dict[NodeId, set[int]] = {node: set() for node in logs}
    for node, log in logs.items():
        assert index.apply(node, log.snapshot())
    for _ in range(300):
        node = rng.choice(list(logs))
        log = logs[node]
        before: int | None = log.seq
        action = rng.random()
        if action < 0.04:
            log.clear()
            held[node].clear()
        elif action < 0.07:  # a restart: the sequence begins at 0
            logs[node] = log = KvEventLog()
            held[node].clear()
            index.remove(node)
            before = None
        else:
            new = [rng.randrange(40) for _ in range(rng.randrange(6))]
            gone = [rng.randrange(40) for _ in range(rng.randrange(4))]
            log.record([key(n) for n in new], [key(n) for n in gone])
            held[node] = (held[node] - set(gone)) | set(new)
        batches = None if before is None else log.since(before)
        if before is not None and rng.random() < 0.1:  # two batches are lost, the third shows it
            for _ in range(3):
                log.record([key(99)])
                log.record([], [key(99)])
            last = log.since(log.seq - 1)
            assert last is not None
            assert not index.apply(node, last[0])
            batches = None
        for batch in [log.snapshot()] if batches is None else batches:
            assert index.apply(node, batch)
        wanted = [rng.randrange(40) for _ in range(8)]
        for name in logs:
            assert index.match(name, keys(*wanted)) == naive_match(held[name], wanted)
        assert index.num_entries == sum(len(h) for h in held.values())


def test_first_batch_must_be_a_snapshot() -> None:
    index = PrefixIndex(100)
    assert not index.apply(A, stored(1, 1))
    assert index.num_entries == 0
    assert index.num_gaps == 1


def test_a_gap_drops_the_node_and_a_snapshot_brings_it_back() -> None:
    index = PrefixIndex(100)
    assert index.apply(A, snapshot(5, 1, 2))
    assert not index.apply(A, stored(7, 3))
    assert index.match(A, keys(1)) == 0
    assert not index.in_sync(A)
    assert index.apply(A, snapshot(7, 1, 2, 3))
    assert index.match(A, keys(1, 2, 3)) == 3


def test_repeated_batches_change_nothing() -> None:
    index = PrefixIndex(100)
    index.apply(A, snapshot(5, 1))
    index.apply(A, KvEventBatch(seq=6, events=(AllPagesCleared(),)))
    assert index.apply(A, stored(5, 1))
    assert index.match(A, keys(1)) == 0
    assert index.num_repeats == 1


def test_pages_stored_twice_or_never_stored_are_counted_once_or_not_at_all() -> None:
    index = PrefixIndex(100)
    index.apply(A, snapshot(0))
    assert index.apply(A, stored(1, 1, 2))
    assert index.apply(A, stored(2, 1, 2))  # a later batch that says the same
    assert (index.num_entries, index.num_pages(A)) == (2, 2)
    unknown_then_known = PagesRemoved(keys(9)), PagesRemoved(keys(1)), PagesRemoved(keys(1))
    counts = []
    for seq, event in enumerate(unknown_then_known, 3):
        assert index.apply(A, KvEventBatch(seq=seq, events=(event,)))
        counts.append((index.num_entries, index.num_pages(A)))
    assert counts == [(2, 2), (1, 1), (1, 1)]


def test_a_restart_with_sequence_zero_forgets_the_old_entries() -> None:
    index = PrefixIndex(100)
    index.apply(A, snapshot(500, 1, 2, 3))
    assert index.apply(A, KvEventBatch(seq=0, events=(), snapshot=True))
    assert index.match(A, keys(1)) == 0
    assert index.apply(A, stored(1, 9))
    assert index.num_entries == 1


def test_a_removed_node_leaves_nothing_behind() -> None:
    index = PrefixIndex(100)
    index.apply(A, snapshot(1, 1, 2))
    index.apply(B, snapshot(1, 1))
    index.expect(A, keys(7))
    index.remove(A)
    assert (index.num_nodes, index.num_entries, index.num_expected(A)) == (1, 1, 0)
    index.unexpect(A, keys(7))
    assert index.num_nodes == 1


def test_hundreds_of_thousands_of_pages_stay_under_the_cap_and_the_newest_survive() -> None:
    index = PrefixIndex(2000)
    for node in (A, B):
        index.apply(node, snapshot(0))
    for at in range(4_000):
        first = at * 100
        batch = stored(at // 2 + 1, *range(first, first + 100))
        assert index.apply(B if at % 2 else A, batch)
        assert index.num_entries <= 2000
    assert index.match(B, keys(first, first + 1, first + 2)) == 3
    assert index.num_entries == index.num_pages(A) + index.num_pages(B)


def test_the_cap_evicts_the_tail_of_a_prompt_before_its_head() -> None:
    index = PrefixIndex(4)
    index.apply(A, snapshot(1, 1, 2, 3, 4, 5, 6))
    assert index.match(A, keys(1, 2, 3, 4, 5, 6)) == 4


def test_touched_pages_outlive_others() -> None:
    index = PrefixIndex(4)
    index.apply(A, snapshot(1, 1, 2))
    index.apply(A, stored(2, 3, 4))
    index.touch(A, keys(1, 2))
    index.apply(A, stored(3, 5, 6))
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
