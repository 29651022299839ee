"""What fault injection does to bytes and ranges: cuts an operation in two, flips single bytes.

Knows no rules and no transports. Positions count the bytes of an operation in the order of its
ranges. Memory is touched inside of its region's gate: never once the region is revoked. That of a
device is reached through its copy engine, a handful of bytes at a time; it blocks for a moment,
which only an injected corruption pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transfer.device_memory import Run
from transfer.errors import RegionRevoked
from transfer.fault_schedule import Flip
from transfer.interface import Range
from transfer.ranges import merge
from transfer.region import DeviceRegion, RegisteredRegion


def cut(ranges: Sequence[Range], at_nbytes: int) -> tuple[list[Range], list[Range]]:
    """Return the first ``at_nbytes`` bytes, and the rest; both keep the order."""
    head: list[Range] = []
    tail: list[Range] = []
    left = at_nbytes
    for r in ranges:
        first = min(r.nbytes, left)
        left -= first
        if first:
            head.append(r._replace(nbytes=first))
        if first < r.nbytes:
            tail.append(Range(r.remote_offset + first, r.local_offset + first, r.nbytes - first))
    return head, tail


def flip_local(region: RegisteredRegion, ranges: Sequence[Range], flips: Sequence[Flip]) -> None:
    """Flip bytes of the local region.

    Raises:
        RegionRevoked: it was revoked meanwhile.
    """
    offsets = [place.local_offset for place in _places(ranges, flips)]
    with _inside(region):
        _poke(region, offsets, _flipped(_peek(region, offsets), flips))


def flipped_source(
    region: RegisteredRegion, ranges: Sequence[Range], flips: Sequence[Flip]
) -> tuple[bytearray, list[Range]]:
    """Return the bytes at ``flips``, flipped, and the ranges that write them over the right ones.

    The local offsets of these ranges are in the returned bytes; ``region`` is only read.

    Raises:
        RegionRevoked: it was revoked meanwhile.
    """
    places = list(_places(ranges, flips))
    with _inside(region):
        flipped = _flipped(_peek(region, [place.local_offset for place in places]), flips)
    single = [Range(place.remote_offset, i, 1) for i, place in enumerate(places)]
    return flipped, merge(single)


@contextmanager
def _inside(region: RegisteredRegion) -> Iterator[None]:
    if not region.gate.enter():
        raise RegionRevoked("the local region was revoked")
    try:
        yield
    finally:
        region.gate.leave()


def _places(ranges: Sequence[Range], flips: Sequence[Flip]) -> Iterator[Range]:
    """Yield where each flip is on both sides; positions ascend, so one walk finds all."""
    rest = iter(ranges)
    current, begin = next(rest), 0
    for position, _ in flips:
        while position >= begin + current.nbytes:
            begin += current.nbytes
            current = next(rest)
        skip = position - begin
        yield Range(current.remote_offset + skip, current.local_offset + skip, 1)


def _flipped(data: bytearray, flips: Sequence[Flip]) -> bytearray:
    return bytearray(byte ^ flip.mask for byte, flip in zip(data, flips, strict=True))


def _peek(region: RegisteredRegion, offsets: Sequence[int]) -> bytearray:
    if not isinstance(region, DeviceRegion):
        return bytearray(region.view[offset] for offset in offsets)
    engine = region.memory.open_copy_engine()
    pinned = engine.pin(len(offsets))
    engine.copy_out(region.memory, pinned, _runs(offsets)).wait()
    return bytearray(pinned.view[: len(offsets)])


def _poke(region: RegisteredRegion, offsets: Sequence[int], data: bytearray) -> None:
    if not isinstance(region, DeviceRegion):
        for offset, byte in zip(offsets, data, strict=True):
            region.view[offset] = byte
        return
    engine = region.memory.open_copy_engine()
    pinned = engine.pin(len(data))
    pinned.view[: len(data)] = data
    engine.copy_in(region.memory, pinned, _runs(offsets)).wait()


def _runs(offsets: Sequence[int]) -> list[Run]:
    return [Run(offset, i, 1) for i, offset in enumerate(offsets)]
