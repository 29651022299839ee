"""What a tier promises while its disk works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.page import PageKey, PageSpec
from kvstore.server.tier import Tier
from kvstore.ssd import SsdTier, catalogue, page_reader
from kvstore.ssd.bounce import BouncePool
from kvstore.ssd.config import COPY_NBYTES, STORES_MAX
from tests.kvstore.ssd.conftest import MIB, OpenTier
from tests.kvstore.ssd.disks import FaultyDisk
from tests.kvstore.ssd.ssd_pages import (
    DEEP,
    LARGE,
    SMALL,
    TENANT,
    content,
    get,
    key,
    page,
    put,
)


async def test_a_stored_page_comes_back_with_its_bytes_and_record(open_tier: OpenTier) -> None:
    tier = await open_tier()
    assert await put(tier, 1)
    assert await get(tier, 1)
    assert not await get(tier, 2)
    assert tier.num_pages == 1
    assert tier.used_nbytes == SMALL.page_nbytes


async def test_the_tier_is_a_tier(open_tier: OpenTier) -> None:
    tier: Tier = await open_tier()
    assert tier.degraded is None
    assert list(tier.contents()) == []


async def test_pages_of_several_sizes_live_in_one_tier(open_tier: OpenTier) -> None:
    tier = await open_tier(nbytes=16 * MIB)
    specs = [SMALL, LARGE, DEEP]
    for number in range(12):
        assert await put(tier, number, spec=specs[number % 3])
    for number in range(12):
        assert await get(tier, number, spec=specs[number % 3])


async def test_a_restart_finds_every_page_and_its_description(open_tier: OpenTier) -> None:
    tier = await open_tier()
    for number in range(20):
        assert await put(tier, number, heat=float(number), namespace=TENANT)
    assert await put(tier, 20, namespace=b"")
    await tier.close()
    tier = await open_tier()
    found = {p.record.key: p for p in tier.contents()}
    assert len(found) == tier.num_pages == 21
    assert all(found[key(n)] == page(n, heat=float(n)) for n in range(20))
    assert found[key(20)].namespace == b""
    assert all([await get(tier, number) for number in range(21)])


async def test_a_restart_tells_the_hottest_pages_first(open_tier: OpenTier) -> None:
    tier = await open_tier()
    heats = [2.0, -1.0, float("inf"), 7.5, 0.0]
    for number, heat in enumerate(heats):
        assert await put(tier, number, heat=heat)
    await tier.close()
    tier = await open_tier()
    assert [p.heat for p in tier.contents()] == sorted(heats, reverse=True)


async def test_a_tail_page_is_verified_over_its_valid_bytes_only(open_tier: OpenTier) -> None:
    tier = await open_tier()
    tail = page(1, num_tokens=2)
    data = content(1)
    assert await tier.store(tail, data.data)
    into = np.zeros_like(data)
    assert await tier.load(key(1), into.data) == tail.record
    valid = SMALL.valid_bytes(data.data, 2)
    assert (SMALL.valid_bytes(into.data, 2) == valid).all()


async def test_what_does_not_match_its_checksum_is_not_stored(open_tier: OpenTier) -> None:
    tier = await open_tier()
    assert not await tier.store(page(1), content(2).data)
    assert tier.numbers()["ssd_refused_corrupt"] == 1
    assert tier.num_pages == 0


async def test_a_page_stored_twice_is_written_once(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    disk.writes.clear()
    both = asyncio.gather(put(tier, 1), put(tier, 1))
    await asyncio.sleep(0)
    disk.writes.set()
    assert list(await both) == [True, True]
    assert await put(tier, 1)
    assert disk.num_writes == 1


async def test_removed_pages_stay_removed_after_a_restart(open_tier: OpenTier) -> None:
    tier = await open_tier()
    for number in range(4):
        await put(tier, number)
    tier.remove([key(1), key(3), key(99)])
    assert tier.num_pages == 2
    await tier.close()
    tier = await open_tier()
    assert {p.record.key for p in tier.contents()} == {key(0), key(2)}


async def fill(tier: SsdTier) -> int:
    """Store small pages of heat 0, 1, 2, ... while there is room; returns how many."""
    number = 0
    while tier.has_room(SMALL.page_nbytes):
        assert await put(tier, number, heat=float(number))
        number += 1
    return number


async def test_a_full_tier_refuses_until_something_is_removed(open_tier: OpenTier) -> None:
    tier = await open_tier(nbytes=MIB)
    stored = await fill(tier)
    assert not await put(tier, stored)
    assert tier.numbers()["ssd_refused_full"] == 1
    tier.remove([key(0)])
    assert tier.has_room(SMALL.page_nbytes)
    assert await put(tier, stored)


async def test_a_page_larger_than_a_slab_is_refused(open_tier: OpenTier) -> None:
    tier = await open_tier(nbytes=MIB)
    assert not tier.has_room(DEEP.page_nbytes)
    assert not await put(tier, 1, spec=DEEP)


class Deciding:
    """Told what a tier gave up that decides what is worth its room."""

    def __init__(self) -> None:
        self.evicted: list[PageKey] = []
        self.some = asyncio.Event()

    def on_evicted(self, keys: Sequence[PageKey]) -> None:
        self.evicted.extend(keys)
        self.some.set()


async def test_only_a_warmer_page_displaces_and_the_coldest_goes(open_tier: OpenTier) -> None:
    deciding = Deciding()
    tier = await open_tier(nbytes=MIB)
    tier.displace(deciding.on_evicted)
    num = await fill(tier)
    assert not await put(tier, 1000, heat=-1.0)
    assert deciding.evicted == []
    assert await put(tier, 1001, heat=0.5)
    assert deciding.evicted == [key(0)]
    tier.touch(key(1001), float(num))
    assert await put(tier, 1002, heat=float(num))
    assert deciding.evicted == [key(0), key(1)]
    assert await get(tier, 1001)


async def test_pages_of_another_size_take_a_slab_whose_pages_are_all_colder(
    open_tier: OpenTier,
) -> None:
    deciding = Deciding()
    tier = await open_tier(nbytes=MIB)
    tier.displace(deciding.on_evicted)
    num = await fill(tier)
    assert not await put(tier, 1000, spec=LARGE, heat=3.0)
    assert await put(tier, 1001, spec=LARGE, heat=float(num))
    assert sorted(deciding.evicted) == sorted(key(n) for n in range(len(deciding.evicted)))
    assert await get(tier, 1001, spec=LARGE)


async def test_what_was_displaced_is_not_found_after_a_restart(open_tier: OpenTier) -> None:
    deciding = Deciding()
    tier = await open_tier(nbytes=MIB)
    tier.displace(deciding.on_evicted)
    num = await fill(tier)
    await tier.flush()
    assert await put(tier, 1001, spec=LARGE, heat=float(num))
    assert len(deciding.evicted) > 1
    left = {key(number) for number in (*range(num), 1001)} - set(deciding.evicted)
    await tier.close()
    tier = await open_tier(nbytes=MIB)
    assert tier.numbers()["ssd_rows_dropped"] == 0
    assert {p.record.key for p in tier.contents()} == left


async def test_heats_of_an_earlier_life_are_an_order_below_this_life(open_tier: OpenTier) -> None:
    deciding = Deciding()
    tier = await open_tier(nbytes=MIB)
    tier.displace(deciding.on_evicted)
    num = await fill(tier)
    await tier.close()
    tier = await open_tier(nbytes=MIB)
    tier.displace(deciding.on_evicted)
    assert await put(tier, num, heat=-1e9)
    assert await put(tier, num + 1, heat=-2e9)
    assert deciding.evicted == [key(0), key(1)]


async def test_a_page_being_read_is_not_evicted_and_its_slot_not_reused(
    open_tier: OpenTier,
) -> None:
    deciding, disk = Deciding(), FaultyDisk()
    tier = await open_tier(nbytes=MIB, disk=disk)
    tier.displace(deciding.on_evicted)
    num = await fill(tier)
    disk.reads.clear()
    reading = asyncio.ensure_future(get(tier, 0))
    await asyncio.sleep(0)
    assert await put(tier, num, heat=float(num))
    assert deciding.evicted == [key(1)]
    disk.reads.set()
    assert await reading


async def test_emptying_a_slab_lets_others_run_and_takes_one_slab_for_all(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ROWS_AT_ONCE", 4)
    told: list[int] = []
    tier = await open_tier(nbytes=MIB)
    tier.displace(lambda keys: told.append(len(keys)))
    num = await fill(tier)
    storing = [
        asyncio.ensure_future(put(tier, 1000 + n, spec=LARGE, heat=float(num))) for n in range(2)
    ]
    await asyncio.sleep(0)
    while not all(store.done() for store in storing):
        tier.check()  # at every step
        assert await get(tier, num - 1)
    assert [store.result() for store in storing] == [True, True]
    assert max(told) <= 4
    assert tier.numbers()["ssd_slabs_emptied"] == 1
    assert sum(told) == tier.numbers()["ssd_evicted"] == num + 2 - tier.num_pages


async def test_a_slab_that_warms_up_while_it_is_emptied_keeps_its_warm_pages(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ROWS_AT_ONCE", 1)
    deciding = Deciding()
    tier = await open_tier(nbytes=MIB)
    tier.displace(deciding.on_evicted)
    num = await fill(tier)
    storing = asyncio.ensure_future(put(tier, 1000, spec=LARGE, heat=float(num)))
    await deciding.some.wait()
    gone = len(deciding.evicted)
    for number in range(num):
        tier.touch(key(number), 2.0 * num)
    assert not await storing
    assert len(deciding.evicted) == gone
    assert tier.num_pages == num - gone
    assert await put(tier, 1001), "the slab takes pages of its size again"
    assert all([await get(tier, n) for n in range(num) if key(n) not in deciding.evicted])


async def test_a_store_cancelled_while_room_is_made_gives_up_no_more(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ROWS_AT_ONCE", 1)
    deciding = Deciding()
    tier = await open_tier(nbytes=MIB)
    tier.displace(deciding.on_evicted)
    num = await fill(tier)
    storing = asyncio.ensure_future(put(tier, 1000, spec=LARGE, heat=float(num)))
    await deciding.some.wait()
    storing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await storing
    gone = len(deciding.evicted)
    assert tier.num_pages == num - gone
    for n in range(gone):
        assert await put(tier, 2000 + n, heat=-1.0), "its room is there for others"
    assert len(deciding.evicted) == gone


async def test_a_page_removed_while_it_is_read_is_absent_and_its_slot_waits(
    open_tier: OpenTier,
) -> None:
    disk = FaultyDisk()
    tier = await open_tier(nbytes=MIB, disk=disk)
    num = await fill(tier)
    disk.reads.clear()
    reading = asyncio.ensure_future(get(tier, 0))
    await asyncio.sleep(0)
    tier.remove([key(0)])
    assert not await put(tier, num), "a slot that is being read was granted"
    disk.reads.set()
    assert not await reading
    assert await put(tier, num)
    assert all([await get(tier, number) for number in range(1, num + 1)])


async def test_a_page_removed_while_it_is_written_does_not_appear(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    disk.writes.clear()
    writing = asyncio.ensure_future(put(tier, 1))
    await asyncio.sleep(0)
    tier.remove([key(1)])
    disk.writes.set()
    assert not await writing
    assert not await get(tier, 1)
    assert await put(tier, 1)


async def test_the_source_may_change_as_soon_as_a_store_is_cancelled(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    disk.writes.clear()
    data = content(1).copy()
    writing = asyncio.ensure_future(tier.store(page(1), data.data))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    data[:] = 0
    disk.writes.set()
    assert await put(tier, 1)  # joins the write that went on
    assert await get(tier, 1)


async def test_a_cancelled_load_never_touches_the_destination(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    await put(tier, 1)
    disk.reads.clear()
    into = np.zeros(SMALL.page_nbytes, dtype=np.uint8)
    reading = asyncio.ensure_future(tier.load(key(1), into.data))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    disk.reads.set()
    await tier.close()
    assert not into.any()


async def test_the_slot_of_a_cancelled_load_waits_for_the_thread(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(nbytes=MIB, disk=disk)
    num = await fill(tier)
    disk.reads.clear()
    reading = asyncio.ensure_future(get(tier, 0))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    tier.remove([key(0)])
    assert not await put(tier, num), "a slot that a thread still reads was granted"
    closing = asyncio.ensure_future(tier.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done(), "closed under a thread that reads"
    disk.reads.set()
    await closing


async def test_more_loads_than_memory_wait_in_turn_and_are_all_served(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_reader, "BOUNCE_NBYTES", 2 * 4096)  # one small page at a time
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    assert all([await put(tier, number) for number in range(8)])
    num_reads = disk.num_reads
    disk.reads.clear()
    loads = [asyncio.ensure_future(get(tier, number)) for number in range(8)]
    await asyncio.sleep(0)
    assert tier.numbers()["ssd_loads_under_way"] == 8
    assert disk.num_reads - num_reads <= 1
    disk.reads.set()
    assert await asyncio.gather(*loads) == [True] * 8


async def test_closing_ends_although_the_last_load_gave_up_as_it_got_its_memory(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_reader, "BOUNCE_NBYTES", 2 * 4096)  # one small page at a time
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    assert await put(tier, 1)
    assert await put(tier, 2)
    disk.reads.clear()
    first, second = (asyncio.ensure_future(get(tier, number)) for number in (1, 2))
    await asyncio.sleep(0)
    give = BouncePool.give

    def give_and_cancel(pool: BouncePool, buffer: memoryview) -> None:
        monkeypatch.setattr(BouncePool, "give", give)
        give(pool, buffer)
        second.cancel()

    monkeypatch.setattr(BouncePool, "give", give_and_cancel)
    closing = asyncio.ensure_future(tier.close())
    disk.reads.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second
    async with asyncio.timeout(5):  # half of what a disk that hangs is given
        await closing


async def test_a_store_whose_memory_goes_away_leaves_nothing_behind(open_tier: OpenTier) -> None:
    tier = await open_tier(nbytes=64 * MIB)
    large = PageSpec(num_layers=2, num_kv_heads=8, head_dim=1024, page_size=64, dtype="uint8")
    assert large.page_nbytes > COPY_NBYTES
    data = content(1, large).data
    storing = asyncio.ensure_future(tier.store(page(1, spec=large), data))
    await asyncio.sleep(0)
    data.release()
    with pytest.raises(ValueError):
        await storing
    tier.check()
    assert tier.numbers()["ssd_stores_under_way"] == 0
    assert await put(tier, 1, spec=large)


async def test_the_loop_runs_on_while_the_disk_stands_still(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    disk.writes.clear()
    writing = asyncio.ensure_future(put(tier, 1))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not writing.done()
    disk.writes.set()
    assert await writing


async def test_stores_wait_for_their_turn_in_memory_and_none_is_lost_for_that(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.ssd.page_writer.BOUNCE_NBYTES", 2 * 40_960)  # two pages at a time
    tier = await open_tier()
    outcomes = await asyncio.gather(*(put(tier, number, spec=LARGE) for number in range(8)))
    assert outcomes == [True] * 8
    assert [await get(tier, number, spec=LARGE) for number in range(8)] == [True] * 8


async def test_a_store_that_waits_for_memory_ends_with_the_patience_for_the_disk(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.ssd.page_writer.BOUNCE_NBYTES", 4096)  # one page at a time
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, hung_s=0.1)
    disk.writes.clear()
    assert await asyncio.gather(put(tier, 1), put(tier, 2)) == [False, False]
    assert tier.numbers()["ssd_refused_busy"] == 1
    disk.writes.set()


async def test_a_store_that_is_given_up_while_it_waits_for_memory_leaves_nothing_behind(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.ssd.page_writer.BOUNCE_NBYTES", 4096)  # one page at a time
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    disk.writes.clear()
    first, second = (asyncio.ensure_future(put(tier, number)) for number in (1, 2))
    await asyncio.sleep(0)
    assert tier.numbers()["ssd_stores_under_way"] == 2
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert tier.numbers()["ssd_stores_under_way"] == 1
    disk.writes.set()
    assert await first
    assert await put(tier, 2)


async def test_a_spill_beyond_the_queue_is_refused_not_delayed(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    disk.writes.clear()
    waiting = [asyncio.ensure_future(put(tier, number)) for number in range(STORES_MAX)]
    await asyncio.sleep(0)
    assert not await put(tier, STORES_MAX)
    assert tier.numbers()["ssd_refused_busy"] == 1
    disk.writes.set()
    assert all(await asyncio.gather(*waiting))


async def test_writes_beyond_the_budget_are_refused(open_tier: OpenTier) -> None:
    tier = await open_tier(write_nbytes_per_s=1.0)  # the first page takes it for an hour
    outcomes = [await put(tier, number) for number in range(5)]
    assert outcomes == [True, False, False, False, False]
    assert tier.numbers()["ssd_refused_budget"] == 4


async def test_a_closed_tier_takes_and_gives_nothing(open_tier: OpenTier) -> None:
    tier = await open_tier()
    await put(tier, 1)
    await asyncio.gather(tier.close(), tier.close())
    assert not await put(tier, 2)
    assert not await get(tier, 1)
    tier.remove([key(1)])
