"""The pages that are in memory only, in the order in which they are worth copying.

Owns one look over the page table, in steps that others can run between: each sorts some rows, and
the sorted runs are merged as the keys are asked for. Changes nothing. What comes or goes meanwhile
may be among the keys or not: who copies a page looks at it again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.page import PageKey
from kvstore.server.page_table import READY, PageTable

ROWS_PER_STEP = 4096  # looked at and sorted: below 1 ms

Order = tuple[float, int, int]  # heat, the other way round; depth; row


class Unwritten:
    """Ready pages without a copy: run ``steps`` to its end, then ask for ``keys``."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._runs: list[tuple[npt.NDArray[Any], ...]] = []

    def steps(self) -> Iterator[None]:
        """Look for them; between two items anything may happen to the table."""
        table, start = self._table, 0
        while start < table.end_row:
            self._look(start, min(start + ROWS_PER_STEP, table.end_row))
            start += ROWS_PER_STEP
            yield

    def _look(self, start: int, end: int) -> None:
        table = self._table
        wanted = (table.states[start:end] == READY) & (np.asarray(table.on_ssd)[start:end] == 0)
        rows = np.flatnonzero(wanted) + start
        if len(rows):
            cold, depths = -table.heats[rows], np.asarray(table.depth)[rows]
            order = np.lexsort((rows, depths, cold))
            self._runs.append((cold[order], depths[order], rows[order]))

    def keys(self) -> Iterator[PageKey]:
        """The hottest first, and a page before its descendants, as they were when looked at."""
        for _, _, row in heapq.merge(*map(_items, self._runs)):
            yield self._table.key(row)


def _items(run: tuple[npt.NDArray[Any], ...]) -> Iterator[Order]:
    for cold, depth, row in zip(*run, strict=True):
        yield float(cold), int(depth), int(row)
