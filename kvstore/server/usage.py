"""What each namespace holds on one store node, counted on demand.

Owns the count over the page table, in steps that others can run between. Changes nothing. What
comes or goes while it counts may be in the answer or not: it is for people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np

from kvstore.config import NAMESPACES_SHOWN_MAX
from kvstore.messages import NamespaceUsage
from kvstore.server.page_table import READY, SPILLED, PageTable

ROWS_PER_STEP = 1 << 16  # below 1 ms


class Usage:
    """Pages and bytes by namespace: run ``steps`` to its end, then ask ``largest``."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._counts: dict[int, tuple[int, int, int]] = {}

    def steps(self) -> Iterator[None]:
        """Count; between two items anything may happen to the table."""
        table, start = self._table, 0
        while start < table.end_row:
            self._count(start, min(start + ROWS_PER_STEP, table.end_row))
            start += ROWS_PER_STEP
            yield

    def _count(self, start: int, end: int) -> None:
        table = self._table
        states = table.states[start:end]
        present = np.flatnonzero((states == READY) | (states == SPILLED))
        if not len(present):
            return
        numbers = np.asarray(table.namespace)[start:end][present]
        sizes = np.array([spec.page_nbytes for spec in table.specs], dtype=np.int64)
        nbytes = sizes[table.spec_ids[start:end][present]]
        in_memory = states[present] == READY
        on_ssd = np.asarray(table.on_ssd)[start:end][present] != 0
        pages = np.bincount(numbers)
        memory = np.bincount(numbers, weights=nbytes * in_memory)
        ssd = np.bincount(numbers, weights=nbytes * on_ssd)
        for number in np.flatnonzero(pages).tolist():
            before = self._counts.get(number, (0, 0, 0))
            more = (int(pages[number]), int(memory[number]), int(ssd[number]))
            self._counts[number] = (before[0] + more[0], before[1] + more[1], before[2] + more[2])

    async def counted(self, num_max: int) -> tuple[NamespaceUsage, ...]:
        """Count, letting others run, and return the largest; nothing when ``num_max`` is 0."""
        num_max = min(num_max, NAMESPACES_SHOWN_MAX)
        if num_max <= 0:
            return ()
        for _ in self.steps():
            await asyncio.sleep(0)
        return self.largest(num_max)

    def largest(self, num_max: int) -> tuple[NamespaceUsage, ...]:
        """The namespaces that hold the most bytes, the largest first."""
        names = self._table.namespaces
        found = [
            NamespaceUsage(names.name(number), *counts) for number, counts in self._counts.items()
        ]
        found.sort(key=lambda usage: (-usage.memory_nbytes - usage.ssd_nbytes, usage.namespace))
        return tuple(found[:num_max])
