"""Puts wait for the SSD to make room, for a bounded time: what it has room for is not lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.config import StoreConfig
from kvstore.messages import ReservePages, ReserveStatus
from kvstore.page import PageSpec
from kvstore.server import room as room_module
from kvstore.server.entry import Reservation
from kvstore.server.node import StoreNode
from kvstore.server.reserving import Reserving
from kvstore.server.room import Room, Want
from kvstore.server.tier import Tier
from kvstore.server.tiering import SPILLS_MAX, TRIAL_S
from kvstore.ssd import SsdConfig, SsdTier
from kvstore.store import GetOutcome, PageIdentity, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import Stores, put_all
from tests.kvstore.directories import single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.fakes import FakeMembership, World
from tests.kvstore.faulty import PATIENT, get_all, open_client, until
from tests.kvstore.pages import SPEC, sequence
from tests.kvstore.tiering_bench import Bench
from transfer.channel import Caller
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

NUM_SLOTS = 16
LARGE = PageSpec(num_layers=4, num_kv_heads=4, head_dim=32, page_size=4, dtype="uint8")


class Cluster(StoreCluster):
    async def node_on(self, tier: Tier, *, tick_s: float = 10.0) -> StoreNode:
        """A node of 16 pages of memory; its timer alone makes no room in time."""
        node = StoreNode(
            StoreConfig(
                segment_nbytes=NUM_SLOTS * SPEC.page_nbytes, lease_s=60.0, tick_s=tick_s, replicas=1
            ),
            identity=new_identity(Role.STORE, "store-ssd"),
            network=self.network(),
            transfer=await self.transfer(),
            membership=FakeMembership(self.world),
            tier=tier,
        )
        await node.start()
        self.nodes.append(node)
        return node


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[Cluster]:
    cluster = Cluster(world, client_config=PATIENT.model_copy(update={"room_wait_s": 30.0}))
    yield cluster
    await cluster.close()


async def present(stores: Stores, pages: list[PageIdentity]) -> list[bool]:
    client = await open_client(stores)
    states = await client.match([page.key for page in pages], deadline_s=deadline_after(20))
    return [state.present for state in states]


async def reserved(
    bench: Bench, *pages: PageIdentity, spec: PageSpec = SPEC, wait_s: float = 30.0
) -> list[Reservation]:
    caller = Caller(new_identity(Role.DECODE), deadline_after(60))
    message = ReservePages(spec=spec, pages=pages, wait_s=wait_s)
    asking = Reserving(bench.d, message, caller, bench.tiering.room, lambda: None)
    answer = asking.at_once()
    return await asking.later() if answer is None else answer


# ---- bursts


@pytest.mark.parametrize("offers", [True, False])
async def test_a_burst_beyond_memory_loses_nothing_that_the_ssd_has_room_for(
    cluster: Cluster, tmp_path: Path, patience: None, offers: bool
) -> None:
    node = await cluster.node_on(await SsdTier.open(SsdConfig(path=tmp_path / "t", nbytes=4 << 20)))
    if not offers:
        cluster.always_write()
    stores = await cluster.stores()
    client = await open_client(stores)
    prompts = [range(start, start + 16) for start in range(0, 32_000, 1000)]  # 128 pages, at once
    outcomes = await asyncio.gather(*(put_all(stores, client, tokens) for tokens in prompts))
    assert outcomes == [[PutOutcome.STORED] * 4] * len(prompts)
    pages = [page for tokens in prompts for page in sequence(tokens)]
    assert await present(stores, pages) == [True] * len(pages)
    for tokens in prompts:
        assert await get_all(stores, client, tokens) == [GetOutcome.READ] * 4
    numbers = node.numbers()
    assert numbers["room_waits"] > 0
    assert numbers.get("evicted_unspilled", 0) == numbers.get("refused", 0) == 0


@pytest.mark.parametrize("offers", [True, False])
async def test_one_chain_longer_than_memory_is_stored_whole(
    cluster: Cluster, tmp_path: Path, patience: None, offers: bool
) -> None:
    node = await cluster.node_on(await SsdTier.open(SsdConfig(path=tmp_path / "t", nbytes=4 << 20)))
    if not offers:
        cluster.always_write()
    stores = await cluster.stores()
    client = await open_client(stores)
    tokens = range(4 * 5 * NUM_SLOTS)
    assert await put_all(stores, client, tokens) == [PutOutcome.STORED] * 5 * NUM_SLOTS
    assert await present(stores, sequence(tokens)) == [True] * 5 * NUM_SLOTS
    assert node.numbers().get("evicted_unspilled", 0) == 0


# ---- waiting


async def test_a_put_waits_for_a_copy_and_then_takes_its_place(patience: None) -> None:
    bench = Bench(20, FakeTier(), spill=0.5)
    bench.tier.gate.clear()
    pages = bench.put_all(range(20))
    waiting = [asyncio.ensure_future(reserved(bench, single(i))) for i in range(100, 103)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.tier.num_stores == SPILLS_MAX, "who waits has copies made"
    assert not any(one.done() for one in waiting)
    assert all(bench.d.state(page.key) is PageState.READY for page in pages)
    bench.tier.gate.set()
    outcomes = [(await one)[0].status for one in waiting]
    assert outcomes == [ReserveStatus.GRANTED] * 3
    assert all(bench.d.state(page.key).present for page in pages)
    assert bench.d.counters["room_waits"] == 3
    await bench.tiering.close()


async def test_what_is_granted_is_answered_at_once_and_the_rest_is_for_later() -> None:
    bench = Bench(20, FakeTier(), high=1.0, low=1.0, spill=0.5)
    bench.tier.gate.clear()
    bench.tiering.kick()
    bench.put_all(range(18))
    statuses = [one.status for one in await reserved(bench, *map(single, range(100, 105)))]
    assert statuses == [ReserveStatus.GRANTED] * 2 + [ReserveStatus.LATER] * 3
    assert bench.d.counters["refused"] == bench.d.counters["room_waits"] == 0
    bench.tier.gate.set()
    await bench.tiering.close()


async def test_a_disk_that_stands_still_costs_one_wait_and_the_loss_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "STILL_S", 0.01)
    bench = Bench(20, FakeTier(), high=1.0, low=1.0, spill=0.5)
    bench.tier.gate.clear()
    bench.put_all(range(20))
    for number in range(100, 105):
        assert (await reserved(bench, single(number)))[0].status is ReserveStatus.GRANTED
        bench.tiering.room.committed()
    counters = bench.d.counters
    assert (counters["room_waits"], counters["room_waits_over"]) == (1, 1)
    assert counters["evicted"] == counters["evicted_unspilled"] == 5
    bench.tier.gate.set()
    await bench.tiering.idle()
    bench.tier.gate.clear()
    bench.put_all(range(200, 208))
    await reserved(bench, *map(single, range(300, 340)))
    want = Want(lambda patient: patient, SPEC.page_nbytes, lambda: False)
    assert bench.tiering.room.now(want), "it works again: others are patient"
    bench.tier.gate.set()
    await bench.tiering.close()


async def test_nobody_waits_for_a_disk_that_takes_no_pages() -> None:
    bench = Bench(20, FakeTier(), high=1.0, low=1.0, spill=0.5)
    bench.tier.broken = "the disk is full"
    bench.tiering.kick()
    bench.put_all(range(20))
    assert (await reserved(bench, single(100)))[0].status is ReserveStatus.GRANTED
    assert bench.d.counters["room_waits"] == 0
    assert bench.d.counters["evicted_unspilled"] == 1, "and the loss is told"
    await bench.tiering.close()


async def test_a_page_colder_than_all_of_a_full_ssd_goes_without_a_wait() -> None:
    bench = Bench(20, FakeTier(num_pages_max=4), high=1.0, low=1.0, spill=0.5)
    bench.put_all(range(20))
    await bench.spill()
    bench.tier.pages = {
        key: (page._replace(heat=1e6), data) for key, (page, data) in bench.tier.pages.items()
    }
    await bench.spill()
    for number in range(100, 110):
        bench.now_s += 0.01
        assert (await reserved(bench, single(number)))[0].status is ReserveStatus.GRANTED
    assert bench.d.counters["evicted_unspilled"] > 0
    assert bench.d.counters["room_waits_over"] == 0
    await bench.tiering.close()


async def test_a_disk_that_failed_is_tried_again_and_takes_pages_when_it_works() -> None:
    bench = Bench(20, FakeTier(), spill=0.5)
    bench.tier.broken = "an error"
    pages = bench.put_all(range(19))
    await bench.spill()
    assert bench.tier.num_stores == 0
    bench.now_s += TRIAL_S
    await bench.spill()
    assert bench.tier.num_stores == 1, "one page, now and then"
    await bench.spill()
    assert bench.tier.num_stores == 1
    assert bench.d.gauges()["num_in_line"] == 0, "what could not be copied is not next to go"
    bench.now_s += TRIAL_S
    store = bench.tier.store

    async def trial(*args: object) -> bool:
        bench.tier.broken = None
        return await store(*args)  # type: ignore[arg-type]

    bench.tier.store = trial  # type: ignore[method-assign, assignment]
    await bench.spill()
    assert bench.tier.num_pages == 9
    assert all(bench.d.state(page.key).present for page in pages)
    bench.d.check()
    await bench.tiering.close()


async def test_pages_of_another_size_wait_until_a_slab_for_them_has_been_copied(
    patience: None,
) -> None:
    bench = Bench(1024, FakeTier(), high=1.0, low=1.0, spill=1.0)
    pages = bench.put_all(range(1000))
    assert not bench.d.segment.can_allocate(LARGE.page_nbytes)
    large = sequence(range(90_000, 90_004), spec=LARGE)[0]
    assert (await reserved(bench, large, spec=LARGE))[0].status is ReserveStatus.GRANTED
    assert all(bench.d.state(page.key).present for page in pages)
    assert bench.d.counters["evicted_slab"] > 0
    assert bench.d.counters["evicted_unspilled"] == 0
    bench.d.check()
    await bench.tiering.close()


async def test_who_came_first_is_served_first() -> None:
    kicked: list[int] = []
    free, served = 0, []

    async def wait(number: int) -> None:
        def attempt(patient: bool) -> bool:
            nonlocal free
            done, free = free > 0, max(0, free - 1)
            if done:
                served.append(number)
            return done

        want = Want(attempt, SPEC.page_nbytes, lambda: False)
        if not room.now(want):
            await room.wait(want, 60.0)

    room = Room(lambda: kicked.append(1), lambda: False, Counter())
    waiting = [asyncio.ensure_future(wait(number)) for number in range(5)]
    while len(served) < len(waiting):
        for _ in range(3):
            await asyncio.sleep(0)
        free = 1
        room.copied()
    assert served == [0, 1, 2, 3, 4]
    assert len(kicked) >= 5
    await asyncio.gather(*waiting)


async def test_a_reader_of_a_spilled_page_waits_for_room_too(patience: None) -> None:
    bench = Bench(4, FakeTier(), high=1.0, low=1.0, spill=0.0)
    pages = bench.put_all(range(4))
    await bench.spill()
    (slot,) = await reserved(bench, single(50))
    assert slot.slot is not None
    gone = next(page for page in pages if bench.d.state(page.key) is PageState.SPILLED)
    assert bench.d.commit(single(50).key, slot.slot.generation, b"c" * 16)
    for page in pages:  # used again: nobody stands in line
        bench.now_s += 0.01
        bench.d.match(page.key, bench.now_s)
    await bench.promote(gone)
    assert bench.d.state(gone.key) is PageState.READY
    assert bench.d.state(single(50).key).present
    assert bench.d.counters["evicted_unspilled"] == 0
    await bench.tiering.close()


# ---- the end


async def test_a_drain_writes_to_the_ssd_what_is_in_memory_only(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = SsdConfig(path=tmp_path / "tier", nbytes=4 << 20)
    first = await cluster.node_on(await SsdTier.open(config), tick_s=0.01)
    stores = await cluster.stores()
    client = await open_client(stores)
    tokens = range(32)
    await put_all(stores, client, tokens)
    assert first.numbers()["num_on_ssd"] == 0
    await first.drain(30.0)
    await first.close()
    second = await cluster.node_on(await SsdTier.open(config), tick_s=0.01)
    await until(lambda: second.numbers()["num_to_adopt"] == 0)
    stores = await cluster.stores()
    assert await get_all(stores, await open_client(stores), tokens) == [GetOutcome.READ] * 8


async def test_the_hottest_pages_are_written_first() -> None:
    bench = Bench(20, FakeTier(), spill=1.0)
    chain = sequence(range(16))
    for page in chain:
        bench.put(page)
    warm = bench.put_all(range(100, 103))
    bench.now_s += 100.0
    bench.d.match(warm[2].key, bench.now_s)
    bench.d.match(b"".join(page.key for page in chain), bench.now_s + 1.0)
    bench.d.acquire([chain[0].key], bench.now_s + 2.0)  # a leased page is written, too
    await bench.tiering.copy_all()
    assert bench.d.spilling.num_unwritten == 0
    order = list(bench.tier.pages)
    assert set(order[:4]) == {page.key for page in chain}
    assert order[4] == warm[2].key
    assert set(order[5:]) == {page.key for page in warm[:2]}
    bench.d.check()
    await bench.tiering.close()


async def test_a_drain_does_not_wait_for_a_disk_that_stands_still(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FakeTier()
    node = await cluster.node_on(tier)
    stores = await cluster.stores()
    await put_all(stores, await open_client(stores), range(32))
    tier.gate.clear()
    await node.drain(0.05)
    assert "8 pages were not written to the SSD" in caplog.text
    await node.close()
    assert tier.closed
