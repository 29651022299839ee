"""What a soak expects of memory: random operations, and the bytes they may and must not touch.

Knows no engine. A *zone* is a piece of memory that only one worker uses at a time; its model is
what the worker knows of it. An operation that failed may have moved any part of its bytes, so each
of them may be the old or the new one, and nothing else; bytes outside of its ranges never change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer.interface import Range

ZONE_NBYTES = 512 << 10
MAX_RANGES = 32
LARGE_NBYTES = 64 << 10
LARGE_SHARE = 0.15

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def random_total(rng: random.Random) -> int:
    """Return the bytes of one operation: every order of magnitude, and some that are large."""
    if rng.random() < LARGE_SHARE:
        return rng.randint(LARGE_NBYTES, ZONE_NBYTES)
    return int(math.exp(rng.uniform(0.0, math.log(LARGE_NBYTES))))


def random_parts(rng: random.Random, total: int, most: int) -> list[int]:
    """Cut ``total`` into at most ``most`` sizes, none of them empty."""
    num = rng.randint(1, min(most, total))
    cuts = sorted(rng.sample(range(1, total), num - 1)) if num > 1 else []
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def random_ranges(rng: random.Random, *, right: str, source_nbytes: int) -> list[Range]:
    """Return ranges for one operation, in any order, disjoint in the destination's zone."""
    sizes = random_parts(rng, random_total(rng), MAX_RANGES)
    slack = ZONE_NBYTES - sum(sizes)
    gaps = sorted(rng.randint(0, slack) for _ in sizes)
    ranges = []
    done = 0
    for size, gap in zip(sizes, gaps, strict=True):
        destination, source = done + gap, rng.randint(0, source_nbytes - size)
        remote, local = (source, destination) if right == "r" else (destination, source)
        ranges.append(Range(remote, local, size))
        done += size
    rng.shuffle(ranges)
    return ranges


class Expectation:
    """What a destination zone may look like after one operation into it."""

    def __init__(self, before: Bytes) -> None:
        self._old = before
        self._new = before.copy()
        self._touched = np.zeros(before.size, np.bool_)

    def add(self, ranges: Sequence[Range], source: Bytes, *, right: str) -> None:
        """The operation moves these ranges of ``source``."""
        for remote, local, nbytes in ranges:
            start, end = (remote, local) if right == "r" else (local, remote)
            self._new[end : end + nbytes] = source[start : start + nbytes]
            self._touched[end : end + nbytes] = True

    def wrong(self, found: Bytes, *, succeeded: bool) -> str:
        """Return what is wrong with ``found``; empty if nothing is."""
        bad = found != self._new
        if not succeeded:
            bad &= (found != self._old) | ~self._touched
        places = np.flatnonzero(bad)
        if not places.size:
            return ""
        first = int(places[0])
        return (
            f"{places.size} wrong of {self._touched.sum()} bytes, first at {first}: "
            f"{found[first]}, was {self._old[first]}, new {self._new[first]}, "
            f"{'inside' if self._touched[first] else 'outside'} of the ranges"
        )
