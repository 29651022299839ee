"""Claims about a node's publisher: what it sends, how it answers requests, what it counts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvstore.events import (
    EVENTS_LABEL,
    REPLAY_LABEL,
    KvEventLog,
    KvEventPublisher,
    WatchKvEvents,
)
from kvstore.events.control import SNAPSHOT_PART_KEYS
from kvstore.events.log import BATCH_PAGES_MAX
from kvstore.events.publisher import FLUSH_BATCHES, beside
from kvstore.events.wire import END_OF_REPLAY, decode_batch, encode_seq
from kvstore.page import PageKey
from tests.hub import Hub, HubNetwork
from tests.kvstore.event_sink import Held
from tests.kvstore.vllm_events import VllmMirror
from transfer.channel import Caller
from transfer.identity import Identity, Incarnation, NodeId, Role

NODE = Identity(node_id=NodeId("store-1"), role=Role.STORE, incarnation=Incarnation("ab12"))
CALLER = Caller(peer=NODE, deadline_s=0.0)


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


class Bench:
    def __init__(self) -> None:
        self.hub = Hub()
        self.log = KvEventLog()
        self.events = KvEventPublisher(self.log)
        self.labels = self.events.open(
            HubNetwork(self.hub), NODE, bind="tcp://127.0.0.1:0", wall_clock=lambda: 1.5
        )
        self.publisher = next(iter(self.hub.publishers.values()))

    def store(self, *numbers: int) -> None:
        """One batch for each."""
        for number in numbers:
            self.log.stored([key(number)], parent=None, tokens=bytes(64))
            self.events.flush()

    def ask(self, *request: bytes) -> list[list[bytes]]:
        return [list(parts) for parts in self.publisher.replay(list(request))]


def test_labels_and_topic_say_where_and_whose() -> None:
    bench = Bench()
    bench.store(1)
    assert bench.labels == {
        EVENTS_LABEL: bench.publisher.address,
        REPLAY_LABEL: bench.publisher.replay_address,
    }
    (parts,) = bench.publisher.sent
    assert parts[:2] == [b"kv@store-1@ab12", encode_seq(0)]
    router = VllmMirror()
    router.take(parts)
    assert list(router.pages) == [key(1)]


def test_what_happens_before_the_node_has_started_is_sent_when_it_has() -> None:
    log = KvEventLog()
    events = KvEventPublisher(log)
    log.stored([key(1)], parent=None, tokens=bytes(64))
    events.flush()
    hub = Hub()
    events.open(HubNetwork(hub), NODE, bind="tcp://127.0.0.1:0", wall_clock=lambda: 0.0)
    events.flush()
    assert len(next(iter(hub.publishers.values())).sent) == 1


def test_a_replay_request_of_vllm_is_answered_with_pairs_and_ends_with_minus_one() -> None:
    bench = Bench()
    bench.store(1, 2, 3)
    sent = [[seq, payload] for _, seq, payload in bench.publisher.sent]
    assert bench.ask(encode_seq(1)) == [*sent[1:], [END_OF_REPLAY, b""]]
    assert bench.ask(encode_seq(99)) == [[END_OF_REPLAY, b""]]


def test_a_tagged_request_is_answered_with_epoch_and_tag() -> None:
    bench = Bench()
    bench.store(1)
    answers = bench.ask(encode_seq(0), b"tag")
    assert [answer[2:] for answer in answers] == [[b"ab12", b"tag"]] * 2


@pytest.mark.parametrize(
    "request_parts",
    [[], [b""], [b"1"], [END_OF_REPLAY], [bytes(8), b"x" * 17], [bytes(8), b"", b""]],
)
def test_requests_that_make_no_sense_are_counted_and_not_answered(
    request_parts: list[bytes],
) -> None:
    bench = Bench()
    bench.store(1)
    assert bench.ask(*request_parts) == []
    assert bench.events.num_invalid == 1


async def test_a_snapshot_and_the_batches_from_its_number_on_are_what_is_held() -> None:
    bench = Bench()
    bench.store(*range(SNAPSHOT_PART_KEYS + 1))
    bench.log.removed([key(0)])  # not flushed yet
    stream: Any = bench.events.watch(WatchKvEvents(), CALLER)
    parts = [await anext(stream)]
    bench.log.removed([key(1)])  # between two parts
    bench.store(0)
    while not parts[-1].last:
        parts.append(await anext(stream))
    assert [len(part.unpacked()) for part in parts] == [SNAPSHOT_PART_KEYS, 0]
    assert {(part.epoch, part.next_seq) for part in parts} == {("ab12", SNAPSHOT_PART_KEYS + 2)}
    sink = Held()
    sink.replace([key for part in parts for key in part.unpacked()])
    for _, seq, payload in bench.publisher.sent:
        if int.from_bytes(seq, "big") >= parts[0].next_seq:
            sink.apply(decode_batch(payload))
    assert sink.keys == set(bench.log.held()) == {key(0), *map(key, range(2, 4097))}
    assert bench.events.num_watchers == 1
    await stream.aclose()
    assert bench.events.num_watchers == 0


async def test_a_long_queue_is_sent_in_several_turns_of_the_loop_and_in_order() -> None:
    bench = Bench()
    count = 10 * BATCH_PAGES_MAX
    bench.log.stored([key(n) for n in range(count)], parent=None, tokens=bytes(64 * count))
    bench.events.flush()
    assert len(bench.publisher.sent) == FLUSH_BATCHES
    while bench.log.pending:  # noqa: ASYNC110 - turns of the loop are what is counted
        await asyncio.sleep(0)
    router = VllmMirror()
    for parts in bench.publisher.sent:
        router.take(parts)
    assert len(router.pages) == count


def test_another_incarnation_publishes_under_another_epoch() -> None:
    bench = Bench()
    bench.store(1)
    bench.events.renew(msgspec.structs.replace(NODE, incarnation=Incarnation("cd34")))
    bench.store(2)
    assert [parts[0] for parts in bench.publisher.sent] == [b"kv@store-1@ab12", b"kv@store-1@cd34"]
    assert bench.ask(encode_seq(9), b"")[0][2] == b"cd34"


def test_counters_say_what_was_lost() -> None:
    bench = Bench()
    bench.hub.drops = 2
    bench.store(1, 2, 3)
    assert bench.events.counters() == {
        "event_batches": 3,
        "event_drops": 2,
        "event_overflows": 0,
        "event_replays": 0,
        "event_snapshots": 0,
    }
    bench.events.close()
    bench.events.close()
    assert not bench.hub.publishers


def test_events_are_published_on_the_host_of_the_channels() -> None:
    assert beside("tcp://0.0.0.0:7000", 0) == "tcp://0.0.0.0:0"
    assert beside("tcp://[::1]:7000", 5557) == "tcp://[::1]:5557"
    assert beside("tcp://127.0.0.1:0", 0) == "tcp://127.0.0.1:0"
