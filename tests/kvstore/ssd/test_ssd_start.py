"""What a tier refuses at start, naming the value and the remedy."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvstore.ssd import SsdConfig, SsdRefused, SsdTier
from kvstore.ssd.config import BLOCK_NBYTES, SSD_NBYTES_MIN
from kvstore.ssd.opening import INDEX_NAME, LOCK_NAME, PAGES_NAME
from kvstore.ssd.superblock import FORMAT_VERSION, MAGIC
from tests.kvstore.ssd.conftest import MIB, OpenTier
from tests.kvstore.ssd.disks import FaultyDisk
from tests.kvstore.ssd.ssd_pages import get, put


@pytest.mark.parametrize("nbytes", [0, -5, SSD_NBYTES_MIN - 1, 1 << 60])
def test_a_senseless_size_is_refused(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ValidationError, match=f"nbytes={nbytes}.*give a"):
        SsdConfig(path=tmp_path, nbytes=nbytes)


@pytest.mark.parametrize("path", ["", "/", "."])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match=r"path=.*for example"):
        SsdConfig(path=Path(path), nbytes=MIB)


async def refusal(path: Path, nbytes: int = MIB, disk: FaultyDisk | None = None) -> str:
    with pytest.raises(SsdRefused) as caught:
        await SsdTier.open(SsdConfig(path=path, nbytes=nbytes), disk=disk)
    return str(caught.value)


async def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    said = await refusal(tmp_path / "tier", nbytes=1 << 49)
    assert str(1 << 49) in said
    assert "smaller size" in said
    assert not (tmp_path / "tier").exists()
    (tmp_path / "tier").mkdir()
    await refusal(tmp_path / "tier", nbytes=1 << 49)
    assert not list((tmp_path / "tier").iterdir())


async def test_nobody_else_can_read_the_files_of_a_tier(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    old = os.umask(0o022)
    try:
        tier = await open_tier()
        assert modes(tmp_path / "tier") == {0o600}
        await tier.close()
        (tmp_path / "tier" / INDEX_NAME).chmod(0o644)  # as earlier versions made it
        tier = await open_tier()
        await put(tier, 1)
        assert (tmp_path / "tier" / f"{INDEX_NAME}-wal").exists()
        assert modes(tmp_path / "tier") == {0o600}
        await tier.close()
    finally:
        os.umask(old)


def modes(folder: Path) -> set[int]:
    return {file.stat().st_mode & 0o777 for file in folder.iterdir()}


async def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    said = await refusal(tmp_path / "missing" / "tier")
    assert str(tmp_path / "missing") in said
    assert "mount" in said


async def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("mine")
    assert "is not a directory" in await refusal(tmp_path / "tier")
    assert (tmp_path / "tier").read_text() == "mine"
    assert "cannot be made" in await refusal(tmp_path / "tier" / "below")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
async def test_files_that_cannot_be_opened_are_refused(tmp_path: Path, number: int) -> None:
    disk = FaultyDisk()
    disk.open_error = number
    said = await refusal(tmp_path / "tier", disk=disk)
    assert os.strerror(number) in said
    assert "can write to" in said
    tier = await SsdTier.open(SsdConfig(path=tmp_path / "tier", nbytes=MIB))
    await tier.close()  # and nothing stayed locked


async def test_a_directory_without_the_right_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert "give this user the right" in await refusal(tmp_path / "tier")


async def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    foreign = tmp_path / "tier" / PAGES_NAME
    foreign.write_bytes(b"my thesis")
    said = await refusal(tmp_path / "tier")
    assert "is not a kvferry page file" in said
    assert foreign.read_bytes() == b"my thesis"


async def test_a_newer_format_is_refused_with_both_versions(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    await (await open_tier()).close()
    pages = tmp_path / "tier" / PAGES_NAME
    with pages.open("r+b") as file:
        file.write(MAGIC + (FORMAT_VERSION + 1).to_bytes(4, "little"))
    said = await refusal(tmp_path / "tier")
    assert f"format {FORMAT_VERSION + 1}" in said
    assert f"format {FORMAT_VERSION};" in said
    assert "delete" in said


async def test_a_damaged_first_block_is_refused(open_tier: OpenTier, tmp_path: Path) -> None:
    await (await open_tier()).close()
    with (tmp_path / "tier" / PAGES_NAME).open("r+b") as file:
        file.seek(20)
        file.write(b"\xff\xff")
    assert "damaged" in await refusal(tmp_path / "tier")


async def test_the_index_of_another_tier_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        await (await SsdTier.open(SsdConfig(path=tmp_path / name, nbytes=MIB))).close()
    (tmp_path / "one" / INDEX_NAME).replace(tmp_path / "two" / INDEX_NAME)
    assert "belongs to another page file" in await refusal(tmp_path / "two")


async def test_a_lost_index_starts_empty(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = await open_tier()
    await put(tier, 1)
    await tier.close()
    (tmp_path / "tier" / INDEX_NAME).unlink()
    tier = await open_tier()
    assert tier.num_pages == 0
    assert await put(tier, 1)


async def test_a_lost_index_uses_no_generation_again(open_tier: OpenTier, tmp_path: Path) -> None:
    """Else what an earlier life wrote there would verify where a write was lost."""

    def generation() -> int:
        with (tmp_path / "tier" / PAGES_NAME).open("rb") as file:
            file.seek(BLOCK_NBYTES + 40)
            return int.from_bytes(file.read(8), "little")

    used = set()
    for _ in range(3):
        tier = await open_tier()
        assert await put(tier, 1)
        used.add(generation())
        await tier.close()
        (tmp_path / "tier" / INDEX_NAME).unlink()
    assert len(used) == 3


async def test_a_second_opener_is_told_who_has_the_tier(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    await open_tier()
    said = await refusal(tmp_path / "tier")
    assert f"in use by process {os.getpid()}" in said


@pytest.mark.net
async def test_another_process_is_refused_and_may_open_when_the_first_has_closed(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from kvstore.ssd import SsdConfig, SsdRefused, SsdTier\n"
        "async def main():\n"
        "    try:\n"
        f"        config = SsdConfig(path=Path(sys.argv[1]), nbytes={4 * MIB})\n"
        "        await (await SsdTier.open(config)).close()\n"
        "    except SsdRefused as refused:\n"
        "        print(refused)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "tier")]

    async def said() -> str:
        run = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True, timeout=60
        )
        return run.stdout

    tier = await open_tier()
    assert f"in use by process {os.getpid()}" in await said()
    await tier.close()
    assert await said() == ""
    assert (tmp_path / "tier" / LOCK_NAME).exists()


async def test_a_larger_size_keeps_all_pages_and_a_smaller_one_those_that_fit(
    open_tier: OpenTier,
) -> None:
    tier = await open_tier(nbytes=MIB)
    num = 0
    while tier.has_room(512):
        await put(tier, num)
        num += 1
    await tier.close()
    tier = await open_tier(nbytes=2 * MIB)
    assert tier.num_pages == num
    assert tier.has_room(512)
    await tier.close()
    tier = await open_tier(nbytes=MIB + MIB // 2)
    assert all([await get(tier, number) for number in range(num)])
    await tier.close()
    tier = await open_tier(nbytes=MIB)
    assert tier.num_pages == num
