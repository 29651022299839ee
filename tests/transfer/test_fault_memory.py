"""What fault injection does to ranges and bytes, without a transport."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.bulk_harness import pattern
from tests.transfer.device_fakes import FakeDevice
from transfer.errors import RegionRevoked
from transfer.fault_memory import cut, flip_local, flipped_source
from transfer.fault_schedule import Flip
from transfer.interface import Range
from transfer.ranges import merge, total_nbytes
from transfer.region import DeviceRegion, RegionTable

RANGES = [Range(100, 500, 10), Range(200, 50, 1), Range(300, 0, 20)]
FLIPS = [Flip(0, 1), Flip(9, 255), Flip(10, 2), Flip(30, 128)]
PLACES = [500, 509, 50, 19]  # the same, in local memory
REMOTE = [100, 109, 200, 319]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_a_cut_keeps_every_byte_in_its_place(sizes: list[int], data: st.DataObject) -> None:
    ranges = [Range(100 * i, 1000 - 100 * i, size) for i, size in enumerate(sizes)]
    at_nbytes = data.draw(st.integers(0, sum(sizes) - 1))
    head, tail = cut(ranges, at_nbytes)
    assert total_nbytes(head) == at_nbytes
    assert all(r.nbytes > 0 for r in head + tail)
    assert merge(head + tail) == ranges


def test_flips_hit_their_bytes_of_host_memory() -> None:
    data = bytearray(600)
    region = RegionTable(lambda *_: b"").register_host(memoryview(data))
    flip_local(region, RANGES, FLIPS)
    assert {place: byte for place, byte in enumerate(data) if byte} == dict(
        zip(PLACES, [1, 255, 2, 128], strict=True)
    )


def test_flips_hit_their_bytes_of_device_memory() -> None:
    memory = FakeDevice().memory(bytes(600))
    region = RegionTable(lambda *_: b"").register(memory)
    assert isinstance(region, DeviceRegion)
    flip_local(region, RANGES, FLIPS)
    assert {place: byte for place, byte in enumerate(memory.data) if byte} == dict(
        zip(PLACES, [1, 255, 2, 128], strict=True)
    )


def test_what_is_written_over_the_right_bytes_comes_from_a_source_that_stays() -> None:
    table = RegionTable(lambda *_: b"")
    original = pattern(600).tobytes()
    memory = FakeDevice().memory(original)
    for region in (table.register(memory), table.register_host(memoryview(bytearray(original)))):
        flipped, ranges = flipped_source(region, RANGES, FLIPS)
        written = {
            r.remote_offset + i: flipped[r.local_offset + i]
            for r in ranges
            for i in range(r.nbytes)
        }
        assert written == {
            remote: original[local] ^ flip.mask
            for remote, local, flip in zip(REMOTE, PLACES, FLIPS, strict=True)
        }
    assert memory.data == original


def test_bytes_that_follow_each_other_are_written_by_one_range() -> None:
    region = RegionTable(lambda *_: b"").register_host(memoryview(bytearray(64)))
    _, ranges = flipped_source(region, [Range(0, 0, 64)], [Flip(i, 1) for i in range(64)])
    assert ranges == [Range(0, 0, 64)]


def test_memory_of_a_revoked_region_is_neither_flipped_nor_read() -> None:
    data = bytearray(600)
    region = RegionTable(lambda *_: b"").register_host(memoryview(data))
    region.revoke()
    for touch in (flip_local, flipped_source):
        with pytest.raises(RegionRevoked):
            touch(region, RANGES, FLIPS)
    assert not any(data)
