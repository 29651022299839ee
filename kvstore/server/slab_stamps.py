"""How recently each slab was used: the stamp of its youngest page.

Owns one number per slab, by slab id plus one; number 0 stands for "in no slab".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

NUM_FIRST = 256


class SlabStamps:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._set(np.zeros(NUM_FIRST, np.int64))

    def _set(self, stamps: npt.NDArray[np.int64]) -> None:
        self._stamps = stamps
        self._stamp: Any = memoryview(stamps)  # type: ignore[arg-type]

    def opened(self, number: int, now: int) -> None:
        """A slab was given a page."""
        if number >= len(self._stamps):
            grown = np.zeros(2 * number, np.int64)
            grown[: len(self._stamps)] = self._stamps
            self._set(grown)
        self._stamp[number] = now

    def touch(self, number: int, now: int) -> None:
        self._stamp[number] = now

    def touch_many(self, numbers: npt.NDArray[np.int32], now: int) -> None:
        self._stamps[numbers] = now

    def raise_to(self, number: int, stamp: int) -> None:
        self._stamp[number] = max(self._stamp[number], stamp)

    def of(self, number: int) -> int:
        return self._stamp[number]  # type: ignore[no-any-return]
