"""The staged store keeps the page-store contract for device memory, however small the staging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import pytest

from kvstore.device.staged import StagedStore
from kvstore.device.staging import DeviceRegion
from kvstore.page import PageKey
from kvstore.store import GetOutcome, PageStore, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import PageStoreContract, Stores, put_all
from tests.kvstore.devices import Device, NumpyPages, staged
from tests.kvstore.fakes import FakeTransfer, World
from tests.kvstore.faulty import PATIENT, until
from tests.kvstore.memory import MemoryStore
from tests.kvstore.pages import SPEC, empty, filled, holds, sequence
from transfer.errors import Unauthorized
from transfer.interface import deadline_after

STAGING_SIZES = [1, 3, 64]


def quiet(stores: list[StagedStore]) -> None:
    assert [store.staging.num_held for store in stores] == [0] * len(stores)


@pytest.mark.parametrize("num_staging_pages", STAGING_SIZES)
class TestStagedMemoryStore(PageStoreContract):
    @pytest.fixture
    def stores(self, num_staging_pages: int) -> Iterator[Stores]:
        memory, transfer, device = MemoryStore(SPEC), FakeTransfer(World()), Device()
        opened: list[StagedStore] = []

        async def open_store() -> PageStore:
            store, _ = staged(memory, transfer, device, num_staging_pages=num_staging_pages)
            opened.append(store)
            return store

        yield Stores(open_store, device)
        quiet(opened)


@pytest.mark.parametrize("num_staging_pages", STAGING_SIZES)
class TestStagedStoreClient(PageStoreContract):
    @pytest.fixture
    async def stores(self, num_staging_pages: int) -> AsyncIterator[Stores]:
        cluster, device = StoreCluster(World(), client_config=PATIENT), Device()
        for i in range(2):
            await cluster.node(f"store-{i}")
        transfer, network = await cluster.transfer(), cluster.network()
        opened: list[StagedStore] = []

        async def open_store() -> PageStore:
            client = await cluster.client(transfer, network=network)
            store, _ = staged(client, transfer, device, num_staging_pages=num_staging_pages)
            opened.append(store)
            return store

        yield Stores(open_store, device)
        quiet(opened)
        await cluster.close()


class Rig(NamedTuple):
    """One staged store over a memory store."""

    store: StagedStore
    pages: NumpyPages
    memory: MemoryStore
    stores: Stores


@pytest.fixture
def rig() -> Iterator[Callable[[int], Rig]]:
    made: list[Rig] = []

    def make(num_staging_pages: int) -> Rig:
        memory, device = MemoryStore(SPEC), Device()
        store, pages = staged(
            memory, FakeTransfer(World()), device, num_staging_pages=num_staging_pages
        )

        async def open_store() -> PageStore:
            return store

        made.append(Rig(store, pages, memory, Stores(open_store, device)))
        return made[-1]

    yield make
    for each in made:
        each.pages.gate.set()
    quiet([each.store for each in made])


async def held_at_the_gate(pages: NumpyPages) -> None:
    """Return when a copy waits on its thread."""
    await until(pages.entered.is_set)


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_cancelled_get_ends_only_when_its_copy_has(
    rig: Callable[[int], Rig], num_cancels: int
) -> None:
    r = rig(4)
    await put_all(r.stores, r.store, range(8))
    into, gets = empty(r.stores.transfer, sequence(range(8)))
    r.pages.gate.clear()
    r.pages.entered.clear()
    getting = asyncio.ensure_future(r.store.get(gets, into=into, deadline_s=deadline_after(9)))
    await held_at_the_gate(r.pages)
    for _ in range(num_cancels):
        getting.cancel()
        await asyncio.sleep(0.01)
    assert not getting.done(), "it ended while a copy still wrote to the device"
    assert r.store.staging.num_held > 0, "a staging page was given back while it was read"
    r.pages.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await getting
    quiet([r.store])
    into.view[:] = bytes(into.nbytes)
    await asyncio.sleep(0.02)
    assert bytes(into.view) == bytes(into.nbytes)


async def test_a_cancelled_put_ends_only_when_its_copy_has(rig: Callable[[int], Rig]) -> None:
    r = rig(4)
    r.pages.gate.clear()
    putting = asyncio.ensure_future(put_all(r.stores, r.store, range(8)))
    await held_at_the_gate(r.pages)
    putting.cancel()
    await asyncio.sleep(0.01)
    assert not putting.done()
    r.pages.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert r.memory.pages == {}


@pytest.mark.parametrize("num_staging_pages", [1, 4])
async def test_readers_that_wait_never_keep_a_page_from_being_pushed(
    rig: Callable[[int], Rig], num_staging_pages: int
) -> None:
    r = rig(num_staging_pages)
    readers = []
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for _ in range(16):
            into, gets = empty(r.stores.transfer, sequence(range(12)))
            getting = r.store.get(gets, into=into, deadline_s=deadline_after(9), wait=True)
            readers.append((into, gets, tasks.create_task(getting)))
        await asyncio.sleep(0.05)  # all of them wait
        assert await put_all(r.stores, r.store, range(12)) == [PutOutcome.STORED] * 3
    for into, gets, reading in readers:
        assert reading.result().outcomes == [GetOutcome.READ] * 3
        assert all(holds(into, page) for page in gets)


async def test_a_waiting_get_notices_pages_that_come_out_of_order(
    rig: Callable[[int], Rig],
) -> None:
    r = rig(8)
    into, gets = empty(r.stores.transfer, sequence(range(8)))
    seen = asyncio.Event()
    getting = asyncio.ensure_future(
        r.store.get(
            gets,
            into=into,
            deadline_s=deadline_after(9),
            wait=True,
            on_page=lambda i, outcome: seen.set(),
        )
    )
    source, puts = filled(r.stores.transfer, sequence(range(8)))
    await r.store.put(puts[1:], source=source, deadline_s=deadline_after(5))
    async with asyncio.timeout(2):
        await seen.wait()
    assert holds(into, gets[1])
    await r.store.put(puts[:1], source=source, deadline_s=deadline_after(5))
    assert (await getting).outcomes == [GetOutcome.READ] * 2


async def test_a_page_that_does_not_verify_never_reaches_the_device(
    rig: Callable[[int], Rig],
) -> None:
    r = rig(2)
    await put_all(r.stores, r.store, range(12))
    r.memory.faults.corrupt_depths.add(1)
    into, gets = empty(r.stores.transfer, sequence(range(12)))
    result = await r.store.get(gets, into=into, deadline_s=deadline_after(5))
    assert result.outcomes == [GetOutcome.READ, GetOutcome.CORRUPT, GetOutcome.READ]
    place = gets[1].local_offset
    assert bytes(into.view[place : place + SPEC.page_nbytes]) == bytes(SPEC.page_nbytes)


async def test_a_failing_device_costs_the_pages_and_is_counted(rig: Callable[[int], Rig]) -> None:
    r = rig(2)
    await put_all(r.stores, r.store, range(4))
    r.pages.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert await put_all(r.stores, r.store, range(8)) == [PutOutcome.FAILED] * 2
    into, gets = empty(r.stores.transfer, sequence(range(4)))
    result = await r.store.get(gets, into=into, deadline_s=deadline_after(5))
    assert result.outcomes == [GetOutcome.FAILED]
    assert r.store.counters == {"broken_puts": 2, "broken_copies": 1}


async def test_calls_that_find_no_staging_page_end_at_their_deadline(
    rig: Callable[[int], Rig],
) -> None:
    r = rig(1)
    await put_all(r.stores, r.store, range(4))
    r.pages.gate.clear()
    r.pages.entered.clear()
    first = asyncio.ensure_future(put_all(r.stores, r.store, range(50, 54)))
    await held_at_the_gate(r.pages)
    source, puts = filled(r.stores.transfer, sequence(range(60, 64)))
    put = await r.store.put(puts, source=source, deadline_s=deadline_after(0.1))
    into, gets = empty(r.stores.transfer, sequence(range(4)))
    get = await r.store.get(gets, into=into, deadline_s=deadline_after(0.1))
    assert (put.outcomes, get.outcomes) == ([PutOutcome.FAILED], [GetOutcome.ABSENT])
    r.pages.gate.set()
    assert await first == [PutOutcome.STORED]


async def test_a_revoked_region_is_not_touched(rig: Callable[[int], Rig]) -> None:
    r = rig(2)
    await put_all(r.stores, r.store, range(4))
    num_copied = r.pages.num_copied
    into, gets = empty(r.stores.transfer, sequence(range(4)))
    source, puts = filled(r.stores.transfer, sequence(range(50, 54)))
    into.revoke()
    source.revoke()
    get = await r.store.get(gets, into=into, deadline_s=deadline_after(5))
    put = await r.store.put(puts, source=source, deadline_s=deadline_after(5))
    assert (put.outcomes, get.outcomes) == ([PutOutcome.FAILED], [GetOutcome.FAILED])
    assert r.pages.num_copied == num_copied


async def test_many_pages_pass_through_few_staging_pages(rig: Callable[[int], Rig]) -> None:
    r = rig(5)
    tokens = range(4 * 200)
    assert await put_all(r.stores, r.store, tokens) == [PutOutcome.STORED] * 200
    into, gets = empty(r.stores.transfer, sequence(tokens))
    result = await r.store.get(gets, into=into, deadline_s=deadline_after(9), wait=True)
    assert result.outcomes == [GetOutcome.READ] * 200
    assert result.moved == (200, 200 * SPEC.page_nbytes)
    assert all(holds(into, page) for page in gets)
    assert r.memory.put_counts == dict.fromkeys((page.identity.key for page in gets), 1)


def test_device_memory_is_neither_seen_by_the_host_nor_granted_to_peers() -> None:
    region = DeviceRegion(1024)
    assert region.nbytes == 1024
    with pytest.raises(TypeError, match="StagedStore"):
        region.view  # noqa: B018
    with pytest.raises(Unauthorized):
        region.export("r")


async def test_match_and_close_are_the_inner_stores(rig: Callable[[int], Rig]) -> None:
    r = rig(1)
    key = PageKey(b"k" * 32)
    assert await r.store.match([key], deadline_s=deadline_after(1)) == await r.memory.match(
        [key], deadline_s=deadline_after(1)
    )
    await r.store.close()
    assert r.store.region.revoked
