"""Named scenarios of the page store: each a fault at the worst moment, and what must come of it.

Every script runs under all checkers of ``tests/sim/checkers.py`` and ends with healing, quiescence
and liveness, as random seeds do.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.messages import (
    CommitPages,
    CommitStatus,
    PagesCommitted,
    RenewLeases,
)
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.sim.faults import FaultPlan
from tests.sim.scripts import (
    ONE_BY_ONE,
    PAIRS,
    Held,
    begin,
    belongs_on,
    done,
    holders,
    node_of,
    pages_on,
    play,
    some_pages,
    total,
)
from tests.sim.store_world import (
    CLIENT_CONFIG,
    CLIENTS,
    CONFIG,
    GRACE_S,
    LEASE_S,
    STORES,
    StoreWorld,
)
from transfer.interface import deadline_after

WRITER, READER, RIVAL = CLIENTS
SLOW_BYTES_PER_S = 500.0
ALL_STORED, ALL_READ = {PutOutcome.STORED}, {GetOutcome.READ}


def test_without_faults_every_put_is_stored_and_every_get_reads() -> None:
    async def script(world: StoreWorld) -> None:
        for number in range(6):
            name, other = CLIENTS[number % 3], CLIENTS[(number + 1) % 3]
            pages = some_pages(5, 1000 * number)
            assert {*await done(world, name, world.put(name, pages))} == ALL_STORED
            assert {*await done(world, other, world.get(other, pages))} == ALL_READ

    play(script)


@pytest.mark.parametrize("silently", [0.0, 1.0])
def test_a_writer_that_dies_after_reserve_frees_its_reservation(silently: float) -> None:
    async def script(world: StoreWorld) -> None:
        held = Held(world)
        pages = some_pages(6)
        begin(world, WRITER, world.put(WRITER, pages))
        await world.cluster.until(lambda: total(world, "num_writing") == 6, timeout_s=1)
        waiting = begin(world, READER, world.get(READER, pages, wait=True, timeout_s=8))
        await asyncio.sleep(0.1)
        world.crash(WRITER)
        held.let_go = True
        died_s = world.cluster.now_s
        rival = await done(world, RIVAL, world.put(RIVAL, pages, timeout_s=8))
        assert {*rival} == ALL_STORED
        assert world.cluster.now_s - died_s < LEASE_S + GRACE_S + 1.0
        assert {*await waiting} == ALL_READ

    play(script, plan=FaultPlan(silent_crash=silently))


def test_a_writer_that_dies_while_its_offer_is_read_frees_the_slot() -> None:
    async def script(world: StoreWorld) -> None:
        pages = pages_on(world, STORES[0], 3)
        world.cluster.slow_down(WRITER, 2000.0)
        begin(world, WRITER, world.put(WRITER, pages))
        await world.cluster.until(lambda: total(world, "num_writing") > 0, timeout_s=1)
        world.crash(WRITER)
        rival = await done(world, RIVAL, world.put(RIVAL, pages, timeout_s=8))
        assert {*rival} == ALL_STORED
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ
        assert total(world, "taken") == len(pages)

    play(script, client_config=CLIENT_CONFIG)


def test_a_writer_that_dies_between_write_and_commit_leaves_nothing_visible() -> None:
    async def script(world: StoreWorld) -> None:
        async def die(store: str, message: Any) -> None:
            world.crash(WRITER)
            await asyncio.Event().wait()

        world.hooks[CommitPages] = die
        pages = pages_on(world, STORES[0], 3)
        begin(world, WRITER, world.put(WRITER, pages))
        await world.cluster.until(lambda: not world.is_up(WRITER), timeout_s=1)
        world.hooks.clear()
        assert {*await done(world, READER, world.match(READER, pages))} <= {
            PageState.ABSENT,
            PageState.WRITING,
        }
        read = await done(world, READER, world.get(READER, pages))
        assert {*read} == {GetOutcome.ABSENT}
        rival = await done(world, RIVAL, world.put(RIVAL, pages, timeout_s=8))
        assert {*rival} == ALL_STORED

    play(script)


def test_a_store_that_dies_between_two_pages_of_a_chain_leaves_a_usable_rest() -> None:
    async def script(world: StoreWorld) -> None:
        commits: list[str] = []

        async def note(store: str, message: Any) -> None:
            commits.append(store)

        world.hooks[CommitPages] = note
        pages = some_pages(9)
        putting = begin(world, WRITER, world.put(WRITER, pages, timeout_s=8))
        await world.cluster.until(lambda: bool(commits), timeout_s=1)
        dead = commits[0]
        world.crash(dead)
        stored = await putting
        assert {*stored} <= {PutOutcome.STORED, PutOutcome.PRESENT}  # the rest went elsewhere
        read = await done(world, READER, world.get(READER, pages))
        assert {*read} <= {GetOutcome.READ, GetOutcome.ABSENT, GetOutcome.FAILED}
        assert {*await done(world, RIVAL, world.put(RIVAL, pages))} <= {
            PutOutcome.STORED,
            PutOutcome.PRESENT,
        }
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ
        assert all(dead not in holders(world, page) for page in pages)

    play(script, client_config=ONE_BY_ONE)


def test_a_lease_that_expires_mid_read_ends_the_read_and_frees_the_memory() -> None:
    async def script(world: StoreWorld) -> None:
        renewals: list[str] = []

        async def lose(store: str, message: Any) -> None:
            renewals.append(store)
            await asyncio.Event().wait()

        pages = pages_on(world, STORES[0], 3)
        assert {*await done(world, WRITER, world.put(WRITER, pages))} == ALL_STORED
        world.hooks[RenewLeases] = lose
        world.cluster.slow_down(READER, SLOW_BYTES_PER_S)
        reading = begin(world, READER, world.get(READER, pages, timeout_s=10))
        await asyncio.sleep(LEASE_S / 2)
        others = pages_on(world, STORES[0], 20)[3:]
        stored = await done(world, WRITER, world.put(WRITER, others, timeout_s=8))
        assert PutOutcome.FAILED not in stored
        assert GetOutcome.READ not in await reading
        assert renewals
        await world.cluster.until(lambda: not total(world, "num_leases"), timeout_s=5)

    play(script, CONFIG)


def test_a_duplicate_commit_changes_nothing() -> None:
    async def script(world: StoreWorld) -> None:
        commits: list[CommitPages] = []

        async def note(store: str, message: CommitPages) -> None:
            commits.append(message)

        world.hooks[CommitPages] = note
        pages = pages_on(world, STORES[1], 3)
        assert {*await done(world, WRITER, world.put(WRITER, pages))} == ALL_STORED
        world.hooks.clear()
        link = next(k for k in world.clients[WRITER].links.all() if k.node_id == STORES[1])

        async def again() -> PagesCommitted:
            return await link.call(commits[0], PagesCommitted, deadline_s=deadline_after(2))

        assert {*(await done(world, WRITER, again())).statuses} == {CommitStatus.STALE}
        assert total(world, "stale_commits") == len(commits[0].pages)
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ

    play(script, plan=FaultPlan(duplicate=1.0))


def test_two_writers_of_one_prefix_store_each_page_once() -> None:
    async def script(world: StoreWorld) -> None:
        pages = some_pages(8)
        for name in (WRITER, RIVAL):
            world.cluster.slow_down(name, 4000.0)
        both = await asyncio.gather(
            begin(world, WRITER, world.put(WRITER, pages, timeout_s=10)),
            begin(world, RIVAL, world.put(RIVAL, pages, timeout_s=10)),
        )
        for outcomes in zip(*both, strict=True):
            assert sorted(outcomes) == [PutOutcome.PRESENT, PutOutcome.STORED]
        assert total(world, "committed") == total(world, "num_pages") == len(pages)
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ

    play(script)


def test_eviction_that_races_a_read_takes_other_pages() -> None:
    async def script(world: StoreWorld) -> None:
        pages = pages_on(world, STORES[0], 40)
        wanted, others = pages[:4], pages[4:]
        assert {*await done(world, WRITER, world.put(WRITER, wanted))} == ALL_STORED
        world.cluster.slow_down(READER, SLOW_BYTES_PER_S)
        reading = begin(world, READER, world.get(READER, wanted, timeout_s=30))
        await world.cluster.until(lambda: total(world, "num_leases") > 0, timeout_s=1)
        evicted = 0.0
        while not reading.done():
            await done(world, RIVAL, world.put(RIVAL, others[:5]))
            others = [*others[5:], *others[:5]]
            evicted = max(evicted, total(world, "evicted"))
            await asyncio.sleep(0.2)
        assert {*await reading} == ALL_READ
        assert evicted > 12, "the store was full over and over"

    play(script, CONFIG)


def test_clients_whose_views_disagree_still_meet() -> None:
    async def script(world: StoreWorld) -> None:
        world.cluster.block("registry", WRITER)
        world.crash(STORES[2])
        seen = world.clients[READER].links
        await world.cluster.until(lambda: len(seen.all()) == 2, timeout_s=10)
        assert len(world.clients[WRITER].links.all()) == 3, "its view is of before"
        pages = some_pages(9)
        assert {*await done(world, WRITER, world.put(WRITER, pages, timeout_s=8))} == ALL_STORED
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ
        await world.restart(STORES[2])
        await world.cluster.until(lambda: len(seen.all()) == 3, timeout_s=10)
        more = some_pages(9, 500)
        assert {*await done(world, RIVAL, world.put(RIVAL, more))} == ALL_STORED
        read = await done(world, WRITER, world.get(WRITER, more, timeout_s=8))
        assert {*read} <= {GetOutcome.READ, GetOutcome.ABSENT, GetOutcome.FAILED}
        world.cluster.fabric.unblock_all()
        links = world.clients[WRITER].links
        lives = {k.info.identity.incarnation for k in seen.all()}
        await world.cluster.until(
            lambda: {k.info.identity.incarnation for k in links.all()} == lives, timeout_s=10
        )
        assert {*await done(world, WRITER, world.get(WRITER, more))} == ALL_READ

    play(script)


def test_a_read_of_a_hot_page_ends_when_the_last_store_goes_meanwhile() -> None:
    """Seed 142: the client's view was empty, and the page's turn was at nobody."""

    async def script(world: StoreWorld) -> None:
        pages = some_pages(2)
        assert {*await done(world, WRITER, world.put(WRITER, pages))} == ALL_STORED
        hot, links = world.clients[READER].links.hot, world.clients[READER].links
        for page in pages:
            hot.note(page.key, len(STORES), world.cluster.now_s)
        reading = begin(world, READER, world.get(READER, pages, timeout_s=8))
        for store in STORES:
            world.crash(store)
        assert {*await reading} == {GetOutcome.FAILED}
        assert not links.all(), "it saw them go"

    play(script, PAIRS, plan=FaultPlan(silent_crash=1.0))


def test_a_corrupt_page_on_one_replica_is_read_from_the_other_and_replaced() -> None:
    async def script(world: StoreWorld) -> None:
        page = some_pages(1)[0]
        assert await done(world, WRITER, world.put(WRITER, [page])) == [PutOutcome.STORED]
        assert len(holders(world, page)) == 2
        first = node_of(world, page)
        view = world.nodes[first].region.view
        table = world.nodes[first]._directory._table
        offset = table.offset[table.find(page.key)]
        view[offset + 100] ^= 4
        assert {*await done(world, READER, world.get(READER, [page]))} == ALL_READ
        await world.cluster.until(lambda: total(world, "corrupt_dropped") == 1, timeout_s=2)
        await world.cluster.until(lambda: len(holders(world, page)) == 2, timeout_s=5)
        world.crash(next(name for name in holders(world, page) if name != first))
        assert {*await done(world, RIVAL, world.get(RIVAL, [page]))} == ALL_READ

    play(script, PAIRS)


def test_a_partition_during_replication_is_made_good_after_it() -> None:
    async def script(world: StoreWorld) -> None:
        pages = some_pages(9)
        others = list(STORES[1:])
        world.cluster.partition([STORES[0]], others)
        stored = await done(world, WRITER, world.put(WRITER, pages, timeout_s=8))
        assert {*stored} == ALL_STORED
        single = [page for page in pages if len(holders(world, page)) == 1]
        assert single, "some copies had to cross the partition"
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ
        world.cluster.fabric.unblock_all()
        await world.cluster.until(
            lambda: all(belongs_on(world, p) <= {*holders(world, p)} for p in pages), timeout_s=30
        )

    play(script, PAIRS)


def test_a_node_that_returns_with_old_data_serves_what_is_still_right() -> None:
    async def script(world: StoreWorld) -> None:
        store = STORES[0]
        pages = pages_on(world, store, 24)
        for start in range(0, len(pages), 4):
            await done(world, WRITER, world.put(WRITER, pages[start : start + 4]))
            await asyncio.sleep(0.5)
        await world.cluster.until(lambda: len(world.disks[store].slots) >= 6, timeout_s=5)
        world.disks[store].sync()
        kept = [page for page in pages if page.key in world.disks[store].slots]
        world.disks[store].rot()
        old = world.nodes[store].identity.incarnation
        world.crash(store)
        seen = world.clients[READER].links
        await world.cluster.until(lambda: len(seen.all()) == 2, timeout_s=10)
        await world.restart(store)
        await world.settle()
        assert world.nodes[store].identity.incarnation != old
        read = await done(world, READER, world.get(READER, kept, timeout_s=8))
        assert read.count(GetOutcome.READ) == len(kept) - 1, "all but the page that rotted"

    play(script, CONFIG, ssd=True)


def test_an_ssd_that_loses_its_last_writes_serves_none_of_them() -> None:
    async def script(world: StoreWorld) -> None:
        store, disk = STORES[0], world.disks[STORES[0]]
        pages = pages_on(world, store, 40)
        for start in range(0, 32, 4):
            await done(world, WRITER, world.put(WRITER, pages[start : start + 4]))
            await asyncio.sleep(0.4)
        while not (disk.num_lost and disk.num_torn):
            for stored in list(disk.slots.values())[::2]:
                stored.synced = False
            disk.lose_power()
        await world.restart(store)
        await world.settle()
        listed = [page for page in pages if page.key in disk.slots]
        read = await done(world, READER, world.get(READER, listed, timeout_s=8))
        assert {*read} <= {GetOutcome.READ, GetOutcome.ABSENT}
        damaged = total(world, "sim_damaged")
        assert damaged > 0, "torn pages were found out when they were read"
        assert read.count(GetOutcome.ABSENT) == damaged

    play(script, CONFIG, ssd=True)


def test_what_was_cleared_does_not_come_back_from_an_ssd_that_loses_its_last_writes() -> None:
    async def script(world: StoreWorld) -> None:
        store, disk = STORES[0], world.disks[STORES[0]]
        pages = pages_on(world, store, 24)
        for start in range(0, len(pages), 4):
            await done(world, WRITER, world.put(WRITER, pages[start : start + 4]))
            await asyncio.sleep(0.5)
        await world.cluster.until(lambda: len(disk.slots) >= 6, timeout_s=5)
        disk.sync()
        assert await done(world, WRITER, world.clear(WRITER)) is not None
        world.crash(store)
        disk.lose_power()
        assert not disk.slots
        await world.restart(store)
        await world.settle()
        states = await done(world, READER, world.match(READER, pages))
        assert {*states} == {PageState.ABSENT}

    play(script, CONFIG, ssd=True)
