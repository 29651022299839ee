"""The in-memory store keeps the contract, and misbehaves exactly as told."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.store import GetOutcome, PageState, PageStore, PutOutcome
from tests.kvstore.contract import PageStoreContract, Stores, put_all
from tests.kvstore.fakes import FakeTransfer, World
from tests.kvstore.memory import MemoryStore
from tests.kvstore.pages import SPEC, empty, filled, holds, sequence
from transfer.interface import deadline_after


class TestMemoryStore(PageStoreContract):
    @pytest.fixture
    def stores(self) -> Stores:
        store = MemoryStore(SPEC)

        async def open_store() -> PageStore:
            return store

        return Stores(open_store, FakeTransfer(World()))


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(SPEC)


@pytest.fixture
def stores(memory: MemoryStore) -> Stores:
    async def open_store() -> PageStore:
        return memory

    return Stores(open_store, FakeTransfer(World()))


@pytest.mark.parametrize("k", range(4))
async def test_faults_hit_the_page_they_name(stores: Stores, memory: MemoryStore, k: int) -> None:
    await put_all(stores, memory, range(14))
    into, gets = empty(stores.transfer, sequence(range(14)))
    for field, outcome in (
        ("absent_depths", GetOutcome.ABSENT),
        ("fail_depths", GetOutcome.FAILED),
        ("corrupt_depths", GetOutcome.CORRUPT),
    ):
        getattr(memory.faults, field).add(k)
        result = await memory.get(gets, into=into, deadline_s=deadline_after(5))
        assert result.outcomes == [outcome if i == k else GetOutcome.READ for i in range(4)]
        assert all(holds(into, page) for i, page in enumerate(gets) if i != k)
        getattr(memory.faults, field).clear()
    assert memory.num_corrupt == 1


async def test_puts_are_refused_failed_and_lost_as_told(
    stores: Stores, memory: MemoryStore
) -> None:
    memory.faults.refuse_puts = True
    assert await put_all(stores, memory, range(4)) == [PutOutcome.REFUSED]
    memory.faults.refuse_puts, memory.faults.fail_puts = False, True
    assert await put_all(stores, memory, range(4)) == [PutOutcome.FAILED]
    memory.faults.fail_puts = False
    assert await put_all(stores, memory, range(4)) == [PutOutcome.STORED]
    memory.faults.unreachable = True
    keys = [page.key for page in sequence(range(4))]
    assert await memory.match(keys, deadline_s=deadline_after(5)) == [PageState.ABSENT]
    into, gets = empty(stores.transfer, sequence(range(4)))
    result = await memory.get(gets, into=into, deadline_s=deadline_after(5), wait=True)
    assert result.outcomes == [GetOutcome.FAILED]


async def test_a_slow_put_shows_as_writing_and_a_cancelled_one_is_taken_over(
    stores: Stores, memory: MemoryStore
) -> None:
    memory.faults.put_delay_s = 30.0
    source, puts = filled(stores.transfer, sequence(range(4)))
    first = asyncio.ensure_future(memory.put(puts, source=source, deadline_s=deadline_after(60)))
    await asyncio.sleep(0)
    keys = [page.key for page in sequence(range(4))]
    assert await memory.match(keys, deadline_s=deadline_after(5)) == [PageState.WRITING]
    memory.faults.put_delay_s = 0.0
    second = asyncio.ensure_future(memory.put(puts, source=source, deadline_s=deadline_after(5)))
    await asyncio.sleep(0.01)
    assert not second.done(), "the second writer joins the first"
    first.cancel()
    assert (await second).outcomes == [PutOutcome.STORED]
    await asyncio.gather(first, return_exceptions=True)


async def test_capacity_lets_the_oldest_go(stores: Stores) -> None:
    memory = MemoryStore(SPEC, num_pages_max=2)
    await put_all(stores, memory, range(12))
    assert [page.record.depth for page in memory.pages.values()] == [1, 2]
    assert memory.clear() == 2
