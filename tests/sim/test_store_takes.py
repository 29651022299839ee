"""Pages that a node takes by reading them: everybody dies, stands still or changes his mind midway.

Every script runs under all checkers of ``tests/sim/checkers.py`` and ends with healing, quiescence
and liveness, as random seeds do.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.client.link import NO_OFFERS_S
from kvstore.config import StoreClientConfig
from kvstore.messages import TakePages
from kvstore.store import GetOutcome, PageIdentity, PutOutcome
from tests.sim.book import SPEC, filled
from tests.sim.faults import FaultPlan
from tests.sim.scripts import OFFERS, ROOMY, STEPS, begin, done, pages_on, play, total
from tests.sim.store_world import CONFIG, LEASE_S, StoreWorld
from tests.sim.take_scripts import (
    LATE,
    READER,
    RIVAL,
    STORE,
    TIGHT,
    TIGHT_PAIRS,
    WRITER,
    a_foreign_release_comes_by_itself,
    a_foreign_release_comes_with_a_request,
    a_reservation_ends_before_its_bytes_are_committed,
    a_store_stands_still_in_a_copy,
    a_store_stands_still_in_a_take,
)
from transfer.interface import Region, deadline_after

ALL_STORED, ALL_READ = {PutOutcome.STORED}, {GetOutcome.READ}
DELAY_S = 5e-3  # one way
SLOW_BYTES_PER_S = 1500.0  # a node gives up reading before it is done


async def taking(world: StoreWorld) -> None:
    """Return when a node has begun to read from a writer."""
    await world.cluster.until(lambda: total(world, "num_writing") > 0, timeout_s=1)
    await asyncio.sleep(0.05)
    assert total(world, "num_writing") > 0


@pytest.mark.parametrize("silently", [0.0, 1.0])
def test_a_writer_that_dies_in_the_middle_of_a_take_frees_the_slots_soon(silently: float) -> None:
    async def script(world: StoreWorld) -> None:
        pages = pages_on(world, STORE, 3)
        world.cluster.slow_down(WRITER, SLOW_BYTES_PER_S)
        begin(world, WRITER, world.put(WRITER, pages))
        await taking(world)
        world.crash(WRITER)
        died_s = world.cluster.now_s
        await world.cluster.until(lambda: not total(world, "num_owed"), timeout_s=LEASE_S)
        await world.cluster.until(lambda: not total(world, "num_writing"), timeout_s=LEASE_S)
        assert world.cluster.now_s - died_s < LEASE_S, "before any reservation would have ended"
        assert {*await done(world, RIVAL, world.put(RIVAL, pages))} == ALL_STORED
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ

    play(script, plan=FaultPlan(silent_crash=silently, late_read=1.0), client_config=OFFERS)


def test_a_writer_that_stands_still_in_a_take_holds_up_nobody() -> None:
    async def script(world: StoreWorld) -> None:
        pages = pages_on(world, STORE, 3)
        world.cluster.slow_down(WRITER, SLOW_BYTES_PER_S)
        putting = begin(world, WRITER, world.put(WRITER, pages, timeout_s=8))
        await taking(world)
        world.cluster.pause(WRITER)
        stopped_s = world.cluster.now_s
        assert {*await done(world, RIVAL, world.put(RIVAL, pages, timeout_s=8))} == ALL_STORED
        assert world.cluster.now_s - stopped_s < LEASE_S, "the node reads for a short time only"
        assert total(world, "unread_takes") == 1
        world.cluster.resume(WRITER)
        assert {*await putting} == {PutOutcome.PRESENT}
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ

    play(script, plan=LATE, client_config=OFFERS)


def test_a_store_that_stood_still_in_a_take_reads_into_no_slot_of_another() -> None:
    play(a_store_stands_still_in_a_take, TIGHT, plan=LATE, client_config=OFFERS)


def test_a_store_that_stood_still_in_a_copy_reads_into_no_slot_of_another() -> None:
    play(a_store_stands_still_in_a_copy, TIGHT_PAIRS, plan=LATE)


@pytest.mark.parametrize("client_config", [OFFERS, STEPS], ids=["taken", "written"])
def test_source_memory_that_is_used_again_after_a_cancelled_put_harms_no_page(
    client_config: StoreClientConfig,
) -> None:
    async def script(world: StoreWorld) -> None:
        pages = pages_on(world, STORE, 3)
        world.book.update((page.key, page) for page in pages)
        source, putting = _begin_put(world, pages)
        await taking(world)
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled()
        source.view[:] = b"\xee" * source.nbytes
        world.cluster.fabric.bulk_limits.clear()
        read = await done(world, READER, world.get(READER, pages))
        assert {*read} <= {GetOutcome.ABSENT, GetOutcome.READ}
        rival = await done(world, RIVAL, world.put(RIVAL, pages, timeout_s=8))
        assert {*rival} <= {PutOutcome.STORED, PutOutcome.PRESENT}
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ

    late = FaultPlan(silent_crash=0.0, late_read=1.0, late_write=1.0)
    play(script, plan=late, client_config=client_config)


def _begin_put(world: StoreWorld, pages: list[PageIdentity]) -> tuple[Region, asyncio.Task[Any]]:
    """A put whose memory the caller has in hand."""
    source, puts = filled(world.cluster.node(WRITER).transfer, pages)
    world.cluster.slow_down(WRITER, SLOW_BYTES_PER_S)

    async def put() -> Any:
        client = world.clients[WRITER]
        return await client.put(puts, source=source, deadline_s=deadline_after(8))

    return source, begin(world, WRITER, put())


def test_a_node_that_cannot_reach_back_says_unread_and_is_written_to() -> None:
    async def script(world: StoreWorld) -> None:
        offers: list[str] = []

        async def cut_one_way(store: str, message: Any) -> None:
            offers.append(store)
            if len(offers) == 1:
                world.cluster.block(WRITER, STORE)

        world.hooks[TakePages] = cut_one_way
        pages = pages_on(world, STORE, 9)
        putting = begin(world, WRITER, world.put(WRITER, pages[:3], timeout_s=8))
        async with asyncio.timeout(2):
            while not total(world, "unread_takes"):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(DELAY_S / 10)  # the node's answer is on its way
        world.cluster.fabric.unblock_all()
        assert {*await putting} == ALL_STORED
        assert world.clients[WRITER].counters()["unread_offers"] == 1
        assert (total(world, "taken"), len(offers)) == (0, 1)
        assert {*await done(world, WRITER, world.put(WRITER, pages[3:6]))} == ALL_STORED
        assert len(offers) == 1, "it is not offered anything for a while"
        await asyncio.sleep(NO_OFFERS_S)
        assert {*await done(world, WRITER, world.put(WRITER, pages[6:]))} == ALL_STORED
        assert (total(world, "taken"), len(offers)) == (3, 2)
        assert {*await done(world, READER, world.get(READER, pages))} == ALL_READ

    play(script, ROOMY, plan=FaultPlan(delay_s_min=DELAY_S), client_config=OFFERS)


def test_a_release_of_a_former_life_that_comes_with_a_request_ends_no_lease() -> None:
    play(a_foreign_release_comes_with_a_request, CONFIG)


def test_what_is_asked_of_a_former_life_is_refused_and_ends_no_lease() -> None:
    play(a_foreign_release_comes_by_itself, CONFIG)


def test_a_take_whose_reservation_has_ended_is_not_said_to_be_taken() -> None:
    play(a_reservation_ends_before_its_bytes_are_committed, TIGHT, client_config=OFFERS)


def test_all_pages_of_a_take_fit_one_offer() -> None:
    """Else the scripts would look at something else."""
    assert 3 * SPEC.page_nbytes <= OFFERS.offer_nbytes_max
    assert 3 * SPEC.page_nbytes > SLOW_BYTES_PER_S * 0.5
