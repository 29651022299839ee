"""Claims about the publisher's side of KV events: format, numbers, bounds, replay window."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.events import AllPagesCleared, Encoding, KvEventLog, Medium, PagesRemoved, PagesStored
from kvstore.events.control import SNAPSHOT_PART_KEYS, KvSnapshotPart
from kvstore.events.log import (
    BATCH_PAGES_MAX,
    QUEUED_PAGES_MAX,
    WINDOW_BATCHES_MAX,
    WINDOW_NBYTES_MAX,
    Batch,
)
from kvstore.events.wire import (
    END_OF_REPLAY,
    decode_batch,
    decode_seq,
    encode_batch,
    encode_seq,
    epoch_of,
    topic_of,
)
from kvstore.page import PageKey
from tests.kvstore.vllm_events import ARRAY_BATCHES, MapBatch, VllmMirror
from transfer.errors import FrameInvalid

SIZE = 4


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def keys(*numbers: int) -> list[PageKey]:
    return [key(number) for number in numbers]


def packed(*tokens: int) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def store(log: KvEventLog, *numbers: int, parent: int | None = None) -> None:
    """A chain of pages whose tokens are their numbers."""
    log.stored(
        keys(*numbers),
        parent=None if parent is None else key(parent),
        tokens=packed(*(number for number in numbers for _ in range(SIZE))),
    )


# ── the format ──────────────────────────────────────────────────────────────────────────────────

EVENTS = [
    PagesStored(keys(1, 2), "CPU", key(9), packed(*range(2 * SIZE))),
    PagesStored(keys(3), "GPU", None, packed(-1, 0, 2**31 - 1, 5)),
    PagesRemoved(keys(2, 3), "DISK"),
    AllPagesCleared(),
]


@pytest.mark.parametrize("batch_type", ARRAY_BATCHES)
def test_every_vllm_that_reads_arrays_reads_our_batches(batch_type: Any) -> None:
    batch = msgspec.msgpack.decode(encode_batch(12.5, EVENTS), type=batch_type)
    assert batch.ts == 12.5
    assert getattr(batch, "data_parallel_rank", 0) == 0
    first, second, removed, cleared = batch.events
    assert (first.block_hashes, first.parent_block_hash) == (keys(1, 2), key(9))
    assert (first.token_ids, first.block_size) == (list(range(2 * SIZE)), SIZE)
    assert first.lora_id is None
    assert getattr(first, "medium", "CPU") == "CPU"
    assert (second.parent_block_hash, second.token_ids) == (None, [-1, 0, 2**31 - 1, 5])
    assert removed.block_hashes == keys(2, 3)
    assert getattr(removed, "medium", "DISK") == "DISK"
    assert msgspec.to_builtins(cleared) == ["AllBlocksCleared"]


def test_vllm_that_reads_maps_reads_our_maps() -> None:
    batch = msgspec.msgpack.decode(encode_batch(1.0, EVENTS, Encoding.MAP), type=MapBatch)
    first, second, removed, cleared = batch.events
    assert (first.block_hashes, first.parent_block_hash) == (keys(1, 2), key(9))
    assert (first.token_ids, first.block_size, first.medium) == (list(range(8)), SIZE, "CPU")
    assert (second.parent_block_hash, removed.block_hashes) == (None, keys(2, 3))
    assert msgspec.to_builtins(cleared) == {"type": "AllBlocksCleared"}


def test_a_reader_without_types_finds_three_elements_and_names_first() -> None:
    ts, events, rank = msgspec.msgpack.decode(encode_batch(3.0, EVENTS))
    assert (ts, rank) == (3.0, 0)
    assert [event[0] for event in events] == [
        "BlockStored",
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ]


@pytest.mark.parametrize("encoding", list(Encoding))
def test_both_encodings_are_read_back_without_parents_and_tokens(encoding: Encoding) -> None:
    assert decode_batch(encode_batch(1.0, EVENTS, encoding)) == [
        PagesStored(keys(1, 2), "CPU"),
        PagesStored(keys(3), "GPU"),
        PagesRemoved(keys(2, 3), "DISK"),
        AllPagesCleared(),
    ]


@pytest.mark.parametrize("encoding", list(Encoding))
def test_whatever_bytes_arrive_decoding_gives_events_or_frame_invalid(encoding: Encoding) -> None:
    rng = random.Random(1)
    good = encode_batch(1.0, EVENTS, encoding)
    num_refused = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            decode_batch(bytes(bad[: rng.randint(0, len(bad))]))
        except FrameInvalid:
            num_refused += 1
    assert num_refused > 1000


@pytest.mark.parametrize("bad", [b"short", b"x" * 33, 17])
def test_page_keys_of_another_kind_are_refused(bad: object) -> None:
    payload = msgspec.msgpack.encode([1.0, [["BlockRemoved", [bad]]], 0])
    with pytest.raises(FrameInvalid):
        decode_batch(payload)


def test_sequence_numbers_are_8_bytes_big_endian_and_minus_one_ends_a_replay() -> None:
    assert encode_seq(258) == b"\0\0\0\0\0\0\1\2"
    assert decode_seq(encode_seq(258)) == 258
    assert (-1).to_bytes(8, "big", signed=True) == END_OF_REPLAY
    assert decode_seq(END_OF_REPLAY) is None
    with pytest.raises(FrameInvalid):
        decode_seq(b"\1")


def test_the_topic_names_node_and_epoch() -> None:
    assert topic_of("prefill-1", "ab12") == b"kv@prefill-1@ab12"
    assert epoch_of(topic_of("a@b", "ab12")) == "ab12"
    assert topic_of("a@b", "ab12").startswith(topic_of("a@b", ""))
    assert epoch_of(b"kv-events") == ""
    with pytest.raises(FrameInvalid):
        epoch_of(b"\xff\xfe")


def test_snapshots_come_in_chunks_of_whole_keys() -> None:
    for count in (0, 1, SNAPSHOT_PART_KEYS, 2 * SNAPSHOT_PART_KEYS + 1):
        log = KvEventLog()
        store(log, *range(count))
        chunks = list(log.snapshot())
        assert all(0 < len(chunk) <= 32 * SNAPSHOT_PART_KEYS for chunk in chunks)
        parts = [KvSnapshotPart(epoch="e", next_seq=0, keys=c, last=False) for c in chunks]
        assert [key for part in parts for key in part.unpacked()] == keys(*range(count))
    with pytest.raises(ValueError, match="33 bytes"):
        KvSnapshotPart(epoch="e", next_seq=0, keys=b"x" * 33, last=True)


# ── the log ─────────────────────────────────────────────────────────────────────────────────────


def test_no_change_makes_no_batch_and_the_first_has_number_0() -> None:
    log = KvEventLog()
    log.stored([], parent=None, tokens=b"")
    log.removed([])
    assert log.flush(0.0) == []
    store(log, 1)
    (batch,) = log.flush(5.0)
    assert (batch.seq, log.next_seq) == (0, 1)
    assert log.flush(6.0) == []


def test_a_router_that_reads_every_batch_knows_what_is_held_after_any_history() -> None:
    rng = random.Random(1)
    log, router = KvEventLog(), VllmMirror()
    held: dict[int, None] = {}
    for _ in range(2000):
        if rng.random() < 0.01:
            log.clear()
            held.clear()
        elif rng.random() < 0.5:
            new = [n for n in {rng.randrange(40) for _ in range(4)} if n not in held]
            parent = rng.choice(list(held)) if held else None
            store(log, *new, parent=parent)
            held.update(dict.fromkeys(new))
        else:
            gone = [n for n in {rng.randrange(40) for _ in range(4)} if n in held]
            log.removed(keys(*gone))
            for number in gone:
                del held[number]
        if rng.random() < 0.2:
            for batch in log.flush(0.0):
                router.take([b"kv@a@e", encode_seq(batch.seq), batch.payload])
            assert set(router.pages) == set(log.held()) == set(keys(*held))
            assert all(
                tokens == (int.from_bytes(k, "little"),) * SIZE
                for k, (_, tokens) in router.pages.items()
            )


def test_pages_of_one_chain_that_come_one_by_one_are_one_event() -> None:
    log = KvEventLog()
    store(log, 1)
    store(log, 2, 3, parent=1)
    store(log, 7, parent=1)
    (batch,) = log.flush(0.0)
    assert decode_batch(batch.payload) == [
        PagesStored(keys(1, 2, 3), "GPU"),
        PagesStored(keys(7), "GPU"),
    ]
    router = VllmMirror()
    router.apply(batch.payload)
    assert router.pages[key(3)] == (key(2), (3,) * SIZE)
    assert router.pages[key(7)] == (key(1), (7,) * SIZE)


def test_long_chains_are_cut_into_batches_that_go_on_with_each_other() -> None:
    log = KvEventLog()
    count = 2 * BATCH_PAGES_MAX + 3
    store(log, *range(count))
    batches = log.flush(0.0)
    assert [batch.seq for batch in batches] == [0, 1, 2]
    router = VllmMirror()
    for batch in batches:
        router.apply(batch.payload)
    assert [parent for parent, _ in router.pages.values()] == [None, *keys(*range(count - 1))]
    log.removed(keys(*range(count)))
    assert len(log.flush(0.0)) == 3


def test_events_say_the_medium() -> None:
    log = KvEventLog(medium=Medium.CPU, held=lambda: iter(()))
    store(log, 1)
    log.removed(keys(1), medium=Medium.DISK)
    (batch,) = log.flush(0.0)
    media = [getattr(event, "medium", None) for event in decode_batch(batch.payload)]
    assert media == ["CPU", "DISK"]


def test_pages_that_go_one_by_one_are_one_event() -> None:
    log = KvEventLog(held=lambda: iter(()))
    for number in range(BATCH_PAGES_MAX + 1):
        log.removed(keys(number))
    log.removed(keys(7), medium=Medium.DISK)
    events = [decode_batch(batch.payload) for batch in log.flush(0.0)]
    counts = [[len(getattr(event, "keys", ())) for event in batch] for batch in events]
    assert counts == [[BATCH_PAGES_MAX], [1, 1]]


def test_a_flush_can_be_cut_and_goes_on_where_it_ended() -> None:
    log = KvEventLog()
    store(log, *range(3 * BATCH_PAGES_MAX))
    assert ([batch.seq for batch in log.flush(0.0, 2)], log.pending) == ([0, 1], True)
    assert ([batch.seq for batch in log.flush(0.0, 2)], log.pending) == ([2], False)


def test_events_that_do_not_fit_the_books_are_bugs() -> None:
    log = KvEventLog()
    store(log, 1)
    with pytest.raises(AssertionError, match="came twice"):
        store(log, 1)
    with pytest.raises(AssertionError, match="had not come"):
        log.removed(keys(2))


def test_events_that_nobody_flushes_are_bounded_and_their_loss_is_a_hole_in_the_numbers() -> None:
    log = KvEventLog(held=lambda: iter(()))
    for number in range(QUEUED_PAGES_MAX + 10):
        log.removed(keys(number))
    assert log.num_overflows == 1
    batches = log.flush(0.0)
    assert batches[0].seq == 1
    assert [batch.seq for batch in log.replay(0)] == [batch.seq for batch in batches]


def test_replay_gives_what_the_window_has_left() -> None:
    log = KvEventLog()
    sent: list[Batch] = []
    for number in range(WINDOW_BATCHES_MAX + 2):
        store(log, number)
        sent += log.flush(0.0)
    assert list(log.replay(0)) == sent[2:]
    assert list(log.replay(5)) == sent[5:]
    assert list(log.replay(log.next_seq)) == []
    assert list(log.replay(log.next_seq + 1000)) == [], "a number from another life"


def test_the_window_is_bounded_in_bytes_too() -> None:
    log = KvEventLog(held=lambda: iter(()))
    page = keys(1)
    tokens = bytes(4 * 4096)
    nbytes = 0
    while nbytes <= WINDOW_NBYTES_MAX + (1 << 20):
        for _ in range(BATCH_PAGES_MAX):
            log.stored(page, parent=None, tokens=tokens)
        nbytes += sum(len(batch.payload) for batch in log.flush(0.0))
    kept = sum(len(batch.payload) for batch in log.replay(0))
    assert WINDOW_NBYTES_MAX - (2 << 20) < kept <= WINDOW_NBYTES_MAX


def test_a_replay_that_is_read_slowly_goes_on_with_what_comes_meanwhile() -> None:
    log = KvEventLog()
    store(log, 1)
    store(log, 2)
    log.flush(0.0)
    replay = log.replay(0)
    assert next(replay).seq == 0
    store(log, 3)
    log.flush(0.0)
    assert [batch.seq for batch in replay] == [1]
