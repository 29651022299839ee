"""Arithmetic on ranges: check, merge, split. Pure; knows no memory and no wire.

Invariants of what ``plan`` returns: every range is non-empty and inside both regions, no two
destination ranges overlap, no two neighbours could still be merged, and the order is that of the
remote offsets (sequential for the owner's memory).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Literal

from transfer.errors import FrameInvalid
from transfer.interface import Range

Side = Literal["local", "remote"]


def plan(
    ranges: Sequence[Range], *, local_nbytes: int, remote_nbytes: int, destination: Side
) -> list[Range]:
    """Return the fewest ranges that move the same bytes.

    Raises:
        FrameInvalid: what is no range, a negative number, a range outside of a region, or
            overlapping destinations.
    """
    checked = [_exact(r) for r in ranges]
    for r in checked:
        _check_bounds(r, local_nbytes, remote_nbytes)
    checked = [r for r in checked if r.nbytes]
    if len(checked) < 2:
        return checked
    if destination == "local":
        _check_disjoint(sorted((r.local_offset, r.nbytes) for r in checked), destination)
    else:
        _check_disjoint(sorted((r.remote_offset, r.nbytes) for r in checked), destination)
    return merge(sorted(checked))


def merge(ranges: Sequence[Range]) -> list[Range]:
    """Join neighbours that are adjacent on both sides. Keeps the order."""
    merged: list[Range] = []
    for r in ranges:
        if merged:
            last = merged[-1]
            if (
                last.remote_offset + last.nbytes == r.remote_offset
                and last.local_offset + last.nbytes == r.local_offset
            ):
                merged[-1] = last._replace(nbytes=last.nbytes + r.nbytes)
                continue
        merged.append(r)
    return merged


def total_nbytes(ranges: Sequence[Range]) -> int:
    return sum([r.nbytes for r in ranges])


def split(ranges: Sequence[Range], *, max_ranges: int, max_nbytes: int) -> Iterator[list[Range]]:
    """Yield requests of at most ``max_ranges`` ranges and ``max_nbytes`` bytes, in order."""
    batch: list[Range] = []
    room = max_nbytes
    for whole in ranges:
        rest = whole
        while rest.nbytes:
            part, nbytes = rest, min(rest.nbytes, room)
            if nbytes < rest.nbytes:
                part = rest._replace(nbytes=nbytes)
            batch.append(part)
            room -= nbytes
            if room == 0 or len(batch) == max_ranges:
                yield batch
                batch, room = [], max_nbytes
            if part is rest:
                break
            rest = Range(
                rest.remote_offset + nbytes, rest.local_offset + nbytes, rest.nbytes - nbytes
            )
    if batch:
        yield batch


def _exact(given: Range) -> Range:
    """Return the range in Python's own integers: those of numpy wrap, and a float is a bug."""
    try:
        remote_offset, local_offset, nbytes = map(index, given)
    except (TypeError, ValueError):
        raise FrameInvalid(
            f"{given!r} is no range: it takes three integers, remote_offset, local_offset, nbytes"
        ) from None
    return Range(remote_offset, local_offset, nbytes)


def _check_bounds(r: Range, local_nbytes: int, remote_nbytes: int) -> None:
    if r.nbytes < 0 or r.remote_offset < 0 or r.local_offset < 0:
        raise FrameInvalid(f"negative offset or length in {r}")
    if r.local_offset + r.nbytes > local_nbytes:
        raise FrameInvalid(f"{r} ends outside of the local region of {local_nbytes} bytes")
    if r.remote_offset + r.nbytes > remote_nbytes:
        raise FrameInvalid(f"{r} ends outside of the remote region of {remote_nbytes} bytes")


def _check_disjoint(spans: Sequence[tuple[int, int]], side: Side) -> None:
    end = 0
    for offset, nbytes in spans:
        if offset < end:
            raise FrameInvalid(f"{side} destination ranges overlap at byte {offset}")
        end = offset + nbytes
