"""The parts of the Mooncake back end that need no Mooncake."""

from __future__ import annotations

import asyncio
import importlib

import msgspec
import pytest

from kvstore.checksum import checksum_of
from kvstore.mooncake import MooncakeConfig, MooncakeUnavailable, record
from kvstore.mooncake.appearances import Appearances
from kvstore.mooncake.binding import HUNG_S, NOT_FOUND, TRANSFER_FAILED, Library
from kvstore.mooncake.config import ABANDONED_SLABS_MAX
from kvstore.mooncake.slabs import ObjectLayout, SlabPool
from kvstore.page import PAGE_SIZE_MAX, PageKey, PageSpec
from kvstore.store import PageRecord
from tests.kvstore.pages import SPEC, bytes_of, sequence
from transfer.interface import deadline_after

PAGE = sequence(range(4))[0]
RECORD = PageRecord(
    key=PAGE.key,
    parent=PAGE.parent,
    depth=PAGE.depth,
    tokens=PAGE.tokens,
    checksum=checksum_of(SPEC, bytes_of(PAGE).data, 4),
    page_nbytes=SPEC.page_nbytes,
)


def header_of(stated: PageRecord, spec: PageSpec = SPEC) -> bytearray:
    header = bytearray(record.header_nbytes(spec))
    record.encode(stated, memoryview(header))
    return header


# ---- addresses


def test_an_address_says_where_the_master_is_and_how_to_use_it() -> None:
    url = "mooncake://[::1]:50051?segment=2GiB&protocol=rdma&devices=mlx5_0&replicas=2"
    config = MooncakeConfig.of_url(url, host="10.0.0.1")
    assert (config.master, config.host) == ("[::1]:50051", "10.0.0.1")
    assert (config.segment_nbytes, config.protocol, config.devices) == (2 << 30, "rdma", "mlx5_0")
    assert config.replicas == 2
    assert MooncakeConfig.of_url("mooncake://master:1").segment_nbytes == 0


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://host",
        "mooncake://host:0",
        "mooncake://host:99999",
        "mooncake://host:1/path",
        "mooncake://host:1?segmnt=1GiB",
        "mooncake://host:1?segment=lots",
        "mooncake://host:1?replicas=0",
        "tcp://host:1",
    ],
)
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        MooncakeConfig.of_url(url)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MooncakeUnavailable, match="pip install mooncake-transfer-engine-non-cuda"):
        Library()


def test_a_missing_system_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MooncakeUnavailable, match=r"libibverbs\.so\.1.*librdmacm1"):
        Library()


# ---- objects


def test_a_record_comes_back_from_its_header() -> None:
    assert record.decode(memoryview(header_of(RECORD))) == RECORD


def test_no_flipped_bit_of_a_record_goes_unseen() -> None:
    header = header_of(RECORD)
    used = len(bytes(header).rstrip(b"\0"))
    for at in range(used):
        header[at] ^= 0x10
        assert record.decode(memoryview(header)) != RECORD
        header[at] ^= 0x10


def test_the_largest_record_fits() -> None:
    spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=1, page_size=PAGE_SIZE_MAX)
    large = msgspec.structs.replace(
        RECORD, tokens=b"\xff" * 4 * PAGE_SIZE_MAX, depth=1 << 40, page_nbytes=1 << 40
    )
    assert record.decode(memoryview(header_of(large, spec))) == large


def test_only_a_sound_page_under_its_own_key_is_intact() -> None:
    page = memoryview(bytes_of(PAGE).data)
    assert record.is_intact(RECORD, PAGE.key, SPEC, page)
    assert not record.is_intact(RECORD, PageKey(b"x" * 32), SPEC, page)
    for change in ({"page_nbytes": 1}, {"tokens": b""}, {"checksum": b"x" * 16}):
        assert not record.is_intact(msgspec.structs.replace(RECORD, **change), PAGE.key, SPEC, page)


# ---- slabs


async def test_slabs_are_bounded_and_used_again() -> None:
    pool = SlabPool(ObjectLayout(SPEC), 2)
    one, two = await pool.take(deadline_after(1)), await pool.take(deadline_after(1))
    assert one is not None
    assert two is not None
    assert await pool.take(deadline_after(0.01)) is None
    pool.settle(one, [NOT_FOUND, 100], took_s=1000)
    assert await pool.take(deadline_after(1)) is one


async def test_the_memory_of_a_read_that_hung_is_used_no_more() -> None:
    pool = SlabPool(ObjectLayout(SPEC), 1)
    slab = await pool.take(deadline_after(1))
    assert slab is not None
    pool.settle(slab, [TRANSFER_FAILED], took_s=0.1)
    assert await pool.take(deadline_after(1)) is slab, "refused at once: nothing is under way"
    pool.settle(slab, [TRANSFER_FAILED], took_s=HUNG_S)
    other = await pool.take(deadline_after(1))
    assert other is not slab
    assert pool.num_abandoned == 1


async def test_no_more_than_so_much_memory_is_abandoned() -> None:
    pool = SlabPool(ObjectLayout(SPEC), 1)
    for _ in range(ABANDONED_SLABS_MAX + 3):
        slab = await pool.take(deadline_after(1))
        assert slab is not None
        pool.settle(slab, [TRANSFER_FAILED], took_s=HUNG_S)
    assert pool.num_abandoned == ABANDONED_SLABS_MAX


# ---- waiting


class Probe:
    """Counts the questions; ``there`` is what exists."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.asked: list[list[str]] = []
        self.changed = asyncio.Event()

    async def __call__(self, names: list[str]) -> list[bool]:
        self.asked.append(list(names))
        self.changed.set()
        return [name in self.there for name in names]


async def test_many_waits_ask_one_question() -> None:
    probe = Probe()
    appearances = Appearances(probe, poll_s=0.001, poll_max_s=0.01)
    waits = [
        asyncio.create_task(appearances.any_of([f"k{i}", "all"], deadline_s=deadline_after(30)))
        for i in range(50)
    ]
    await probe.changed.wait()
    assert sorted(probe.asked[0]) == sorted([*(f"k{i}" for i in range(50)), "all"])
    probe.there = {"k7"}
    assert await waits[7] == {"k7"}
    assert not any(wait.done() for i, wait in enumerate(waits) if i != 7)
    probe.there = {"all"}
    assert await asyncio.gather(*waits[:7]) == [{"all"}] * 7
    await asyncio.gather(*waits)
    num_asked = len(probe.asked)
    assert await appearances.any_of(["x"], deadline_s=deadline_after(-1)) == set()
    await appearances.close()
    assert len(probe.asked) <= num_asked + 1, "asks although nobody waits"


async def test_closing_ends_waits_and_none_begins_after_it() -> None:
    probe = Probe()
    appearances = Appearances(probe, poll_s=0.001, poll_max_s=0.001)
    wait = asyncio.create_task(appearances.any_of(["k"], deadline_s=deadline_after(3600)))
    await probe.changed.wait()
    async with asyncio.timeout(30):
        await appearances.close()
        assert await wait == set()
        assert await appearances.any_of(["k"], deadline_s=deadline_after(3600)) == set()


async def test_a_cancelled_wait_is_forgotten() -> None:
    probe = Probe()
    appearances = Appearances(probe, poll_s=0.001, poll_max_s=0.001)
    wait = asyncio.create_task(appearances.any_of(["k"], deadline_s=deadline_after(30)))
    await probe.changed.wait()
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    other = asyncio.create_task(appearances.any_of(["m"], deadline_s=deadline_after(30)))
    probe.there = {"m"}
    assert await other == {"m"}
    assert probe.asked[-1] == ["m"]
    await appearances.close()
