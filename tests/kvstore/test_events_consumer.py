"""Claims about the consumer's side of KV events: gaps, replays, restarts, and never twice."""

from __future__ import annotations

import random

import pytest

from kvstore.events import (
    AllPagesCleared,
    EventCounters,
    KvEvent,
    KvEventConsumer,
    PagesRemoved,
    PagesStored,
    Want,
)
from kvstore.events.consumer import EARLY_BATCHES_MAX
from kvstore.page import PageKey
from tests.kvstore.event_sink import Held


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def stored(*numbers: int) -> list[KvEvent]:
    return [PagesStored([key(number) for number in numbers])]


class Follower:
    """A consumer over a set; batch n of epoch "e" stores page n."""

    def __init__(self, next_seq: int | None = 0) -> None:
        self.held = Held()
        self.counters = EventCounters()
        self.consumer = KvEventConsumer(self.held, self.counters)
        if next_seq is not None:
            self.consumer.snapshot("e", next_seq, [key(n) for n in range(next_seq)])

    def live(self, *seqs: int, epoch: str = "e") -> None:
        for seq in seqs:
            self.consumer.live(epoch, seq, stored(seq))

    def replay(self, *seqs: int, epoch: str = "e", end: bool = True) -> None:
        for seq in seqs:
            self.consumer.replayed(epoch, seq, stored(seq))
        if end:
            self.consumer.replay_ended(epoch)

    @property
    def known(self) -> list[int]:
        return sorted(int.from_bytes(k, "little") for k in self.held.keys)

    @property
    def want(self) -> Want:
        return self.consumer.want


def test_nothing_is_applied_before_the_first_snapshot_and_then_what_follows_it() -> None:
    f = Follower(next_seq=None)
    f.live(3, 4, 5)
    assert (f.want, f.known) == (Want.SNAPSHOT, [])
    f.consumer.snapshot("e", 4, [key(1), key(3)])
    assert (f.want, f.known, f.consumer.next_seq) == (Want.NOTHING, [1, 3, 4, 5], 6)
    assert f.counters.num_repeats == 1


def test_batches_in_order_are_applied_once() -> None:
    f = Follower()
    f.live(0, 1, 2)
    assert (f.known, f.counters.num_batches, f.want) == ([0, 1, 2], 3, Want.NOTHING)


def test_one_gap_makes_one_request_whatever_arrives_meanwhile() -> None:
    f = Follower()
    f.live(0, 3, 4, 5)
    assert (f.want, f.consumer.next_seq, f.counters.num_gaps) == (Want.REPLAY, 1, 1)
    assert f.known == [0], "nothing is applied out of order"
    f.replay(1, 2, 3, end=False)
    f.live(6)
    f.replay(4, 5, 6)
    assert (f.want, f.known) == (Want.NOTHING, list(range(7)))
    assert (f.counters.num_gaps, f.counters.num_snapshots) == (1, 1)
    f.live(7)
    assert f.known == list(range(8))


def test_a_replay_needs_to_bring_only_what_is_missing() -> None:
    f = Follower()
    f.live(2, 3)
    f.replay(0, 1)
    assert (f.want, f.known, f.counters.num_gaps) == (Want.NOTHING, [0, 1, 2, 3], 1)


def test_a_second_gap_during_a_replay_is_asked_for_by_itself() -> None:
    f = Follower()
    f.live(1, 2, 5)
    f.replay(0, 1, 2)
    assert (f.want, f.consumer.next_seq, f.counters.num_gaps) == (Want.REPLAY, 3, 2)
    f.replay(3, 4, 5)
    assert (f.want, f.known) == (Want.NOTHING, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("brought", [(), (4, 5)])
def test_a_range_that_the_publisher_has_forgotten_makes_one_snapshot(
    brought: tuple[int, ...],
) -> None:
    f = Follower()
    f.live(0, 5, 6)
    f.replay(*brought)
    assert (f.want, f.known) == (Want.SNAPSHOT, [0])
    f.live(7)
    f.consumer.snapshot("e", 7, [key(n) for n in range(7)])
    assert (f.want, f.known) == (Want.NOTHING, list(range(8)))
    assert (f.counters.num_gaps, f.counters.num_snapshots) == (1, 2)


def test_a_replay_that_does_not_come_makes_one_snapshot() -> None:
    f = Follower()
    f.live(0, 5)
    f.consumer.unanswered()
    assert (f.want, f.counters.num_unanswered) == (Want.SNAPSHOT, 1)
    f.replay(1, 2)  # late: nobody waits for it any more
    assert f.known == [0]
    f.consumer.snapshot("e", 6, [key(n) for n in range(6)])
    assert (f.want, f.known) == (Want.NOTHING, list(range(6)))


def test_another_epoch_drops_what_the_old_life_held_at_once() -> None:
    f = Follower(next_seq=500)
    f.live(0, epoch="f")
    assert (f.known, f.want, f.counters.num_restarts) == ([], Want.SNAPSHOT, 1)
    f.live(1, epoch="f")
    f.consumer.snapshot("f", 1, [key(0)])
    assert (f.known, f.want, f.consumer.next_seq) == ([0, 1], Want.NOTHING, 2)
    assert (f.counters.num_restarts, f.counters.num_gaps) == (1, 0)


def test_numbers_that_go_back_are_a_restart_though_no_epoch_is_told() -> None:
    f = Follower(next_seq=None)
    f.consumer.snapshot("", 40, [key(39)])
    f.live(40, 41, epoch="")
    f.live(0, epoch="")
    assert (f.known, f.want, f.counters.num_restarts) == ([], Want.SNAPSHOT, 1)
    f.consumer.snapshot("", 1, [key(0)])
    f.live(1, 2, epoch="")
    assert (f.known, f.want) == ([0, 1, 2], Want.NOTHING)


def test_a_restart_that_a_replay_shows_drops_the_old_life() -> None:
    for seqs in ((0,), ()):
        f = Follower(next_seq=10)
        f.consumer.probe()
        f.replay(*seqs, epoch="f")
        assert (f.known, f.want, f.counters.num_restarts) == ([], Want.SNAPSHOT, 1)


def test_a_snapshot_of_the_old_life_does_not_hide_the_new_one() -> None:
    f = Follower(next_seq=None)
    f.live(0, epoch="f")
    f.consumer.snapshot("e", 10, [key(n) for n in range(10)])
    f.live(1, epoch="f")
    assert (f.known, f.want) == ([], Want.SNAPSHOT)


def test_a_probe_finds_the_loss_of_the_last_batches() -> None:
    f = Follower()
    f.live(0)
    f.consumer.probe()
    assert (f.want, f.consumer.next_seq) == (Want.REPLAY, 1)
    f.replay(1, 2)
    assert (f.want, f.known, f.counters.num_gaps) == (Want.NOTHING, [0, 1, 2], 0)
    f.consumer.probe()
    f.replay()
    assert (f.want, f.counters.num_replayed, f.counters.num_snapshots) == (Want.NOTHING, 2, 1)


def test_a_batch_that_is_live_and_replayed_is_applied_once() -> None:
    f = Follower()
    f.consumer.probe()
    f.live(0, 1)
    f.replay(0, 1)
    f.consumer.live("e", 2, [PagesRemoved([key(0)])])
    assert (f.known, f.counters.num_batches, f.counters.num_repeats) == ([1], 3, 2)


def test_a_gap_that_shows_while_probing_is_asked_for() -> None:
    f = Follower()
    f.consumer.probe()
    f.live(1)
    f.replay()  # answered before batch 0 was published
    assert (f.want, f.consumer.next_seq) == (Want.REPLAY, 0)
    f.replay(0, 1)
    assert (f.want, f.known) == (Want.NOTHING, [0, 1])


def test_batches_that_come_too_early_are_bounded() -> None:
    f = Follower(next_seq=None)
    f.live(*range(3 * EARLY_BATCHES_MAX + 10))
    assert len(f.consumer._early) <= EARLY_BATCHES_MAX
    f.consumer.snapshot("e", 0, [])
    assert f.want is Want.REPLAY, "what was let go is a gap"


def test_a_failed_snapshot_forgets_and_wants_another() -> None:
    f = Follower(next_seq=3)
    f.consumer.lost()
    assert (f.known, f.want, f.held.num_forgotten) == ([], Want.SNAPSHOT, 1)


@pytest.mark.parametrize("seed", range(30))
def test_the_sink_equals_the_publisher_whenever_it_is_in_sync(seed: int) -> None:
    """Losses, restarts, windows too short, answers that never come, over a naive publisher."""
    rng = random.Random(seed)
    held = Held()
    consumer = KvEventConsumer(held, EventCounters())
    epoch, window, content, first = 0, dict[int, list[KvEvent]](), Held(), 0
    num_in_sync = 0
    for _ in range(3000):
        action = rng.random()
        if action < 0.01:
            epoch, window, content, first = epoch + 1, {}, Held(), 0
        elif action < 0.6:
            number = rng.randrange(30)
            events: list[KvEvent] = [
                rng.choice([PagesStored([key(number)]), PagesRemoved([key(number)])])
            ]
            if rng.random() < 0.02:
                events = [AllPagesCleared()]
            content.apply(events)
            seq = first + len(window)
            window[seq] = events
            if len(window) > 8:
                del window[first]
                first += 1
            if rng.random() < 0.9:
                consumer.live(str(epoch), seq, events)
        elif action < 0.7:
            consumer.probe()
        elif consumer.want is Want.REPLAY and action < 0.95:
            for seq in [s for s in window if s >= consumer.next_seq]:
                consumer.replayed(str(epoch), seq, window[seq])
            consumer.replay_ended(str(epoch))
        elif consumer.want is Want.REPLAY:
            consumer.unanswered()
        elif consumer.want is Want.SNAPSHOT:
            consumer.snapshot(str(epoch), first + len(window), list(content.keys))
        in_sync = consumer.want is Want.NOTHING and consumer.next_seq == first + len(window)
        if in_sync and consumer.epoch == str(epoch):
            assert held.keys == content.keys
            num_in_sync += 1
    assert num_in_sync > 500, "it is hardly ever in sync"
