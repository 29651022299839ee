"""Which decode sequences share one attention call.

Owns the grouping: sequences with one new token are sorted by pages and cut into groups whose KV is
gathered side by side. Pure: no torch. A group wastes at most a quarter of its pages as padding and
its gathered KV fits in a cache, so a batch is never padded to its longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PADDING_MAX = 0.25
GROUP_KV_NBYTES_MAX = 16 << 20


class DecodeGroup(NamedTuple):
    """``members`` are places in the batch; each gets ``num_pages`` pages."""

    members: tuple[int, ...]
    num_pages: int


def group_by_pages(
    members: Sequence[int], num_pages: Sequence[int], page_nbytes: int
) -> list[DecodeGroup]:
    """Cut ``members`` into groups.

    Args:
        members: places in the batch.
        num_pages: pages of each member.
        page_nbytes: KV bytes of one page in one layer.
    """
    order = sorted(range(len(members)), key=lambda i: (num_pages[i], members[i]))
    groups: list[DecodeGroup] = []
    current: list[int] = []
    used = 0
    for i in order:
        wide = num_pages[i]
        padded = wide * (len(current) + 1)
        fits = padded <= (used + wide) * (1 + PADDING_MAX)
        if current and not (fits and padded * page_nbytes <= GROUP_KV_NBYTES_MAX):
            groups.append(_close(current, members, num_pages))
            current, used = [], 0
        current.append(i)
        used += wide
    if current:
        groups.append(_close(current, members, num_pages))
    return groups


def _close(current: Sequence[int], members: Sequence[int], num_pages: Sequence[int]) -> DecodeGroup:
    return DecodeGroup(
        tuple(sorted(members[i] for i in current)), max(num_pages[i] for i in current)
    )
