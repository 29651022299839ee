"""How to copy many scattered runs between a device and pinned memory in few calls. Pure.

Asking a device for one copy costs microseconds, whatever its length. Long runs are copied one by
one. Many short ones go as *rows*: the pinned bytes travel in one copy, and one kernel on the device
gathers or scatters them, row by row. A row is the largest length that divides every offset and
every length of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from transfer.device_memory import Run

DIRECT_RUN_NBYTES = 256 * 1024  # from here on the bus takes longer than the call
MAX_DIRECT_RUNS = 4  # so few calls cost less than the kernel
WORD_NBYTES = 8
MIN_ROW_NBYTES = 512  # shorter rows would move more index than bytes
MAX_ROWS = 8192  # room for their index beside each slot
INDEX_NBYTES = MAX_ROWS * 8


class Rows(NamedTuple):
    """Runs as rows of ``row_nbytes``: row ``k`` of the pinned bytes is ``places[k]`` on the device.

    The pinned bytes begin at ``pinned_offset`` and have no gaps.
    """

    row_nbytes: int
    places: list[int]
    pinned_offset: int

    @property
    def nbytes(self) -> int:
        return self.row_nbytes * len(self.places)


def as_rows(runs: Sequence[Run]) -> Rows | None:
    """Return the runs as rows; None where copying them one by one is better or needed."""
    nbytes = sum(run.nbytes for run in runs)
    if len(runs) <= MAX_DIRECT_RUNS or nbytes >= DIRECT_RUN_NBYTES * len(runs):
        return None
    if not _is_packed(runs):
        return None
    row_nbytes = math.gcd(*(part for run in runs for part in (run.device_offset, run.nbytes)))
    if row_nbytes < MIN_ROW_NBYTES or row_nbytes % WORD_NBYTES or nbytes // row_nbytes > MAX_ROWS:
        return None
    places = [
        row
        for run in runs
        for row in range(
            run.device_offset // row_nbytes, (run.device_offset + run.nbytes) // row_nbytes
        )
    ]
    return Rows(row_nbytes, places, runs[0].pinned_offset)


def _is_packed(runs: Sequence[Run]) -> bool:
    end = runs[0].pinned_offset
    for run in runs:
        if run.pinned_offset != end:
            return False
        end += run.nbytes
    return end % WORD_NBYTES == 0 and runs[0].pinned_offset % WORD_NBYTES == 0
