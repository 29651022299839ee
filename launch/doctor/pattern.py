"""Bytes that no shift, swap or repetition leaves unchanged, and their check.

Word ``i`` of the pattern is SplitMix64 of ``seed << 40 | i`` (Steele, Lea, Flood 2014): a
bijection, so that no two words of any two patterns are equal and a page that arrives in the wrong
place, twice, late or from another pattern is always noticed. Works in chunks that fit the cache.
Knows no transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from launch.doctor.grid import MIB, WORD_NBYTES, Case

CHUNK_NBYTES = MIB
SEED_SHIFT = 40  # 2**40 words of 8 bytes: no region is larger
SEED_MAX = (1 << 64 - SEED_SHIFT) - 1  # seed and index fill one word

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def pattern(seed: int, offset: int, nbytes: int) -> Bytes:
    """Return bytes ``[offset, offset + nbytes)`` of the pattern; both are whole words."""
    assert 0 <= seed <= SEED_MAX, seed
    assert offset % WORD_NBYTES == 0, offset
    assert nbytes % WORD_NBYTES == 0, nbytes
    first = (seed << SEED_SHIFT) + offset // WORD_NBYTES
    words = np.arange(first, first + nbytes // WORD_NBYTES, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)


def fill(view: memoryview, seed: int) -> None:
    """Write the pattern over all of ``view``."""
    target = np.frombuffer(view, np.uint8)
    for start in range(0, len(target), CHUNK_NBYTES):
        nbytes = min(CHUNK_NBYTES, len(target) - start)
        target[start : start + nbytes] = pattern(seed, start, nbytes)


def wrong_byte(view: memoryview, seed: int, places: Iterable[tuple[int, int, int]]) -> str:
    """Return where ``view`` differs from the pattern, for people; empty when it does not.

    ``places`` are (offset in the view, offset in the pattern, nbytes).
    """
    memory = np.frombuffer(view, np.uint8)
    for here, there, nbytes in places:
        for start in range(0, nbytes, CHUNK_NBYTES):
            length = min(CHUNK_NBYTES, nbytes - start)
            found = memory[here + start : here + start + length]
            wanted = pattern(seed, there + start, length)
            if not np.array_equal(found, wanted):
                index = int(np.argmax(found != wanted))
                return (
                    f"byte {here + start + index} is {found[index]:#04x}, not {wanted[index]:#04x}"
                )
    return ""


def untouched(case: Case) -> list[tuple[int, int, int]]:
    """Where the pattern lies in memory that was filled and only read since."""
    return [(0, 0, case.nbytes)]


def arrived_here(case: Case) -> list[tuple[int, int, int]]:
    """Where the peer's pattern lies in local memory after a read."""
    return [(local, remote, nbytes) for remote, local, nbytes in case.ranges()]


def arrived_there(case: Case) -> list[tuple[int, int, int]]:
    """Where the local pattern lies in the peer's memory after a write."""
    return [(remote, local, nbytes) for remote, local, nbytes in case.ranges()]
