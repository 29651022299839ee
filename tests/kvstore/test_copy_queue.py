"""The queue of copies a node owes: order, bounds, who waits; fuzzed against a naive model."""

from __future__ import annotations

import random

from kvstore.page import PageKey
from kvstore.replication.copy_queue import COPY_TRIES_MAX, CopyQueue, CopyWait
from transfer.identity import NodeId

A, B = NodeId("a"), NodeId("b")


def keys(*numbers: int) -> list[PageKey]:
    return [PageKey(bytes([n]) * 32) for n in numbers]


class Heard:
    """Counts calls."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def test_a_key_is_owed_once_per_target() -> None:
    queue = CopyQueue()
    queue.add(A, keys(1, 2, 1), fresh=True)
    queue.add(A, keys(1), fresh=False)
    queue.add(B, keys(1), fresh=True)
    assert len(queue) == 3
    assert queue.take(A, 10, fresh_first=True) == keys(1, 2)
    queue.add(A, keys(1), fresh=True)
    assert queue.take(A, 10, fresh_first=True) == []
    queue.check()


def test_fresh_pages_do_not_travel_with_repair() -> None:
    queue = CopyQueue()
    queue.add(A, keys(1, 2), fresh=False)
    queue.add(A, keys(3), fresh=True)
    assert queue.take(A, 10, fresh_first=True) == keys(3)
    assert queue.take(A, 1, fresh_first=True) == keys(1)
    queue.add(A, keys(4), fresh=True)
    assert queue.take(A, 10, fresh_first=False) == keys(2)
    assert queue.take(A, 10, fresh_first=False) == keys(4)


def test_a_waiter_is_called_when_the_last_copy_of_its_keys_is_made() -> None:
    queue, heard = CopyQueue(), Heard()
    queue.add(A, keys(1, 2), fresh=True)
    queue.add(B, keys(1), fresh=True)
    wait = queue.wait(keys(1, 2, 3), heard)
    assert wait.num_left == 2
    queue.take(A, 10, fresh_first=True)
    queue.take(B, 10, fresh_first=True)
    queue.settle(A, keys(1, 2), made=True)
    assert not heard.times
    queue.settle(B, keys(1), made=True)
    assert heard.times == 1
    assert not wait.unmade
    assert not len(queue)


def test_a_target_that_does_not_answer_is_waited_for_by_nobody_but_still_owed() -> None:
    queue, heard = CopyQueue(), Heard()
    queue.add(A, keys(1, 2), fresh=True)
    queue.take(A, 1, fresh_first=True)
    wait = queue.wait(keys(1, 2), heard)
    queue.park(A)
    assert heard.times == 1
    assert sorted(wait.unmade) == keys(1, 2)
    queue.add(A, keys(3), fresh=True)
    later = queue.wait(keys(3), heard)
    assert not later.num_left
    assert list(later.unmade) == keys(3)
    queue.check()
    queue.unpark(A)
    taken = [key for _ in range(2) for key in queue.take(A, 9, fresh_first=True)]
    assert sorted(taken) == keys(1, 2, 3)
    queue.settle(A, keys(1, 2, 3), made=True)
    assert not queue.wait(keys(1, 2, 3), heard).unmade, "they are there now"


def test_a_page_that_another_node_takes_instead_counts_as_made() -> None:
    queue, heard = CopyQueue(), Heard()
    queue.add(A, keys(1, 2), fresh=True)
    queue.take(A, 1, fresh_first=True)
    wait = queue.wait(keys(1, 2), heard)
    assert sorted(queue.fresh_keys(A)) == keys(1, 2)
    queue.add(B, keys(1), fresh=True)
    queue.park(A, covered=keys(1))
    assert queue.parked() == [A]
    assert not heard.times
    assert list(wait.unmade) == keys(2)
    queue.settle(B, queue.take(B, 1, fresh_first=True), made=True)
    assert heard.times == 1
    assert list(wait.unmade) == keys(2)
    queue.add(A, keys(3), fresh=True, covered=keys(3))
    assert not queue.wait(keys(3), heard).unmade
    queue.check()


def test_a_copy_that_fails_again_and_again_is_given_up() -> None:
    queue, heard = CopyQueue(), Heard()
    queue.add(A, keys(1), fresh=True)
    wait = queue.wait(keys(1), heard)
    for _ in range(COPY_TRIES_MAX):
        assert queue.take(A, 1, fresh_first=True) == keys(1)
        queue.retry(A, keys(1))
    assert heard.times == 1
    assert list(wait.unmade) == keys(1)
    assert not len(queue)


def test_what_is_put_back_is_the_next_of_its_class_and_no_try_is_counted() -> None:
    queue = CopyQueue()
    queue.add(A, keys(1, 2, 3), fresh=True)
    queue.add(A, keys(4, 5, 6), fresh=False)
    for _ in range(COPY_TRIES_MAX + 1):
        assert queue.take(A, 2, fresh_first=True) == keys(1, 2)
        assert queue.take(A, 2, fresh_first=False) == keys(4, 5)
        queue.put_back(A, keys(1, 2))
        queue.put_back(A, keys(4, 5, 9))
        queue.check()
    assert queue.take(A, 9, fresh_first=True) == keys(1, 2, 3)
    assert queue.take(A, 9, fresh_first=True) == keys(4, 5, 6)
    assert len(queue) == 6


def test_what_is_put_back_by_a_target_that_is_parked_meanwhile_stays_in_one_place() -> None:
    queue = CopyQueue()
    queue.add(A, keys(1, 2), fresh=True)
    queue.take(A, 2, fresh_first=True)
    queue.park(A)
    queue.put_back(A, keys(1, 2))
    queue.check()
    assert queue.num_waiting(A) == 2


def test_a_deferred_copy_is_owed_and_waited_for_by_nobody_until_it_is_resumed() -> None:
    queue, heard = CopyQueue(), Heard()
    queue.add(A, keys(1, 2), fresh=True)
    wait = queue.wait(keys(1), heard)
    queue.defer(A, queue.take(A, 1, fresh_first=True))
    assert heard.times == 1
    assert list(wait.unmade) == keys(1)
    assert len(queue) == 2
    queue.add(A, keys(1), fresh=False)
    assert queue.take(A, 9, fresh_first=True) == keys(2)
    assert queue.take(A, 9, fresh_first=True) == []
    queue.check()
    queue.resume(A)
    assert queue.wait(keys(1), heard).num_left == 1
    queue.settle(A, queue.take(A, 9, fresh_first=True), made=True)
    assert not queue.wait(keys(1), heard).unmade
    queue.check()


def test_a_deferred_page_that_is_put_anew_is_sent_at_once() -> None:
    queue = CopyQueue()
    queue.add(A, keys(1, 2), fresh=True)
    queue.defer(A, queue.take(A, 9, fresh_first=True))
    queue.add(A, keys(1), fresh=True)
    assert queue.take(A, 9, fresh_first=True) == keys(1)
    assert len(queue) == 2
    queue.forget(A)
    assert not len(queue)
    queue.resume(A)
    queue.defer(A, keys(1))
    queue.check()


def test_a_full_queue_says_whom_something_was_left_out_for() -> None:
    queue = CopyQueue(num_max=2)
    queue.add(A, keys(1, 2), fresh=True)
    assert queue.crowded
    queue.add(B, keys(3), fresh=True)
    assert list(queue.lacking) == [B]
    assert queue.counters["copies_overflowed"] == 1
    assert list(queue.wait(keys(3), Heard()).unmade) == keys(3)
    queue.forget(B)
    assert not queue.lacking


def test_a_target_that_is_gone_is_owed_nothing() -> None:
    queue, heard = CopyQueue(), Heard()
    queue.add(A, keys(1, 2), fresh=True)
    queue.add(B, keys(2), fresh=True)
    queue.take(A, 1, fresh_first=True)
    queue.wait(keys(1), heard)
    queue.forget(A)
    assert heard.times == 1
    assert len(queue) == 1
    queue.settle(A, keys(1), made=True)  # the answer comes late
    queue.check()


def test_a_waiter_that_gives_up_leaves_nothing_behind() -> None:
    queue, heard = CopyQueue(), Heard()
    queue.add(A, keys(1, 2), fresh=True)
    wait = queue.wait(keys(1, 2), heard)
    queue.take(A, 1, fresh_first=True)
    queue.settle(A, keys(1), made=True)
    queue.stop_waiting(wait)
    assert list(wait.unmade) == keys(2)
    assert not queue.num_waits
    queue.settle(A, queue.take(A, 1, fresh_first=True), made=True)
    assert not heard.times


def test_against_a_naive_model_every_wait_ends_exactly_when_nothing_is_owed() -> None:
    for seed in range(200):
        _fuzz(random.Random(seed))


def _fuzz(rng: random.Random) -> None:
    queue = CopyQueue(num_max=12)
    owed: dict[NodeId, set[PageKey]] = {A: set(), B: set()}
    parked: set[NodeId] = set()
    flying: dict[NodeId, list[PageKey]] = {A: [], B: []}
    later: dict[NodeId, set[PageKey]] = {A: set(), B: set()}
    waits: list[tuple[CopyWait, set[PageKey], Heard]] = []
    for _ in range(60):
        target, some = rng.choice([A, B]), keys(*rng.sample(range(8), 2))
        action = rng.randrange(10)
        if action <= 1:
            for key in some:
                room = sum(map(len, owed.values())) < 12
                if key not in owed[target] and room:
                    owed[target].add(key)
            fresh = rng.random() < 0.5
            later[target] -= set(some) if fresh else set()
            queue.add(target, some, fresh=fresh)
        elif action == 2:
            flying[target] += queue.take(target, 2, fresh_first=rng.random() < 0.5)
        elif action == 3:
            done, flying[target] = flying[target][:1], flying[target][1:]
            queue.settle(target, done, made=True)
            owed[target] -= set(done)
        elif action == 4 and target not in parked:
            queue.park(target)
            flying[target] = []
            parked.add(target)
        elif action == 5:
            queue.unpark(target)
            parked.discard(target)
        elif action == 6:
            heard = Heard()
            wait = queue.wait(some, heard)
            if wait.num_left:
                waits.append((wait, set(some), heard))
        elif action == 7:
            refused, flying[target] = flying[target][:1], flying[target][1:]
            queue.defer(target, refused)
            later[target] |= set(refused)
        elif action == 8:
            queue.resume(target)
            later[target].clear()
        elif action == 9:
            queue.put_back(target, flying[target])
            flying[target] = []
        queue.check()
        assert len(queue) == sum(map(len, owed.values()))
        for wait, wanted, heard in list(waits):
            if heard.times:
                assert heard.times == 1
                waits.remove((wait, wanted, heard))
                continue
            awaited = set().union(*(owed[t] - later[t] for t in (A, B) if t not in parked))
            assert wanted & awaited, "it was not called though nothing is owed"
