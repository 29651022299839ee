"""Claims about the KV event log: numbered, bounded, and never different from the cache."""

from __future__ import annotations

import random

from kvstore.events import (
    BATCHES_MAX,
    AllPagesCleared,
    KvEventBatch,
    KvEventLog,
    PagesRemoved,
    PagesStored,
)
from kvstore.page import PageKey


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def apply(held: set[PageKey], batch: KvEventBatch) -> set[PageKey]:
    """The subscriber's side, naively."""
    if batch.snapshot:
        held = set()
    for event in batch.events:
        match event:
            case PagesStored(keys):
                held = held | set(keys)
            case PagesRemoved(keys):
                assert set(keys) <= held, "a page was removed that was never stored"
                held = held - set(keys)
            case AllPagesCleared():
                held = set()
    return held


def test_no_change_makes_no_batch() -> None:
    log = KvEventLog()
    log.record()
    log.record(removed=[key(1)])
    assert log.seq == 0
    log.record(stored=[key(1)])
    log.record(stored=[key(1)])
    assert log.seq == 1


def test_a_subscriber_that_follows_equals_the_log_after_any_history() -> None:
    rng = random.Random(1)
    log, held, seq = KvEventLog(), set[PageKey](), 0
    for _ in range(2000):
        keys = [key(rng.randrange(40)) for _ in range(rng.randrange(4))]
        if rng.random() < 0.01:
            log.clear()
        elif rng.random() < 0.5:
            log.record(stored=keys)
        else:
            log.record(removed=keys)
        if rng.random() < 0.2:
            batches = log.since(seq)
            assert batches is not None
            assert [b.seq for b in batches] == list(range(seq + 1, log.seq + 1))
            for batch in batches:
                held = apply(held, batch)
            seq = log.seq
            assert held == apply(set(), log.snapshot())
            assert log.num_held == len(held)


def test_a_subscriber_too_far_behind_is_told_to_start_over() -> None:
    log = KvEventLog()
    for number in range(BATCHES_MAX + 2):
        log.record(stored=[key(number)])
    assert log.since(0) is None
    assert log.since(1) is None
    assert len(log.since(2) or ()) == BATCHES_MAX
    assert log.since(log.seq + 1) is None, "a number from another life"
    assert log.snapshot().seq == log.seq
