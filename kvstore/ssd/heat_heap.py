"""A binary heap of rows by heat, with removal from anywhere.

Owns the order of pages that may be evicted. O(log n) for every change; no stale entries, so its
memory is a place per row and no more. Knows no pages: rows are small integers.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt


class HeatHeap:
    """The coldest row first; among equals, any."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._heats = array("d")
        self._places = array("q")  # by row; means something where _rows agrees

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        if row >= len(self._places):
            return False
        place = self._places[row]
        return place < len(self._rows) and self._rows[place] == row

    def fill(self, rows: npt.NDArray[np.int64], heats: npt.NDArray[np.float64]) -> None:
        """Take rows sorted by heat into an empty heap: a sorted array is one already."""
        assert not self._rows, "not empty"
        places = np.zeros(int(rows.max(initial=-1)) + 1, dtype=np.int64)
        places[rows] = np.arange(len(rows), dtype=np.int64)
        self._rows = array("q", rows.tobytes())
        self._heats = array("d", heats.tobytes())
        self._places = array("q", places.tobytes())

    def coldest_row(self) -> int:
        """The row of the coldest; not of an empty heap."""
        return self._rows[0]

    def push(self, row: int, heat: float) -> None:
        assert row not in self, row
        self._places.extend([0] * (row + 1 - len(self._places)))
        self._rows.append(row)
        self._heats.append(heat)
        self._places[row] = len(self._rows) - 1
        self._rise(len(self._rows) - 1)

    def remove(self, row: int) -> None:
        assert row in self, row
        place = self._places[row]
        last_row, last_heat = self._rows.pop(), self._heats.pop()
        if place < len(self._rows):
            self._put(place, last_row, last_heat)
            self._rise(place)
            self._sink(self._places[last_row])

    def check(self) -> None:
        """Assert the heap's order and its places; O(n)."""
        for place in range(1, len(self._rows)):
            assert self._heats[(place - 1) // 2] <= self._heats[place], place
        for place, row in enumerate(self._rows):
            assert self._places[row] == place, (row, place)

    def _put(self, place: int, row: int, heat: float) -> None:
        self._rows[place] = row
        self._heats[place] = heat
        self._places[row] = place

    def _rise(self, place: int) -> None:
        row, heat = self._rows[place], self._heats[place]
        while place:
            parent = (place - 1) // 2
            if self._heats[parent] <= heat:
                break
            self._put(place, self._rows[parent], self._heats[parent])
            place = parent
        self._put(place, row, heat)

    def _sink(self, place: int) -> None:
        row, heat = self._rows[place], self._heats[place]
        while (child := 2 * place + 1) < len(self._rows):
            if child + 1 < len(self._rows) and self._heats[child + 1] < self._heats[child]:
                child += 1
            if heat <= self._heats[child]:
                break
            self._put(place, self._rows[child], self._heats[child])
            place = child
        self._put(place, row, heat)
