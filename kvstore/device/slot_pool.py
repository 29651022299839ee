"""Slots that callers take, use for a moment, and give back.

Owns which slots are free and who waits for them, in order. Knows no memory: a slot is a number.
Invariants: a slot has one holder; every taken slot is given back once; slots given back go to
those who wait, first come first served, and nobody waits while a slot is free.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class _Want(NamedTuple):
    num_max: int
    granted: asyncio.Future[list[int]]


class SlotPool:
    """``num_slots`` slots: ``0..num_slots-1``, the lowest free ones first."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 0, num_slots
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a heap: neighbours make contiguous memory
        self._wants: deque[_Want] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_free(self, num_max: int) -> list[int]:
        """Take up to ``num_max`` free slots, without waiting; may return none."""
        num_slots = 0 if self._wants else min(num_max, len(self._free))
        return [heapq.heappop(self._free) for _ in range(num_slots)]

    async def take(self, num_max: int, *, deadline_s: float) -> list[int]:
        """Take 1 to ``num_max`` slots, in turn; returns none when the deadline passes first."""
        assert num_max >= 1, num_max
        slots = self.take_free(num_max)
        if slots:
            return slots
        want = _Want(num_max, asyncio.get_running_loop().create_future())
        self._wants.append(want)
        try:
            async with asyncio.timeout_at(deadline_s):
                slots = await want.granted
        except TimeoutError:
            return []
        finally:
            if not slots:
                self._withdraw(want)
        return slots

    def _withdraw(self, want: _Want) -> None:
        """Stop wanting; what was granted at the same moment goes to the next."""
        if want.granted.done() and not want.granted.cancelled():
            self.give_back(want.granted.result())
        elif want in self._wants:
            self._wants.remove(want)

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots, and hand them to those who wait."""
        for slot in slots:
            assert 0 <= slot < self.num_slots, slot
            heapq.heappush(self._free, slot)
        while self._free and self._wants:
            want = self._wants.popleft()
            if not want.granted.done():
                num_slots = min(want.num_max, len(self._free))
                want.granted.set_result([heapq.heappop(self._free) for _ in range(num_slots)])
