"""Growable columns: one array per attribute of a row, instead of one object per row.

Owns the arrays and their growth. Row 0 is the *null row*: it exists in every column, is never
handed out, and stands for "nothing there", so that arrays of rows need no mask. Scalars are read
and written through ``memoryview`` (an int, not a numpy scalar), batches through numpy; both see the
same memory. Both are replaced when the columns grow: fetch them from the owner at every use.

Fresh memory is zero, and costs nothing until it is used: growing ahead is cheap.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

NULL_ROW = 0
NUM_ROWS_FIRST = 1024


class Columns:
    """Equally long one-dimensional columns, by name.

    Args:
        dtypes: numpy dtype of each column.
    """

    def __init__(self, **dtypes: str) -> None:
        self.num_rows = NUM_ROWS_FIRST
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(self.num_rows, dtype) for name, dtype in dtypes.items()
        }

    def grow(self, num_rows: int, used: int) -> None:
        """Make room for ``num_rows`` rows, of which the first ``used`` hold something."""
        used = min(used, self.num_rows)
        for name, old in self.arrays.items():
            new = np.zeros(num_rows, old.dtype)
            new[:used] = old[:used]
            self.arrays[name] = new
        self.num_rows = num_rows

    def view(self, name: str) -> Any:
        """The column for scalar access."""
        return memoryview(self.arrays[name])  # type: ignore[arg-type]


class RowPool:
    """Row numbers from 1 on; freed ones are handed out again, the latest first."""

    def __init__(self) -> None:
        self._free = array("i")
        self.end = 1  # the first row that was never handed out

    def __len__(self) -> int:
        """Rows that are out."""
        return self.end - 1 - len(self._free)

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self.end += 1
        return self.end - 1

    def give_back(self, row: int) -> None:
        self._free.append(row)
