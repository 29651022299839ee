"""Slots have one holder each, and go to those who wait in the order they came."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstore.device.slot_pool import SlotPool
from transfer.interface import deadline_after


async def test_the_lowest_free_slots_go_first_and_never_more_than_asked_for() -> None:
    pool = SlotPool(4)
    assert await pool.take(2, deadline_s=deadline_after(1)) == [0, 1]
    assert await pool.take(9, deadline_s=deadline_after(1)) == [2, 3]
    assert pool.take_free(1) == []
    pool.give_back([3, 1])
    assert pool.take_free(9) == [1, 3]


async def test_who_came_first_is_served_first_and_nobody_overtakes() -> None:
    pool = SlotPool(1)
    (slot,) = pool.take_free(1)
    order: list[int] = []

    async def use(number: int) -> None:
        slots = await pool.take(1, deadline_s=deadline_after(5))
        order.append(number)
        pool.give_back(slots)

    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(use(number))
        await asyncio.sleep(0)
        pool.give_back([slot])
        assert pool.take_free(1) == [], "a newcomer overtook those who wait"
    assert order == [0, 1, 2, 3, 4]


async def test_a_wait_ends_at_its_deadline_with_nothing() -> None:
    pool = SlotPool(0)
    assert await pool.take(1, deadline_s=deadline_after(0.02)) == []


async def test_a_slot_granted_to_one_who_is_cancelled_goes_to_the_next() -> None:
    pool = SlotPool(1)
    slots = pool.take_free(1)
    first = asyncio.ensure_future(pool.take(1, deadline_s=deadline_after(5)))
    second = asyncio.ensure_future(pool.take(1, deadline_s=deadline_after(5)))
    await asyncio.sleep(0)
    pool.give_back(slots)  # granted to the first, which has not run yet
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == [0]
    pool.give_back([0])
    assert pool.num_free == 1


@pytest.mark.parametrize("seed", range(20))
async def test_slots_are_conserved_whatever_is_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    pool = SlotPool(rng.randint(1, 5))
    held: dict[int, None] = {}

    async def use() -> None:
        slots = await pool.take(rng.randint(1, 4), deadline_s=deadline_after(rng.random() / 50))
        try:
            for slot in slots:
                assert slot not in held, "two holders"
                held[slot] = None
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
        finally:
            for slot in slots:
                del held[slot]
            pool.give_back(slots)

    tasks = [asyncio.ensure_future(use()) for _ in range(60)]
    for _ in range(40):
        rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results), results
    assert pool.num_free == pool.num_slots
    assert not held
