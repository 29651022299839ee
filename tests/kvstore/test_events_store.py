"""Claims about a store node's KV events: they say what can be read there, and from where."""

from __future__ import annotations

import random

import msgspec

from kvstore.events import EventCounters, KvEventConsumer, PagesRemoved, PagesStored, WatchKvEvents
from kvstore.events.wire import decode_batch, epoch_of
from kvstore.messages import pack_keys, states_of
from kvstore.page import PageKey
from kvstore.server.directory import Directory
from kvstore.server.segment import Segment
from kvstore.server.tier import TierPage
from kvstore.store import PageIdentity, PageRecord, PageState
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.event_sink import Held
from tests.kvstore.fakes import FakeNetwork, World
from tests.kvstore.pages import SPEC, sequence
from tests.kvstore.vllm_events import VllmMirror
from transfer.channel import Caller

CHECKSUM = b"c" * 16
SIZE = SPEC.page_size


def directory(num_pages: int) -> Directory:
    nbytes = num_pages * SPEC.page_nbytes
    return Directory(Segment(nbytes), lease_s=5.0, high=nbytes, low=nbytes)


def store(d: Directory, pages: list[PageIdentity]) -> None:
    for page in pages:
        slot = d.reserve([page], SPEC, 0.0)[0].slot
        assert slot is not None
        assert d.commit(page.key, slot.generation, CHECKSUM)


def news(d: Directory) -> list[object]:
    """Events since the last time."""
    return [event for batch in d.event_log.flush(0.0) for event in decode_batch(batch.payload)]


def keys(pages: list[PageIdentity]) -> list[PageKey]:
    return [page.key for page in pages]


def test_a_page_is_announced_when_it_is_committed_with_its_tokens_and_parent() -> None:
    d = directory(4)
    pages = sequence(range(2 * SIZE))
    granted = d.reserve(pages, SPEC, 0.0)
    assert news(d) == [], "nobody can read it yet"
    for page, reservation in zip(pages, granted, strict=True):
        assert reservation.slot is not None
        d.commit(page.key, reservation.slot.generation, CHECKSUM)
    router = VllmMirror()
    for batch in d.event_log.flush(0.0):
        router.apply(batch.payload)
    assert router.pages == {
        pages[0].key: (None, tuple(range(SIZE))),
        pages[1].key: (pages[0].key, tuple(range(SIZE, 2 * SIZE))),
    }


def test_writers_that_give_up_announce_nothing() -> None:
    d = directory(4)
    page = sequence(range(SIZE))[0]
    slot = d.reserve([page], SPEC, 0.0)[0].slot
    assert slot is not None
    d.abort(page.key, slot.generation, quiet=False)
    d.tick(100.0, 16)
    assert news(d) == []


def test_evicted_dropped_and_cleared_pages_are_announced_as_removed() -> None:
    d = directory(2)
    old, new, last = (sequence(range(n, n + SIZE)) for n in (0, 100, 200))
    store(d, [*old, *new])
    assert news(d) == [PagesStored(keys(old), "CPU"), PagesStored(keys(new), "CPU")]
    store(d, last)  # evicts the oldest
    assert news(d) == [PagesRemoved(keys(old), "CPU"), PagesStored(keys(last), "CPU")]
    grant = d.acquire(keys(new), 0.0)
    assert grant is not None
    generation = d.leased(grant)[0].generation
    assert d.drop(new[0].key, generation)
    assert news(d) == [PagesRemoved(keys(new), "CPU")], "at once, though a reader still has it"
    d.release(grant.lease_id)
    assert news(d) == []
    d.clear()
    assert news(d) == [PagesRemoved(keys(last), "CPU")]


def test_tail_pages_are_not_announced() -> None:
    d = directory(4)
    pages = sequence(range(SIZE + 1))
    store(d, pages)
    assert news(d) == [PagesStored(keys(pages[:1]), "CPU")]
    assert list(d.event_log.snapshot()) == [pages[0].key]
    d.clear()
    assert news(d) == [PagesRemoved(keys(pages[:1]), "CPU")]


def test_pages_that_go_to_disk_and_come_back_say_so() -> None:
    d = directory(2)
    old, *more = (sequence(range(n, n + SIZE)) for n in (0, 100, 200))
    record = PageRecord(
        key=old[0].key,
        parent=old[0].parent,
        depth=0,
        tokens=old[0].tokens,
        checksum=CHECKSUM,
        page_nbytes=SPEC.page_nbytes,
    )
    assert d.spilling.adopt(TierPage(record, SPEC, b"", 35, 1.0))
    assert news(d) == [PagesStored(keys(old), "DISK")]
    assert list(d.event_log.snapshot()) == [old[0].key]
    promotion = d.spilling.begin_promote(old[0].key, 0.0)
    assert promotion is not None
    assert d.spilling.end_promote(promotion, loaded=True)
    assert news(d) == [PagesRemoved(keys(old), "DISK"), PagesStored(keys(old), "CPU")]
    store(d, [*more[0], *more[1]])
    assert d.state(old[0].key) is PageState.SPILLED
    assert PagesRemoved(keys(old), "CPU") in (events := news(d))
    assert events.index(PagesRemoved(keys(old), "CPU")) < events.index(
        PagesStored(keys(old), "DISK")
    )
    d.spilling.lost(old[0].key)
    assert news(d) == [PagesRemoved(keys(old), "DISK")]


def test_events_and_snapshot_equal_the_directory_after_any_history() -> None:
    rng = random.Random(1)
    d, router = directory(12), VllmMirror()
    prompts = [sequence([n, *range(rng.randrange(2, 6 * SIZE))]) for n in range(8)]
    pages = list({page.key: page for prompt in prompts for page in prompt}.values())
    for step in range(1500):
        action, page = rng.random(), rng.choice(pages)
        if action < 0.5:
            reservation = d.reserve([page], SPEC, float(step))[0]
            if reservation.slot is not None and rng.random() < 0.8:
                d.commit(page.key, reservation.slot.generation, CHECKSUM)
        elif action < 0.9:
            d.match(pack_keys([page.key]), float(step))
        elif action < 0.91:
            d.clear()
        else:
            d.tick(float(step), 4)
        for batch in d.event_log.flush(0.0):
            router.apply(batch.payload)
        states = states_of(d.match(pack_keys(keys(pages)), float(step), touch=False))
        readable = {
            p.key
            for p, state in zip(pages, states, strict=True)
            if state.present and p.num_tokens == SIZE
        }
        assert set(router.pages) == readable
        snapshot = b"".join(d.event_log.snapshot())
        assert {snapshot[at : at + 32] for at in range(0, len(snapshot), 32)} == readable
    assert router.pages


async def test_a_store_node_publishes_what_its_clients_put() -> None:
    world = World()
    network = FakeNetwork(world)
    cluster = StoreCluster(world, network=lambda: network)
    node = await cluster.node()
    publisher = network.publisher()
    labels = world.view.members[0].info.labels
    assert labels["kv_events"] == publisher.address
    sink = Held()
    consumer = KvEventConsumer(sink, EventCounters())
    stream = node._events.watch(WatchKvEvents(), Caller(peer=node.identity, deadline_s=0.0))
    part = await anext(stream)
    consumer.snapshot(part.epoch, part.next_seq, part.unpacked())
    pages = sequence(range(4 * SIZE + 1))
    store(node._directory, pages)
    node._events.flush()
    for topic, seq, payload in publisher.sent:
        consumer.live(epoch_of(topic), int.from_bytes(seq, "big"), decode_batch(payload))
    assert sink.keys == set(keys(pages[:4]))
    assert node.numbers()["event_batches"] == 1
    node.renew(msgspec.structs.replace(node.identity, incarnation="another"))
    node._directory.clear()
    node._events.flush()
    assert epoch_of(publisher.sent[-1][0]) == "another"
    await stream.aclose()  # type: ignore[attr-defined]
    await cluster.close()
    assert not network.hub.publishers
