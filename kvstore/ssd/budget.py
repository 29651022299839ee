"""How fast pages may be written: a token bucket.

Owns the bytes that may still be written. Pure: the time is passed in. An SSD wears out with what is
written to it, and reads wait behind writes; a spill above the budget is refused, not delayed.
"""

from __future__ import annotations

BURST_S = 1.0  # what may be saved up


class WriteBudget:
    """``nbytes_per_s`` on average; None: no limit. A page larger than the burst goes when full."""

    def __init__(self, nbytes_per_s: float | None, now_s: float) -> None:
        self._rate = nbytes_per_s
        self._left = (nbytes_per_s or 0.0) * BURST_S
        self._filled_s = now_s

    def spend(self, nbytes: int, now_s: float) -> bool:
        """Take ``nbytes`` if they are there."""
        if self._rate is None:
            return True
        burst = self._rate * BURST_S
        self._left = min(burst, self._left + (now_s - self._filled_s) * self._rate)
        self._filled_s = now_s
        if self._left < min(nbytes, burst):
            return False
        self._left -= nbytes
        return True
