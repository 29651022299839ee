"""Who waits for room and who does not, and how the waiting ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from kvstore.checksum import PageBytes, checksums
from kvstore.client import offering
from kvstore.client.writing import TRIES_MAX
from kvstore.config import StoreClientConfig
from kvstore.messages import (
    PagesReserved,
    PagesTaken,
    ReservePages,
    ReserveStatus,
    TakePages,
    TakeStatus,
    WriteGrant,
)
from kvstore.page import PageSpec
from kvstore.server import room as room_module
from kvstore.server import unwritten as unwritten_module
from kvstore.server.entry import Reservation
from kvstore.server.node import StoreNode
from kvstore.server.promoting import Patience
from kvstore.server.room import Room, Want
from kvstore.ssd import SsdConfig, SsdTier
from kvstore.store import PageState, PutOutcome
from tests.kvstore.contract import put_all
from tests.kvstore.directories import single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.fakes import World
from tests.kvstore.faulty import PATIENT, open_client, raw_channel, until
from tests.kvstore.pages import SPEC, sequence
from tests.kvstore.test_room import LARGE, NUM_SLOTS, Cluster, reserved
from tests.kvstore.tiering_bench import Bench
from transfer.channel import Caller, Channel
from transfer.errors import RemoteFailed
from transfer.interface import deadline_after


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[Cluster]:
    cluster = Cluster(world, client_config=PATIENT.model_copy(update={"room_wait_s": 30.0}))
    yield cluster
    await cluster.close()


async def turns(num: int) -> None:
    """Let the loop run so many times: what needs no timer is done by then."""
    for _ in range(num):
        await asyncio.sleep(0)


# ---- who waits


class Queue:
    """A node whose memory is full while its disk stands still, and one who waits for room."""

    def __init__(self, bench: Bench, first: asyncio.Future[list[Reservation]]) -> None:
        self.bench = bench
        self.first = first

    async def ask(
        self, *numbers: int, spec: PageSpec = SPEC, wait_s: float = 30.0
    ) -> list[ReserveStatus] | None:
        """What is answered at once; None: it waits."""
        pages = [single(number) for number in numbers]
        asking = asyncio.ensure_future(reserved(self.bench, *pages, spec=spec, wait_s=wait_s))
        await turns(3)
        if asking.done():
            return [one.status for one in asking.result()]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return None

    async def end(self) -> None:
        assert not self.first.done()
        self.bench.tier.gate.set()
        assert (await self.first)[0].status is ReserveStatus.GRANTED
        self.bench.d.check()
        await self.bench.tiering.close()


async def queue_of(num_slots: int, num_pages: int, spec: PageSpec = SPEC) -> Queue:
    bench = Bench(num_slots, FakeTier(), high=1.0, low=1.0, spill=0.5)
    bench.tier.gate.clear()
    bench.put_all(range(num_pages))
    wanted = sequence(range(90_000, 90_004), spec=spec)[0]
    first = asyncio.ensure_future(reserved(bench, wanted, spec=spec))
    await until(lambda: bench.d.counters["room_waits"] == 1)
    return Queue(bench, first)


async def test_pages_that_exist_are_answered_though_others_wait_for_room(patience: None) -> None:
    queue = await queue_of(20, 20)
    assert await queue.ask(1, 2) == [ReserveStatus.PRESENT] * 2
    assert await queue.ask(1, 500, wait_s=0.0) == [ReserveStatus.PRESENT, ReserveStatus.LATER]
    assert await queue.ask(500) is None, "what is absent takes its turn"
    await queue.end()


async def test_a_page_that_is_being_written_is_answered_though_others_wait_for_room(
    patience: None,
) -> None:
    bench = Bench(20, FakeTier(), high=1.0, low=1.0, spill=0.5)
    bench.tier.gate.clear()
    bench.put_all(range(19))
    assert (await reserved(bench, single(50)))[0].status is ReserveStatus.GRANTED
    first = asyncio.ensure_future(reserved(bench, single(51)))
    await until(lambda: bench.d.counters["room_waits"] == 1)
    queue = Queue(bench, first)
    assert await queue.ask(50) == [ReserveStatus.WRITING]
    await queue.end()


async def test_pages_that_fit_do_not_wait_for_those_of_another_size(patience: None) -> None:
    queue = await queue_of(1024, 1000, LARGE)
    assert queue.bench.d.segment.num_free_slots(SPEC.page_nbytes) >= 2
    assert await queue.ask(2000, 2001) == [ReserveStatus.GRANTED] * 2
    assert await queue.ask(*range(3000, 3100)) is None, "not all of these fit"
    queue.first.cancel()
    await asyncio.gather(queue.first, return_exceptions=True)
    queue.bench.tier.gate.set()
    await queue.bench.tiering.close()


async def test_a_free_slot_is_for_who_waits_for_one_of_its_size(patience: None) -> None:
    queue = await queue_of(20, 20)
    gone = single(19)  # not among those that are on their way down
    assert queue.bench.d.forget([gone.key]) == 1
    assert queue.bench.d.segment.num_free_slots(SPEC.page_nbytes) == 1
    assert await queue.ask(500) is None
    queue.bench.tiering.room.look()
    assert (await queue.first)[0].status is ReserveStatus.GRANTED
    queue.bench.tier.gate.set()
    await queue.bench.tiering.close()


async def test_an_offer_of_a_page_that_exists_is_answered_though_others_wait_for_room(
    cluster: Cluster, patience: None
) -> None:
    tier = FakeTier()
    node = await cluster.node_on(tier)
    channel = await full_node(cluster, node, tier)
    stores = await cluster.stores()
    async with Waiting(channel, node):
        outcomes = put_all(stores, await open_client(stores), range(4))
        assert await outcomes == [PutOutcome.PRESENT]
        assert node.numbers()["room_waits"] == 1, "nobody but the one before"
        tier.gate.set()


# ---- the node's end


async def full_node(cluster: Cluster, node: StoreNode, tier: FakeTier) -> Channel:
    """Fill the memory while the disk stands still."""
    tier.gate.clear()
    stores = await cluster.stores()
    client = await open_client(stores)
    stored = await put_all(stores, client, range(4 * NUM_SLOTS))
    assert stored == [PutOutcome.STORED] * NUM_SLOTS
    return await raw_channel(cluster, node.address)


class Waiting:
    """One who waits for room while the body runs; its answer afterwards."""

    def __init__(self, channel: Channel, node: StoreNode) -> None:
        request = ReservePages(spec=SPEC, pages=(single(9000),), wait_s=30.0)
        deadline_s = deadline_after(60)
        self._node = node
        self.answer = asyncio.ensure_future(
            channel.request(request, PagesReserved, deadline_s=deadline_s)
        )

    async def __aenter__(self) -> asyncio.Future[PagesReserved]:
        await until(lambda: self._node.numbers().get("room_waits") == 1)
        return self.answer

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(self.answer, return_exceptions=True)


async def test_who_waits_for_room_is_refused_when_the_node_begins_to_drain(
    cluster: Cluster, patience: None
) -> None:
    tier = FakeTier()
    node = await cluster.node_on(tier)
    channel = await full_node(cluster, node, tier)
    async with Waiting(channel, node) as answer:
        draining = asyncio.ensure_future(node.drain(60.0))
        await turns(100)  # long before a tick
        assert answer.done()
        tier.gate.set()
        with pytest.raises(RemoteFailed, match="draining"):
            answer.result()
    await draining
    assert node.numbers()["num_writing"] == 0


async def test_who_waits_for_room_is_refused_when_the_node_closes(
    cluster: Cluster, patience: None
) -> None:
    tier = FakeTier()
    node = await cluster.node_on(tier)
    channel = await full_node(cluster, node, tier)
    async with Waiting(channel, node) as answer:
        node.abort()
        await turns(100)  # long before a tick
        assert answer.done()
        with pytest.raises(RemoteFailed, match="closed"):
            answer.result()
    assert node.numbers()["num_writing"] == 0


async def test_what_is_committed_during_a_drain_is_written_to_the_ssd_too(
    cluster: Cluster, world: World
) -> None:
    tier = FakeTier()
    node = await cluster.node_on(tier, tick_s=0.01)
    cluster.always_write()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    tier.gate.clear()
    world.bulk_gate = asyncio.Event()
    putting = asyncio.ensure_future(put_all(stores, client, range(100, 104)))
    await until(lambda: node.numbers()["num_writing"] == 1)
    draining = asyncio.ensure_future(node.drain(60.0))
    await until(lambda: tier.num_stores == 1)
    world.bulk_gate.set()
    assert await putting == [PutOutcome.STORED]
    tier.gate.set()
    await draining
    pages = (*sequence(range(4)), *sequence(range(100, 104)))
    assert tier.pages.keys() == {page.key for page in pages}


async def test_to_look_for_what_a_drain_must_copy_lets_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unwritten_module, "ROWS_PER_STEP", 2)
    bench = Bench(40, FakeTier(), spill=1.0)
    pages = bench.put_all(range(40))
    bench.now_s += 100.0
    hot = pages[7:30:3]
    bench.d.match(b"".join(page.key for page in hot), bench.now_s)
    num_turns = 0
    copying = asyncio.ensure_future(bench.tiering.copy_all())
    while not bench.tier.num_stores:
        num_turns += 1
        await asyncio.sleep(0)
    assert num_turns > 40 / 2
    await copying
    order = list(bench.tier.pages)
    assert set(order[: len(hot)]) == {page.key for page in hot}, "the hottest of all steps first"
    assert bench.d.spilling.num_unwritten == 0
    assert order == list(dict.fromkeys(order))
    await bench.tiering.close()


# ---- the client's side


def test_a_put_must_be_given_time_for_room() -> None:
    with pytest.raises(ValidationError, match="room_wait_s"):
        StoreClientConfig(room_wait_s=0.0)


@pytest.mark.parametrize("offers", [True, False])
async def test_a_node_that_never_makes_room_is_left_after_so_many_tries(
    cluster: Cluster, world: World, offers: bool
) -> None:
    node = await cluster.node()
    if not offers:
        cluster.always_write()
    num_asked = 0

    async def never(message: msgspec.Struct, caller: Caller) -> msgspec.Struct:
        nonlocal num_asked
        num_asked += 1
        stop = num_asked > 50  # else a client that goes on for ever would not end the test
        assert isinstance(message, TakePages | ReservePages)
        count = len(message.pages)
        if offers:
            return PagesTaken((TakeStatus.REFUSED if stop else TakeStatus.LATER,) * count)
        status = ReserveStatus.REFUSED if stop else ReserveStatus.LATER
        grants = (WriteGrant(status),) * count
        return PagesReserved(incarnation="x", lease_s=1.0, grants=grants)

    requests = world.listeners[node.address].service.requests
    requests[TakePages if offers else ReservePages] = never
    stores = await cluster.stores()
    assert await put_all(stores, await open_client(stores), range(8)) == [PutOutcome.FAILED] * 2
    assert num_asked == 1 + TRIES_MAX


async def test_pages_that_are_offered_again_are_not_hashed_again(
    cluster: Cluster, tmp_path: Path, patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_hashed = 0

    async def counted(pages: Sequence[PageBytes]) -> list[bytes]:
        nonlocal num_hashed
        num_hashed += len(pages)
        return list(await checksums(pages))

    monkeypatch.setattr(offering, "checksums", counted)
    await cluster.node_on(await SsdTier.open(SsdConfig(path=tmp_path / "t", nbytes=4 << 20)))
    stores = await cluster.stores()
    client = await open_client(stores)
    num_pages = 5 * NUM_SLOTS
    stored = await put_all(stores, client, range(4 * num_pages))
    assert stored == [PutOutcome.STORED] * num_pages
    assert num_hashed == num_pages


async def test_a_reader_of_a_page_that_came_back_meanwhile_does_not_wait_for_room(
    patience: None,
) -> None:
    queue = await queue_of(20, 20)
    assert queue.bench.d.state(single(3).key) is PageState.READY
    await queue.bench.tiering._promoting._promote(single(3).key, Patience())
    assert queue.bench.tier.num_loads == 0
    assert queue.bench.d.counters["room_waits"] == 1, "nobody but the one before"
    await queue.end()


async def test_a_disk_that_hangs_is_noticed_by_several_short_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "STILL_S", 0.05)
    tries: list[bool] = []

    def attempt(patient: bool) -> bool:
        tries.append(patient)
        return not patient

    room = Room(lambda: None, lambda: False, Counter())
    want = Want(attempt, SPEC.page_nbytes, lambda: False)
    num_waits = 0
    while not room.now(want):
        await room.wait(want, 0.02)
        num_waits += 1
        assert num_waits <= 10, "each wait is forgotten when it ends"
    assert num_waits > 1
    room.copied()
    assert not room.now(want), "the disk works: it is worth waiting again"
