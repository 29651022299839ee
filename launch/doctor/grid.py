"""Which transfers ``kvferry doctor`` tries: page sizes, batches, and how they are scattered.

Pure: no bytes, no clock. Both sides of a measurement derive the same ranges from the same case, so
that a check on the peer needs no more than the case's two numbers.

Invariants: a case moves at most ``CASE_NBYTES_MAX`` bytes, which bounds memory (three times that on
the measuring side, twice on the peer's) and time; no two ranges of a case can be merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from launch.errors import ConfigError
from launch.sizes import human_size, parse_size
from transfer.interface import Range

KIB, MIB = 1 << 10, 1 << 20
WORD_NBYTES = 8  # the unit of the pattern that is checked; pages are whole words

CASE_NBYTES_MAX = 512 * MIB  # bytes of one batch, whatever is asked for
DEFAULT_CASE_NBYTES_MAX = 64 * MIB  # of the grid that ends in one to two minutes
BATCH_MAX = 4096

DEFAULT_PAGES = (4 * KIB, 64 * KIB, MIB, 64 * MIB)
DEFAULT_BATCHES = (1, 32, 512)
FULL_PAGES = tuple(4 * KIB << 2 * power for power in range(8))  # 4 KiB, 16 KiB ... 64 MiB
FULL_BATCHES = (1, 8, 64, 512)

SAMPLE_NBYTES = 32 * MIB  # a timed sample repeats small batches until it has moved so much,
REPEATS_MAX = 64  # but no more often than this

STEP_TIMEOUT_S = 10.0  # of one step that moves next to nothing: a side that is frozen is noticed
SLOWEST_NBYTES_PER_S = 32 * MIB  # what a large step is given time for besides


class Case(NamedTuple):
    """``batch`` pages of ``page_nbytes`` bytes, moved by one operation."""

    page_nbytes: int
    batch: int

    @property
    def nbytes(self) -> int:
        return self.page_nbytes * self.batch

    @property
    def repeats(self) -> int:
        """Operations in one timed sample: one for large batches, more for small ones."""
        return max(1, min(REPEATS_MAX, SAMPLE_NBYTES // self.nbytes))

    def ranges(self) -> list[Range]:
        """Return one range for each page; scattered, so that none can be merged with another."""
        nbytes = self.page_nbytes
        return [
            Range(there * nbytes, here * nbytes, nbytes)
            for here, there in enumerate(scattered(self.batch))
        ]


def step_timeout_s(nbytes: int) -> float:
    """Return the seconds that one step of ``nbytes`` may take before its other side is frozen."""
    return STEP_TIMEOUT_S + nbytes / SLOWEST_NBYTES_PER_S


LATENCY = Case(4 * KIB, 1)  # the small read whose percentiles are reported


def scattered(count: int) -> list[int]:
    """Return a permutation in which no two neighbours stay neighbours in the same order.

    A walk in steps of about the golden section of ``count``, coprime to it: it spreads evenly, and
    the step from one to the next is never +1.
    """
    if count < 3:
        return list(range(count))[::-1]
    step = next(
        step
        for step in range(int(count * 0.618), 2 * count)
        if step % count != 1 and math.gcd(step, count) == 1
    )
    return [index * step % count for index in range(count)]


def grid(pages: Sequence[int], batches: Sequence[int], case_nbytes_max: int) -> list[Case]:
    """Return every page size with every batch; a batch that is too much is cut to what fits."""
    cases = {
        Case(page, max(1, min(batch, case_nbytes_max // page)))
        for page in pages
        for batch in batches
    }
    return sorted(cases)


def choose_cases(pages: Sequence[str], batches: Sequence[int], *, full: bool) -> list[Case]:
    """Return the cases that the options ask for.

    Named sizes are measured exactly, each with each; what is not named comes from the default grid.

    Raises:
        ConfigError: a size that cannot be measured, or a batch above ``CASE_NBYTES_MAX``.
    """
    sizes = [_page_nbytes(text) for text in pages]
    counts = [_batch(batch) for batch in batches]
    if full and not sizes and not counts:
        return grid(FULL_PAGES, FULL_BATCHES, CASE_NBYTES_MAX)
    if not sizes or not counts:
        return grid(sizes or DEFAULT_PAGES, counts or DEFAULT_BATCHES, DEFAULT_CASE_NBYTES_MAX)
    cases = {Case(page, batch) for page in sizes for batch in counts}
    for case in cases:
        if case.nbytes > CASE_NBYTES_MAX:
            raise ConfigError(
                f"--batch {case.batch}: of pages of {case.page_nbytes} bytes is "
                f"{human_size(case.nbytes)}, one batch may be {human_size(CASE_NBYTES_MAX)}: "
                "name smaller ones"
            )
    return sorted(cases)


def _page_nbytes(text: str) -> int:
    try:
        nbytes = parse_size(text, "--pages")
    except ConfigError:
        raise ConfigError(
            f"--pages {text}: write the size of a page, more than 0, like 368640 or 5MiB"
        ) from None
    if nbytes % WORD_NBYTES or nbytes > CASE_NBYTES_MAX:
        raise ConfigError(
            f"--pages {text}: a page is a multiple of {WORD_NBYTES} bytes, at most "
            f"{human_size(CASE_NBYTES_MAX)}"
        )
    return nbytes


def _batch(batch: int) -> int:
    if not 1 <= batch <= BATCH_MAX:
        raise ConfigError(f"--batch {batch}: from 1 to {BATCH_MAX} pages can be moved at once")
    return batch
