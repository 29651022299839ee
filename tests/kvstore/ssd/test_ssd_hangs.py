"""A disk that does not answer counts as failed: nobody waits, and nothing wrong comes late."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvstore.ssd import SsdRefused, SsdTier, page_reader
from tests.kvstore.faulty import until
from tests.kvstore.ssd.conftest import OpenTier
from tests.kvstore.ssd.disks import FaultyDisk
from tests.kvstore.ssd.ssd_pages import SMALL, get, key, put

HUNG_S = 0.05
LONG_S = 60.0  # of a hang that the test itself ends


async def works_again(tier: SsdTier) -> None:
    await until(lambda: tier.degraded is None)


async def test_a_read_that_hangs_is_a_miss_and_keeps_its_page(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, hung_s=HUNG_S)
    assert await put(tier, 1)
    num_reads = disk.num_reads
    disk.reads.clear()
    into = np.zeros(SMALL.page_nbytes, dtype=np.uint8)
    assert await tier.load(key(1), into.data) is None
    assert tier.degraded == f"a read did not end in {HUNG_S:g} s"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not await get(tier, 1), "a disk that hangs was asked again at once"
    assert disk.num_reads == num_reads + 1
    disk.reads.set()
    await works_again(tier)
    assert not into.any(), "memory of a load that had ended was written to"
    assert await get(tier, 1)


async def test_a_write_that_hangs_is_refused_and_does_not_appear_later(
    open_tier: OpenTier,
) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, hung_s=HUNG_S)
    disk.writes.clear()
    assert list(await asyncio.gather(put(tier, 1), put(tier, 1))) == [False, False]
    assert tier.degraded == f"a write did not end in {HUNG_S:g} s"
    assert not await put(tier, 2)
    assert disk.num_writes == 1
    disk.writes.set()
    await works_again(tier)
    assert tier.num_pages == 0
    assert await put(tier, 1)
    assert await get(tier, 1)


async def test_a_commit_of_the_index_that_hangs_degrades_until_it_ends(
    open_tier: OpenTier,
) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, hung_s=HUNG_S)
    disk.syncs.clear()
    assert await put(tier, 1)
    assert not await tier.flush()
    assert tier.degraded == f"index: a commit did not end in {HUNG_S:g} s"
    assert not await put(tier, 2)
    assert await get(tier, 1)
    disk.syncs.set()
    await works_again(tier)
    assert await put(tier, 2)


@pytest.mark.parametrize("call", ["reads", "writes", "syncs"])
async def test_closing_leaves_a_disk_that_hangs_behind_and_locked(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, hung_s=HUNG_S)
    assert await put(tier, 1)
    held = {"reads": disk.reads, "writes": disk.writes, "syncs": disk.syncs}[call]
    held.clear()
    moving = asyncio.gather(get(tier, 1), put(tier, 2))
    await asyncio.sleep(0)
    async with asyncio.timeout(LONG_S):
        await tier.close()
    await moving
    assert "the disk did not answer" in caplog.text
    with pytest.raises(SsdRefused, match="in use"):  # a thread may still write
        await open_tier()
    held.set()


async def test_loads_that_wait_for_memory_behind_a_hang_end_too(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_reader, "BOUNCE_NBYTES", 4 * 4096)  # two small pages at a time
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, hung_s=HUNG_S)
    assert all([await put(tier, number) for number in range(8)])
    num_reads = disk.num_reads
    disk.reads.clear()
    async with asyncio.timeout(LONG_S):
        assert await asyncio.gather(*(get(tier, number) for number in range(8))) == [False] * 8
    assert disk.num_reads == num_reads + 2
    disk.reads.set()
    await works_again(tier)
    assert all([await get(tier, number) for number in range(8)]), "nobody looked, yet one is gone"
