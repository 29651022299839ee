"""How warm a page is: its uses, halved every ``half_life_s``.

Owns one formula. The heat at time ``t`` of a page used at ``t1, t2, ...`` is
``sum(2 ** ((ti - t) / half_life_s))``. Kept is its logarithm at time 0,
``h = log2(sum(2 ** (ti / half_life_s)))``: it only changes when the page is used, pages compare
without a look at the clock, and nothing ever needs ageing.
"""

from __future__ import annotations

import math

import numpy as np

from kvstore.server.key_index import Rows
from kvstore.server.page_table import PageTable

HEAT_MAX = 1e9  # uses that count, in ``uses_now``


class HeatMeter:
    """Keeps ``PageTable.heat``.

    Args:
        half_life_s: time in which a use loses half of its weight.
    """

    def __init__(self, table: PageTable, half_life_s: float) -> None:
        self._table = table
        self._half_life_s = half_life_s

    def first(self, row: int, now_s: float) -> None:
        """The page came in: that is its first use."""
        self._table.heat[row] = now_s / self._half_life_s

    def add(self, row: int, now_s: float) -> None:
        """One use."""
        old, new = self._table.heat[row], now_s / self._half_life_s
        self._table.heat[row] = max(old, new) + math.log2(1 + 2.0 ** -abs(old - new))

    def add_many(self, rows: Rows, now_s: float) -> None:
        """One use of each; a row that occurs twice counts once."""
        heats = self._table.heats
        heats[rows] = np.logaddexp2(heats[rows], now_s / self._half_life_s)

    def uses_now(self, row: int, now_s: float) -> float:
        """The heat at ``now_s``, in uses."""
        exponent: float = self._table.heat[row] - now_s / self._half_life_s
        return float(min(HEAT_MAX, 2.0 ** min(exponent, 30.0)))
