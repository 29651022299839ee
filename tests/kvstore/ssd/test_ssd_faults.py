"""What a tier does when its disk fails, lies or loses: nothing wrong is ever served."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from kvstore.ssd.opening import INDEX_NAME, PAGES_NAME
from tests.kvstore.ssd.conftest import MIB, OpenTier
from tests.kvstore.ssd.disks import FaultyDisk, flip_bytes
from tests.kvstore.ssd.ssd_pages import DEEP, LARGE, get, key, put

FIRST_SLOT = 4096
SLOT_NBYTES = 4096  # of a small page, header included


def dropped(numbers: dict[str, float]) -> dict[str, float]:
    return {name: n for name, n in numbers.items() if name.startswith("ssd_dropped")}


@pytest.mark.parametrize("seed", range(20))
async def test_a_flipped_bit_anywhere_in_a_slot_is_detected_or_harmless(
    open_tier: OpenTier, tmp_path: Path, seed: int
) -> None:
    tier = await open_tier()
    await put(tier, 1)
    flip_bytes(tmp_path / "tier" / PAGES_NAME, FIRST_SLOT, 256 + 512, random.Random(seed))
    assert not await get(tier, 1), "a flipped byte was served"
    assert sum(dropped(tier.numbers()).values()) == 1
    assert tier.num_pages == 0
    assert await put(tier, 1)
    assert await get(tier, 1)


@pytest.mark.parametrize("arrived", [0, 4096, 8192, 65536, 368_640])
async def test_a_torn_write_is_dropped(open_tier: OpenTier, arrived: int) -> None:
    disk = FaultyDisk()
    tier = await open_tier(nbytes=16 * MIB, disk=disk)
    disk.tear = arrived
    assert await put(tier, 1, spec=DEEP)
    disk.tear = None
    assert not await get(tier, 1, spec=DEEP)
    assert sum(dropped(tier.numbers()).values()) == 1


async def test_a_slot_that_holds_another_page_is_dropped(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = await open_tier()
    await put(tier, 1)
    await put(tier, 2)
    with (tmp_path / "tier" / PAGES_NAME).open("r+b") as file:
        file.seek(FIRST_SLOT)
        slot = file.read(SLOT_NBYTES)
        file.seek(FIRST_SLOT + SLOT_NBYTES)
        file.write(slot)
    assert await get(tier, 1)
    assert not await get(tier, 2)
    assert dropped(tier.numbers()) == {"ssd_dropped_misplaced": 1}


async def test_pages_behind_the_end_of_a_truncated_file_are_dropped(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = await open_tier()
    for number in range(4):
        await put(tier, number)
    with (tmp_path / "tier" / PAGES_NAME).open("r+b") as file:
        file.truncate(FIRST_SLOT + SLOT_NBYTES + 100)
    assert [await get(tier, number) for number in range(4)] == [True, False, False, False]
    assert dropped(tier.numbers()) == {"ssd_dropped_truncated": 3}
    await tier.close()
    tier = await open_tier()
    assert [p.record.key for p in tier.contents()] == [key(0)]


async def test_a_disk_that_loses_its_last_writes_loses_only_those(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk)
    for number in range(10):
        await put(tier, number)
    disk.forget = True
    for number in range(10, 20):
        assert await put(tier, number)
    await tier.close()
    tier = await open_tier()
    assert [await get(tier, number) for number in range(20)] == [True] * 10 + [False] * 10
    assert sum(dropped(tier.numbers()).values()) == 10


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENODEV])
@pytest.mark.parametrize("call", ["write_error", "reserve_error"])
async def test_a_disk_that_cannot_write_degrades_loudly_and_serves_what_it_has(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture, number: int, call: str
) -> None:
    disk = FaultyDisk()
    tier = await open_tier(nbytes=16 * MIB, disk=disk)
    await put(tier, 1)
    setattr(disk, call, number)
    with caplog.at_level(logging.ERROR):
        assert not await put(tier, 2, spec=LARGE)
        assert not await put(tier, 3, spec=LARGE)
    assert [record.levelname for record in caplog.records] == ["ERROR"], "one line, no more"
    assert tier.degraded is not None
    assert tier.numbers()["ssd_degraded"] == 1
    assert tier.numbers()["ssd_refused_degraded"] == 1
    assert await get(tier, 1)
    assert not await get(tier, 2, spec=LARGE)


async def test_a_disk_that_works_again_is_used_again(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, retry_s=1e-6)
    disk.write_error = errno.ENOSPC
    assert not await put(tier, 1)
    assert not await put(tier, 1), "the trial failed too"
    assert tier.degraded is not None
    disk.write_error = None
    assert await put(tier, 1)
    assert tier.degraded is None
    assert await get(tier, 1)


async def test_a_read_error_drops_the_page_and_many_end_reading(open_tier: OpenTier) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, read_errors_max=3)
    for number in range(6):
        await put(tier, number)
    disk.read_error = errno.EIO
    assert [await get(tier, number) for number in range(3)] == [False] * 3
    assert tier.degraded is not None
    reads = disk.num_reads
    disk.read_error = None
    assert not await get(tier, 4)
    assert disk.num_reads == reads, "a disk that failed was asked again at once"
    assert tier.num_pages == 3, "pages were dropped without being read"


async def test_an_index_that_cannot_be_written_degrades_and_catches_up(
    open_tier: OpenTier,
) -> None:
    disk = FaultyDisk()
    tier = await open_tier(disk=disk, retry_s=30.0)
    disk.sync_error = errno.EIO
    assert await put(tier, 1)
    assert not await tier.flush()
    assert tier.degraded is not None
    assert not await put(tier, 2)
    assert await get(tier, 1)
    disk.sync_error = None
    assert await tier.flush()
    assert tier.degraded is None
    await tier.close()
    tier = await open_tier()
    assert await get(tier, 1)


async def test_a_page_file_that_was_deleted_degrades(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = await open_tier()
    await put(tier, 1)
    (tmp_path / "tier" / PAGES_NAME).unlink()
    assert not await tier.flush()
    assert tier.degraded is not None
    assert "deleted" in tier.degraded
    assert await get(tier, 1), "what can be read is served"


async def test_a_corrupt_row_of_the_index_is_dropped_and_counted(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = await open_tier()
    for number in range(3):
        await put(tier, number)
    await tier.close()
    database = sqlite3.connect(tmp_path / "tier" / INDEX_NAME)
    header = database.execute("SELECT header FROM pages WHERE offset = 4096").fetchone()[0]
    flipped = header[:50] + bytes([header[50] ^ 1]) + header[51:]
    database.execute("UPDATE pages SET header = ? WHERE offset = 4096", (flipped,))
    database.execute("UPDATE pages SET header = 'text' WHERE offset = 8192")
    database.commit()
    database.close()
    tier = await open_tier()
    assert tier.numbers()["ssd_rows_dropped"] == 2
    assert [await get(tier, number) for number in range(3)] == [False, False, True]
    await tier.close()
    tier = await open_tier()
    assert tier.numbers()["ssd_rows_dropped"] == 0, "the row is gone for good"


async def test_a_damaged_index_is_made_anew_loudly(
    open_tier: OpenTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await open_tier()
    await put(tier, 1)
    await tier.close()
    (tmp_path / "tier" / INDEX_NAME).write_bytes(b"not a database" * 1000)
    with caplog.at_level(logging.ERROR):
        tier = await open_tier()
    assert any("damaged" in record.message for record in caplog.records)
    assert tier.num_pages == 0
    assert await put(tier, 1)
    assert await get(tier, 1)


@pytest.mark.parametrize("seed", range(12))
async def test_index_and_pages_of_different_moments_serve_nothing_wrong(
    open_tier: OpenTier, tmp_path: Path, seed: int
) -> None:
    """As after a power loss: either file may be the older one, whatever was in between."""
    rng = random.Random(seed)
    folder, moments = tmp_path / "tier", []
    tier = await open_tier(nbytes=MIB)
    here: list[int] = []
    for moment in range(4):
        for number in range(moment * 300, moment * 300 + 150):
            if not tier.has_room(512):
                gone = [here.pop(rng.randrange(len(here))) for _ in range(10)]
                tier.remove([key(n) for n in gone])
            if await put(tier, number):
                here.append(number)
        await tier.flush()
        moments.append(tmp_path / f"moment-{moment}")
        await asyncio.to_thread(shutil.copytree, folder, moments[-1])
    await tier.close()
    older, younger = rng.choice(moments), rng.choice(moments)
    shutil.copy(older / INDEX_NAME, folder / INDEX_NAME)
    shutil.copy(younger / PAGES_NAME, folder / PAGES_NAME)
    tier = await open_tier(nbytes=MIB)
    served = [number for number in range(1200) if await get(tier, number)]  # asserts the bytes
    lost = sum(dropped(tier.numbers()).values())
    assert len(served) == tier.num_pages
    assert served or older != younger
    assert older != younger or not lost
