"""Range arithmetic against a naive model that moves single bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import FrameInvalid
from transfer.interface import Range
from transfer.ranges import merge, plan, split, total_nbytes

SIZE = 64
offsets = st.integers(-2, SIZE + 2)
any_ranges = st.lists(st.builds(Range, offsets, offsets, st.integers(-1, 12)), max_size=8)


def bytes_moved(ranges: list[Range]) -> dict[int, int]:
    """Return local byte -> remote byte."""
    return {r.local_offset + i: r.remote_offset + i for r in ranges for i in range(r.nbytes)}


def is_valid(ranges: list[Range]) -> bool:
    inside = all(
        r.nbytes >= 0
        and min(r.local_offset, r.remote_offset) >= 0
        and max(r.local_offset, r.remote_offset) + r.nbytes <= SIZE
        for r in ranges
    )
    return inside and len(bytes_moved(ranges)) == sum(r.nbytes for r in ranges)


@given(any_ranges)
def test_plan_moves_the_same_bytes_or_refuses(ranges: list[Range]) -> None:
    if not is_valid(ranges):
        with pytest.raises(FrameInvalid):
            plan(ranges, local_nbytes=SIZE, remote_nbytes=SIZE, destination="local")
        return
    planned = plan(ranges, local_nbytes=SIZE, remote_nbytes=SIZE, destination="local")
    assert bytes_moved(planned) == bytes_moved(ranges)
    assert all(r.nbytes > 0 for r in planned)
    assert merge(planned) == planned


@given(any_ranges, st.integers(1, 5), st.integers(1, 20))
def test_split_keeps_every_byte_in_order_and_both_limits(
    ranges: list[Range], max_ranges: int, max_nbytes: int
) -> None:
    wanted = [r for r in ranges if r.nbytes > 0]
    requests = list(split(wanted, max_ranges=max_ranges, max_nbytes=max_nbytes))
    assert all(1 <= len(request) <= max_ranges for request in requests)
    assert all(1 <= total_nbytes(request) <= max_nbytes for request in requests)
    flat = [r for request in requests for r in request]
    assert merge(flat) == merge(wanted)


def test_125_pages_that_follow_each_other_are_one_range() -> None:
    pages = [Range(i * 4096, i * 4096, 4096) for i in range(125)]
    planned = plan(pages, local_nbytes=1 << 20, remote_nbytes=1 << 20, destination="local")
    assert planned == [Range(0, 0, 125 * 4096)]


def test_neighbours_on_one_side_only_are_not_merged() -> None:
    ranges = [Range(0, 0, 8), Range(8, 16, 8)]
    assert merge(ranges) == ranges


def test_overlapping_sources_are_allowed_and_overlapping_destinations_are_not() -> None:
    ranges = [Range(0, 0, 8), Range(0, 8, 8)]
    assert len(plan(ranges, local_nbytes=64, remote_nbytes=64, destination="local")) == 2
    with pytest.raises(FrameInvalid, match="remote destination ranges overlap at byte 0"):
        plan(ranges, local_nbytes=64, remote_nbytes=64, destination="remote")


@pytest.mark.parametrize("given", [(0.0, 0, 8), (0, "1", 8), (0, 0, None), (0, 8), 3, None])
def test_what_is_no_range_is_refused_before_anything_moves(given: Any) -> None:
    with pytest.raises(FrameInvalid, match="three integers"):
        plan([given], local_nbytes=SIZE, remote_nbytes=SIZE, destination="local")


def test_integers_of_numpy_do_not_wrap() -> None:
    half = np.int32(1 << 30)
    whole = Range(half, half, half)  # type: ignore[arg-type]
    assert plan([whole], local_nbytes=1 << 31, remote_nbytes=1 << 31, destination="local") == [
        Range(1 << 30, 1 << 30, 1 << 30)
    ]
    with pytest.raises(FrameInvalid, match="outside"):
        plan([whole], local_nbytes=(1 << 31) - 1, remote_nbytes=1 << 31, destination="local")
