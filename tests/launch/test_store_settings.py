"""What a store is told becomes its configuration, or is refused before anything runs."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path
from typing import get_args

import pytest

from kvstore.config import REPLICAS_MAX, StoreConfig
from kvstore.ssd import SsdConfig, SsdTier
from launch import process_env
from launch.config import Eviction, PageStoreOptions, StoreOptions, UpOptions
from launch.errors import ConfigError
from launch.main import main
from launch.sizes import human_size, in_units, parse_size
from launch.store_role import StoreRole
from launch.store_settings import (
    check_stores,
    make_ssd_directory,
    parse_quotas,
    parse_ssd,
    ssd_config,
    ssd_of,
    store_config,
)

BIND = "tcp://127.0.0.1:0"
A, B = "a" * 64, "b" * 64


def options(**told: object) -> StoreOptions:
    return StoreOptions.of(join="tcp://127.0.0.1:9", transfer="loopback", **told)


def test_everything_told_arrives() -> None:
    told = options(
        segment="64MiB",
        policy="slru",
        replicas=3,
        quota=(f"{A}=0.25", f"{B}=0.5"),
        high_watermark=0.8,
        low_watermark=0.6,
    )
    assert store_config(told, BIND) == StoreConfig(
        segment_nbytes=64 << 20,
        bind=BIND,
        eviction="slru",
        replicas=3,
        quotas={A: 0.25, B: 0.5},
        high_watermark=0.8,
        low_watermark=0.6,
    )


def test_the_defaults_of_the_options_are_those_of_the_config() -> None:
    assert store_config(options(), BIND) == StoreConfig(segment_nbytes=1 << 30, bind=BIND)


def test_the_options_know_every_policy_and_number_of_replicas_of_the_store() -> None:
    fields = StoreConfig.model_fields
    assert get_args(Eviction) == get_args(fields["eviction"].annotation)
    assert options(replicas=REPLICAS_MAX).replicas == REPLICAS_MAX
    with pytest.raises(ConfigError, match="--replicas 9"):
        options(replicas=REPLICAS_MAX + 1)


def test_quotas_may_be_everything_and_not_more() -> None:
    tenths = [f"{number:064x}=0.1" for number in range(10)]
    assert sum(parse_quotas(tuple(tenths)).values()) == pytest.approx(1)
    with pytest.raises(ConfigError, match=r"together are 1\.01 of the memory: give at most 1"):
        parse_quotas((*tenths, f"{A}=0.01"))


@pytest.mark.parametrize("text", ["", A, f"{A}=", f"{A}=0", f"{A}=-1", "=0.5", f"{'A' * 64}=0.5"])
def test_what_is_no_quota_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--quota .*NAMESPACE=FRACTION"):
        parse_quotas((text,))


def test_a_path_may_have_colons_and_a_size_any_unit() -> None:
    assert parse_ssd("/mnt/a:b:1.5GiB") == (Path("/mnt/a:b"), 3 << 29)
    assert parse_ssd("x:2TiB") == (Path("x"), 2 << 40)
    assert parse_size("1PiB", "--ssd") == 1 << 50
    assert human_size(3 << 40) == "3.0 TiB"
    assert ssd_config("/mnt/nvme/x:64GiB") == SsdConfig(path=Path("/mnt/nvme/x"), nbytes=64 << 30)


def test_each_store_of_up_has_a_directory_of_its_own() -> None:
    assert ssd_of("/mnt/x:1GiB", "store-2") == "/mnt/x/store-2:1GiB"
    assert ssd_of("/mnt/x/:1GiB", "store-2") == "/mnt/x/store-2:1GiB"
    assert ssd_of(None, "store-2") is None


def up(tmp_path: Path, ssd: str, **told: object) -> UpOptions:
    return UpOptions.of(model="fake", segment="1MiB", ssd=f"{tmp_path}/{ssd}", **told)


def test_the_directory_of_all_stores_is_made_before_they_start(tmp_path: Path) -> None:
    told = up(tmp_path, "tier:1MiB")
    check_stores(told, 2)
    assert list(tmp_path.iterdir()) == [], "a check makes nothing: more may be refused"
    make_ssd_directory(told)
    assert (tmp_path / "tier").is_dir()
    check_stores(told, 2)
    make_ssd_directory(told)


def test_a_start_that_is_refused_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(process_env, "apply", lambda **_: 1)  # torch is loaded here
    tier = tmp_path / "tier"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        for wrong in (
            ("--ssd", f"{tier}:100TiB"),
            ("--ssd", f"{tier}:1MiB", "--kv-memory", "much"),
            ("--ssd", f"{tier}:1MiB", "--gpus", "0,,1"),
            ("--ssd", f"{tier}:1MiB", "--port", port),
            ("--ssd", f"{tier}:1MiB", "--port", port, "--transfer", "loopback"),
        ):
            assert main(["up", "--model", "fake", "--segment", "1MiB", *wrong]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert wrong[-1] in line or wrong[-3] in line
            assert not tier.exists(), wrong


def test_where_no_files_are_kept_is_no_place_for_an_ssd(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ssd /proc/x:1GiB: /proc keeps no files: give a dir"):
        check_stores(UpOptions.of(model="fake", ssd="/proc/x:1GiB"), 1)
    with pytest.raises(ConfigError, match=r"tier:900TiB: the disk has room for .* smaller size"):
        check_stores(up(tmp_path, "tier:900TiB"), 1)


def test_a_directory_that_cannot_be_made_after_all_is_refused(tmp_path: Path) -> None:
    told = up(tmp_path, "tier:1MiB")
    check_stores(told, 1)
    (tmp_path / "tier").touch()
    with pytest.raises(ConfigError, match=r"--ssd .*: File exists: give a directory"):
        make_ssd_directory(told)


def test_without_stores_nothing_is_checked(tmp_path: Path) -> None:
    check_stores(up(tmp_path, "none/tier:1MiB", replicas=8), 0)
    assert list(tmp_path.iterdir()) == []


def test_the_disk_must_have_room_for_all_stores_together(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    half = stat.f_bavail * stat.f_frsize * 2 // 3
    with pytest.raises(ConfigError, match=r"times 2 stores: the disk has room for .* smaller size"):
        check_stores(up(tmp_path, f"tier:{half}"), 2)


def test_a_file_is_no_directory_for_stores(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--ssd .*: File exists: give a directory"):
        check_stores(up(tmp_path, "file:1MiB"), 1)
    with pytest.raises(ConfigError, match=r"--ssd .*: Not a directory: give a directory"):
        check_stores(up(tmp_path, "file/tier:1MiB"), 1)


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="that this user can write to"):
        check_stores(up(tmp_path, "tier:1MiB"), 1)


async def refusal(ssd: str) -> str:
    """How a store that is told ``ssd`` ends, before it asks any registry."""
    role = StoreRole(options(segment="1MiB", ssd=ssd))
    try:
        with pytest.raises(ConfigError) as caught:
            await role.start()
    finally:
        await role.close()
    assert str(caught.value).startswith(f"--ssd {ssd}: ")
    return str(caught.value)


async def test_a_disk_that_cannot_be_used_ends_the_store_before_it_joins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "not a directory; give one" in await refusal(f"{tmp_path}/file:4MiB")
    assert "does not exist; make it" in await refusal(f"{tmp_path}/a/b:4MiB")
    no_room = await refusal(f"{tmp_path}/x:900TiB")
    assert "give a smaller size" in no_room
    assert re.search(r"has room for [\d.]+ [MGT]iB;", no_room), "in units, not in bytes"
    assert "nbytes" not in no_room


async def test_a_directory_in_use_and_one_that_holds_something_else_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tier"
    tier = await SsdTier.open(SsdConfig(path=path, nbytes=4 << 20))
    assert f"in use by process {os.getpid()}" in await refusal(f"{path}:4MiB")
    await tier.close()
    (path / "pages.kvferry").write_bytes(b"my diary" * 1000)
    message = await refusal(f"{path}:4MiB")
    assert "pages.kvferry" in message


async def test_a_directory_that_this_user_may_not_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert "cannot be written to; give this user the right" in await refusal(f"{tmp_path}/t:4MiB")


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("nbytes=1024: needs at least 1048576 bytes (1MiB)", "needs at least 1.0 MiB (1MiB)"),
        ("slabs of 67108864 bytes; give more", "slabs of 64.0 MiB; give more"),
        ("/x is in use by process 1234", "/x is in use by process 1234"),
    ],
)
def test_what_a_package_says_in_bytes_is_told_in_units(said: str, heard: str) -> None:
    assert in_units(said) == heard


def test_a_store_that_never_started_can_be_stopped() -> None:
    async def stop() -> None:
        role = StoreRole(options(segment="1MiB"))
        await role.drain(1.0)
        await role.close()
        role.abort()

    asyncio.run(stop())


def test_options_of_stores_survive_the_way_through_a_command_line() -> None:
    told = PageStoreOptions.of(quota=(f"{A}=0.25", f"{B}=0.5"), ssd="/x:1GiB", low_watermark=0.5)
    assert told.argv() == [
        *("--ssd", "/x:1GiB", "--quota", f"{A}=0.25", "--quota", f"{B}=0.5"),
        *("--low-watermark", "0.5"),
    ]
