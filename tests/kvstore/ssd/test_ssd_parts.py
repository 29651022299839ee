"""The pure parts, each against a naive model."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.page import PageSpec
from kvstore.ssd.bounce import BouncePool
from kvstore.ssd.config import BLOCK_NBYTES, SsdRefused
from kvstore.ssd.header import (
    HEADER_NBYTES_MAX,
    SlotHeader,
    header_at,
    header_nbytes_of,
    pack_header,
    parse_header,
    slot_nbytes_of,
)
from kvstore.ssd.health import DiskHealth
from kvstore.ssd.heat_heap import HeatHeap
from kvstore.ssd.page_file import LocalDisk
from kvstore.ssd.page_writer import WriteBudget
from kvstore.ssd.slabs import Slabs
from kvstore.ssd.superblock import Superblock, parse_superblock, slab_nbytes_for
from tests.kvstore.ssd.ssd_pages import SMALL, page


@pytest.mark.parametrize("seed", range(20))
def test_the_heat_heap_agrees_with_a_sorted_list(seed: int) -> None:
    rng, heap = random.Random(seed), HeatHeap()
    rows = {row: float(rng.randrange(5)) for row in rng.sample(range(100), 30)}
    order = sorted(rows, key=rows.__getitem__)
    heap.fill(np.array(order), np.array([rows[row] for row in order]))
    for _ in range(400):
        row = rng.randrange(100)
        if row in rows:
            assert row in heap
            heap.remove(row)
            del rows[row]
        else:
            assert row not in heap
            rows[row] = float(rng.randrange(20))
            heap.push(row, rows[row])
        heap.check()
        assert len(heap) == len(rows)
        assert not rows or rows[heap.coldest_row()] == min(rows.values())


@pytest.mark.parametrize("seed", range(20))
def test_slots_never_overlap_and_all_room_comes_back(seed: int) -> None:
    rng, slabs = random.Random(seed), Slabs(6, 64 * BLOCK_NBYTES)
    held: dict[int, int] = {}
    for row in range(500):
        nbytes = rng.choice([1, 3, 16, 64]) * BLOCK_NBYTES
        if held and rng.random() < 0.45:
            offset = rng.choice(list(held))
            slabs.free(offset)
            del held[offset]
        else:
            room = slabs.has_room(nbytes)
            offset_or_none = slabs.allocate(nbytes, row)
            assert room == (offset_or_none is not None)
            if offset_or_none is not None:
                held[offset_or_none] = nbytes
        slabs.check()
        ends = sorted((offset, offset + nbytes) for offset, nbytes in held.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        assert not ends or ends[-1][1] <= BLOCK_NBYTES + 6 * 64 * BLOCK_NBYTES
    for offset in held:
        slabs.free(offset)
    slabs.check()
    assert all(slabs.allocate(64 * BLOCK_NBYTES, row) is not None for row in range(6))
    assert slabs.allocate(64 * BLOCK_NBYTES, 6) is None


def test_a_page_larger_than_a_slab_has_no_slot() -> None:
    slabs = Slabs(4, 16 * BLOCK_NBYTES)
    assert not slabs.has_room(17 * BLOCK_NBYTES)
    assert slabs.allocate(17 * BLOCK_NBYTES, 0) is None


def test_slots_found_that_overlap_are_settled_by_the_youngest() -> None:
    slabs = Slabs(3, 12 * BLOCK_NBYTES)
    small, large, first, second = BLOCK_NBYTES, 4 * BLOCK_NBYTES, BLOCK_NBYTES, 13 * BLOCK_NBYTES
    found = [  # oldest first: offset, slot size, does it stay
        (first, small, False),
        (second + large, large, True),
        (first + 2 * small, small, False),
        (first + large, large, True),
        (second + 2 * large, large, True),
        (first + small, large, False),  # not where a slot begins; it serves large ones all the same
        (slabs.offset_of(3), small, False),  # behind the last slab
        (0, small, False),  # the first block
    ]
    columns = np.array([row[:2] for row in found], dtype=np.int64).T
    fits = slabs.fitting(columns[0].copy(), columns[1].copy())
    assert fits.tolist() == [stays for _, _, stays in found]
    slabs.restore(columns[0][fits], columns[1][fits])
    slabs.check()
    held = [slabs.allocate(large, row) for row in range(3, 9)]
    assert sorted(offset for offset in held if offset is not None) == [
        first,
        first + 2 * large,
        second,
        *(slabs.offset_of(2) + n * large for n in range(3)),
    ]
    assert slabs.allocate(large, 9) is None


def header(number: int = 1) -> SlotHeader:
    return SlotHeader(page(number, num_tokens=3, heat=2.5), b"u" * 16, 4096, 1 << 45)


def test_a_header_says_what_was_packed() -> None:
    packed = pack_header(header())
    assert len(packed) == header_nbytes_of(SMALL)
    assert header_at(memoryview(packed + bytes(1000))) == packed
    assert parse_header(packed, {}) == header()


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    packed = pack_header(header())
    for at in range(len(packed)):
        for bit in range(8):
            flipped = packed[:at] + bytes([packed[at] ^ 1 << bit]) + packed[at + 1 :]
            assert header_at(memoryview(flipped)) is None, (at, bit)


def test_a_header_cut_anywhere_is_none() -> None:
    packed = pack_header(header())
    assert all(header_at(memoryview(packed[:n])) is None for n in range(len(packed)))


@pytest.mark.parametrize("page_size", [1, 16, 1024])
def test_the_longest_header_fits(page_size: int) -> None:
    spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=1, page_size=page_size)
    assert header_nbytes_of(spec) <= HEADER_NBYTES_MAX
    assert slot_nbytes_of(spec) % BLOCK_NBYTES == 0
    assert slot_nbytes_of(spec) >= header_nbytes_of(spec) + spec.page_nbytes


def test_every_flipped_byte_of_the_superblock_is_refused() -> None:
    block = Superblock(b"i" * 16, slab_nbytes_for(1 << 30)).pack()
    assert parse_superblock(block, "it").uuid == b"i" * 16
    for at in (*range(12), *range(16, 56)):
        with pytest.raises(SsdRefused):
            parse_superblock(block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :], "it")
    with pytest.raises(SsdRefused):
        parse_superblock(block[:100], "it")


def test_the_budget_holds_on_average_and_lets_a_large_page_through() -> None:
    budget = WriteBudget(100.0, 0.0)
    assert budget.spend(60, 0.0)
    assert not budget.spend(60, 0.0)
    assert budget.spend(60, 0.2)
    assert budget.spend(1000, 10.0)
    assert not budget.spend(1, 10.0 + 8.0), "the large page is paid for"
    assert budget.spend(1, 10.0 + 10.0)
    assert WriteBudget(None, 0.0).spend(1 << 60, 0.0)


def test_a_failed_disk_gets_one_trial_each_retry() -> None:
    health = DiskHealth(retry_s=10.0, read_errors_max=2)
    health.write_failed("full", 0.0)
    health.write_failed("full", 1.0)
    assert health.degraded == "full"
    assert not health.may_write(10.0)
    assert health.may_write(11.0)
    assert not health.may_write(11.5), "a second trial at once"
    health.wrote()
    assert health.degraded is None
    assert health.may_write(11.6)


def test_reads_end_after_several_errors_in_a_row_only() -> None:
    health = DiskHealth(retry_s=10.0, read_errors_max=2)
    health.read_failed("io", 0.0)
    health.read()
    health.read_failed("io", 0.0)
    assert health.degraded is None
    health.read_failed("io", 0.0)
    assert health.degraded == "io"
    assert not health.may_read(1.0)
    assert not health.may_write(1.0)
    assert health.may_read(10.0)
    health.read()
    assert health.may_write(10.0)


def test_one_read_that_hangs_ends_reading() -> None:
    health = DiskHealth(retry_s=10.0, read_errors_max=8)
    health.read_hung("no answer", 0.0)
    assert health.degraded == "no answer"
    assert not health.may_read(9.0)


async def test_bounce_memory_is_bounded_and_given_in_turn() -> None:
    pool = BouncePool(3 * 4096)
    held = [pool.take_now(4096) for _ in range(3)]
    assert pool.take_now(4096) is None
    first, second = (asyncio.ensure_future(pool.take(n * 4096)) for n in (2, 1))
    await asyncio.sleep(0)
    for buffer in held[:2]:
        assert buffer is not None
        pool.give(buffer)
    await asyncio.sleep(0)
    assert first.done()
    assert not second.done()
    assert pool.take_now(4096) is None, "others wait"
    pool.give(await first)
    pool.give(await second)
    assert pool.num_out == 1


async def test_a_cancelled_waiter_for_bounce_memory_takes_none() -> None:
    pool = BouncePool(4096)
    held = pool.take_now(4096)
    assert held is not None
    waiters = [asyncio.ensure_future(pool.take(4096)) for _ in range(2)]
    await asyncio.sleep(0)
    pool.give(held)  # to the first
    waiters[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]
    pool.give(await waiters[1])
    assert pool.num_out == 0


def test_one_buffer_is_there_whatever_its_size() -> None:
    pool = BouncePool(4096)
    large = pool.take_now(1 << 20)
    assert large is not None
    assert pool.take_now(4096) is None
    pool.give(large)
    assert pool.take_now(4096) is not None


def test_where_direct_io_is_refused_pages_go_through_the_cache_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def refuses(path: object, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **options)  # type: ignore[arg-type]

    (tmp_path / "file").write_bytes(bytes(BLOCK_NBYTES))
    monkeypatch.setattr(os, "open", refuses)
    file = LocalDisk().open(tmp_path / "file", 8 * BLOCK_NBYTES)
    assert not file.is_direct
    assert "refuses direct I/O" in caplog.text
    file.write(4096, memoryview(b"x" * 4096))
    into = bytearray(4096)
    assert file.read(4096, memoryview(into)) == 4096
    assert into == b"x" * 4096
    file.sync()
    file.close()
