"""How copying ends: a drain that copies all, a stop at once, tasks that never began."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.messages import (
    CommitPages,
    CommitStatus,
    PageCommit,
    PagesCommitted,
    PagesReserved,
    ReservePages,
)
from kvstore.server.room import Room
from kvstore.server.tiering import SPILLS_MAX
from kvstore.store import PageIdentity, PageState
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.directories import single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.fakes import World
from tests.kvstore.faulty import open_client, raw_channel, until
from tests.kvstore.pages import SPEC
from tests.kvstore.test_room import Cluster
from tests.kvstore.tiering_bench import Bench
from transfer.interface import deadline_after

NUM_PAGES = 200


def backlog() -> tuple[Bench, list[PageIdentity]]:
    """Half of the memory lies above the watermark; the disk has begun, and stands still."""
    bench = Bench(NUM_PAGES, FakeTier(), high=1.0, low=1.0, spill=0.5)
    bench.tier.gate.clear()
    pages = bench.put_all(range(NUM_PAGES))
    hot = pages[:20]
    for _ in range(5):
        bench.now_s += 1.0
        bench.d.match(b"".join(page.key for page in hot), bench.now_s)
    bench.tiering.kick()
    return bench, hot


def num_held(bench: Bench) -> int:
    table = bench.d.spilling._table
    return sum(table.num_holds[row] for row in table.used_rows())


async def test_a_drain_writes_the_hottest_first_though_a_backlog_waits() -> None:
    bench, hot = backlog()
    copying = asyncio.ensure_future(bench.tiering.copy_all())
    await asyncio.sleep(0)
    bench.tiering.tick()
    bench.tier.gate.set()
    await copying
    order = list(bench.tier.pages)
    assert len(order) == NUM_PAGES
    assert set(order[SPILLS_MAX : SPILLS_MAX + len(hot)]) == {page.key for page in hot}
    bench.d.check()
    await bench.tiering.close()


async def test_after_a_drain_that_was_given_up_pages_are_copied_as_before() -> None:
    bench, _ = backlog()
    copying = asyncio.ensure_future(bench.tiering.copy_all())
    await asyncio.sleep(0)
    copying.cancel()
    await asyncio.gather(copying, return_exceptions=True)
    bench.tier.gate.set()
    await bench.spill()
    assert bench.tier.num_pages == NUM_PAGES // 2
    await bench.tiering.close()


async def test_a_reader_during_a_drain_is_given_the_room_of_copied_pages(patience: None) -> None:
    bench = Bench(20, FakeTier(), high=1.0, low=1.0, spill=1.0)
    gone = single(500)
    bench.put(gone)
    await bench.tiering.copy_all()
    bench.put_all(range(20))
    assert bench.d.state(gone.key) is PageState.SPILLED
    bench.tier.gate.clear()
    copying = asyncio.ensure_future(bench.tiering.copy_all())
    reading = asyncio.ensure_future(bench.promote(gone))
    await until(lambda: bench.d.counters["room_waits"] == 1)
    bench.tier.gate.set()
    await asyncio.gather(copying, reading)
    assert bench.d.state(gone.key) is PageState.READY
    assert bench.d.counters["evicted_unspilled"] == 0
    bench.d.check()
    await bench.tiering.close()


async def test_a_drain_ends_when_all_is_aborted() -> None:
    bench, _ = backlog()
    copying = asyncio.ensure_future(bench.tiering.copy_all())
    await until(lambda: bench.tier.num_stores == SPILLS_MAX)
    bench.tiering.abort()
    async with asyncio.timeout(5):
        await copying
    assert bench.tier.num_stores == SPILLS_MAX
    assert bench.tiering.numbers()["num_spilling"] == num_held(bench) == 0
    bench.d.check()
    await bench.tiering.close()


async def test_a_drain_ends_when_it_is_aborted_before_its_first_copies_began() -> None:
    bench = Bench(40, FakeTier(), high=1.0, low=1.0, spill=0.0)
    bench.put_all(range(40))
    copying = asyncio.ensure_future(bench.tiering.copy_all())
    while num_held(bench) < SPILLS_MAX:  # noqa: ASYNC110 - just before they begin
        await asyncio.sleep(0)
    bench.tiering.abort()
    async with asyncio.timeout(5):
        await copying
    assert bench.tier.num_stores == num_held(bench) == 0
    bench.d.check()
    await bench.tiering.close()


async def test_copies_that_are_aborted_before_they_began_are_ended() -> None:
    bench, _ = backlog()
    assert num_held(bench) == SPILLS_MAX
    bench.tiering.abort()
    await bench.tiering.idle()
    assert bench.tier.num_stores == 0
    assert bench.tiering.numbers()["num_spilling"] == num_held(bench) == 0
    bench.d.check()
    await bench.tiering.close()


async def test_promotions_that_are_aborted_before_they_began_are_ended() -> None:
    bench = Bench(20, FakeTier())
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    reading = asyncio.ensure_future(bench.promote(*pages[:9]))
    await asyncio.sleep(0)
    assert bench.tiering.numbers()["num_promoting"] == 9
    bench.tiering.abort()
    await reading
    assert bench.tiering.numbers()["num_promoting"] == bench.tier.num_loads == 0
    bench.d.check()
    await bench.tiering.close()


async def test_a_commit_that_makes_nothing_ready_is_no_news_for_who_waits_for_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_told = 0

    def told(self: Room) -> None:
        nonlocal num_told
        num_told += 1

    monkeypatch.setattr(Room, "committed", told)
    cluster = Cluster(world)
    node = await cluster.node_on(FakeTier())
    channel = await raw_channel(cluster, node.address)
    reserved = await channel.request(
        ReservePages(spec=SPEC, pages=(single(1),), wait_s=0.0),
        PagesReserved,
        deadline_s=deadline_after(5),
    )
    wrong = PageCommit(single(1).key, reserved.grants[0].generation, b"w" * 16)
    committed = await channel.request(
        CommitPages(incarnation=reserved.incarnation, pages=(wrong,)),
        PagesCommitted,
        deadline_s=deadline_after(5),
    )
    assert committed.statuses == (CommitStatus.TORN,)
    assert num_told == 0
    stores = await StoreCluster.stores(cluster)
    await put_all(stores, await open_client(stores), range(4))
    assert num_told == 1
    await cluster.close()
