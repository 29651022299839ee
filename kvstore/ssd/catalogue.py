"""The pages of one tier: which are there, where, how warm, and who is using them.

Owns keys, slots, pins and heat. A synchronous core: no clock, no file, no thread. The shell
(``kvstore/ssd/tier.py``) reads and writes what this grants.

::

             admit               commit               pin, unpin
    absent ─────────▶ WRITING ───────────▶ HERE ◀───────────────┐
      ▲                 │  │                 │ └────────────────┘
      │ abandon         │  │ remove          │ remove, displace
      ├─────────────────┘  ▼                 ▼
      │                 DOOMED ◀──────── (while pinned)
      └── abandon, commit, last unpin ───────┘ (else at once)

A slot is never granted while a read or a write of it is under way. A page that is neither pinned
nor being written can be displaced; nothing else can.

Columns, not objects: about 300 bytes a page, and nothing for the garbage collector to walk.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from kvstore.page import KEY_NBYTES, PageKey
from kvstore.ssd.heat_heap import HeatHeap
from kvstore.ssd.restored import Restored
from kvstore.ssd.slabs import Slab, Slabs

HEAT_MAX = 2.0**999  # heats are cut to +- this; those of pages found at start are below
ROWS_AT_ONCE = 64  # looked at, or given up, in one step of the loop: well below 1 ms


class RowState(IntEnum):
    FREE = 0
    WRITING = 1
    HERE = 2
    DOOMED = 3  # not reachable by key; its slot is still in use


class Grant(NamedTuple):
    """A slot to write to or read from, until it is given back."""

    key: PageKey
    row: int
    offset: int
    slot_nbytes: int
    page_nbytes: int
    generation: int


class Displaced(NamedTuple):
    """A page that a warmer one took the room of."""

    key: PageKey
    offset: int


class Catalogue:
    """See the module's docstring.

    Args:
        slabs: the slots; nobody else allocates from them.
        first_generation: above all that this file has ever seen.
    """

    def __init__(self, slabs: Slabs, *, first_generation: int) -> None:
        self.slabs = slabs
        self.counters: Counter[str] = Counter()
        self.used_nbytes = 0
        self._generation = first_generation
        self._by_key: dict[PageKey, int] = {}
        self._keys = bytearray()
        self._offsets, self._generations = array("Q"), array("Q")
        self._page_sizes, self._slot_sizes = array("Q"), array("Q")
        self._heats, self._pins, self._states = array("d"), array("H"), array("B")
        self._free_rows = array("q")
        self._heaps: dict[int, HeatHeap] = {}  # by slot size: pages that may be displaced

    # ---- looking

    def __len__(self) -> int:
        """Pages that are being written or here."""
        return len(self._by_key)

    def __contains__(self, key: PageKey) -> bool:
        """True for pages that ``pin`` would find."""
        row = self._by_key.get(key)
        return row is not None and self._states[row] == RowState.HERE

    def is_held(self, grant: Grant) -> bool:
        """False when the page was removed since it was granted."""
        same = self._generations[grant.row] == grant.generation
        return same and self._states[grant.row] in (RowState.WRITING, RowState.HERE)

    # ---- writing

    def admit(
        self, key: PageKey, *, slot_nbytes: int, page_nbytes: int, heat: float
    ) -> Grant | None:
        """Grant a slot for a page that is absent; None when there is no room."""
        assert key not in self._by_key, key
        if slot_nbytes > self.slabs.slab_nbytes:
            self.counters["refused_size"] += 1
            return None
        row = self._new_row()
        offset = self.slabs.allocate(slot_nbytes, row)
        if offset is None:
            self._free_rows.append(row)
            self.counters["refused_full"] += 1
            return None
        self._generation += 1
        self._keys[row * KEY_NBYTES : (row + 1) * KEY_NBYTES] = key
        self._offsets[row], self._generations[row] = offset, self._generation
        self._page_sizes[row], self._slot_sizes[row] = page_nbytes, slot_nbytes
        self._heats[row] = _cut(heat)
        self._pins[row], self._states[row] = 0, RowState.WRITING
        self._by_key[key] = row
        self.used_nbytes += page_nbytes
        return self._grant(key, row)

    def commit(self, grant: Grant) -> bool:
        """The page is written; False when it was removed meanwhile (its slot is free now)."""
        if self._states[grant.row] == RowState.DOOMED:
            self._free(grant.row)
            return False
        assert self._states[grant.row] == RowState.WRITING, grant
        self._states[grant.row] = RowState.HERE
        self._offer(grant.row)
        return True

    def abandon(self, grant: Grant) -> None:
        """The page will not be written; its slot is quiet."""
        if self._states[grant.row] == RowState.WRITING:
            self._forget(grant.row)
        assert self._states[grant.row] == RowState.DOOMED, grant
        self._free(grant.row)

    # ---- reading

    def pin(self, key: PageKey) -> Grant | None:
        """Hold a page for reading; None when it is not here."""
        if key not in self:
            return None
        row = self._by_key[key]
        if not self._pins[row]:
            self._heap(row).remove(row)
        self._pins[row] += 1
        return self._grant(key, row)

    def unpin(self, grant: Grant) -> None:
        row = grant.row
        assert self._pins[row], grant
        self._pins[row] -= 1
        if self._pins[row]:
            return
        if self._states[row] == RowState.DOOMED:
            self._free(row)
        else:
            self._offer(row)

    def touch(self, key: PageKey, heat: float) -> None:
        """Say how warm a page is now."""
        row = self._by_key.get(key)
        if row is None:
            return
        self._heats[row] = _cut(heat)
        if row in self._heap(row):
            self._heap(row).remove(row)
            self._offer(row)

    # ---- removing

    def remove(self, keys: Sequence[PageKey]) -> list[int]:
        """Forget pages; returns the offsets of those that were here."""
        rows = [self._by_key[key] for key in keys if key in self._by_key]
        return [self._remove(row) for row in dict.fromkeys(rows)]

    def _remove(self, row: int) -> int:
        if self._states[row] == RowState.HERE and not self._pins[row]:
            self._heap(row).remove(row)
            self._forget(row)
            self._free(row)
        else:
            self._forget(row)
        return self._offsets[row]

    # ---- making room

    def make_room(self, slot_nbytes: int, heat: float) -> Generator[list[Displaced], None, None]:
        """Give up the coldest page of this slot size, or a whole slab of another that is colder.

        A step at a time, since a slab may hold 16,000 pages: others may run in between, whatever
        they do. Less is given up, or nothing, when what was cold is not any more.
        """
        limit = min(heat, self._coldest_heat(slot_nbytes, heat))
        for slab in self._slabs_of_others(slot_nbytes, limit):
            if (yield from self._is_colder(slab, limit)):
                yield from self._empty(slab, limit)
                return
        if self._coldest_heat(slot_nbytes, heat) < heat:
            yield [self._displace(self._heaps[slot_nbytes].coldest_row())]

    def _coldest_heat(self, slot_nbytes: int, default: float) -> float:
        heap = self._heaps.get(slot_nbytes)
        return self._heats[heap.coldest_row()] if heap else default

    def _slabs_of_others(self, slot_nbytes: int, limit: float) -> list[Slab]:
        """Of every other slot size the slab with the coldest page, if that is below ``limit``."""
        rows = [h.coldest_row() for nbytes, h in self._heaps.items() if h and nbytes != slot_nbytes]
        cold = [row for row in rows if self._heats[row] < limit]
        return [self.slabs.slab_at(self._offsets[row]) for row in cold]

    def _may_go(self, row: int, limit: float) -> bool:
        return row in self._heap(row) and self._heats[row] < limit

    def _is_colder(self, slab: Slab, limit: float) -> Generator[list[Displaced], None, bool]:
        for rows in slab.in_steps(ROWS_AT_ONCE):
            if not all(self._may_go(row, limit) for row in rows):
                return False
            yield []
        return True

    def _empty(self, slab: Slab, limit: float) -> Iterator[list[Displaced]]:
        self.counters["slabs_emptied"] += 1
        self.slabs.close(slab)
        try:
            for rows in slab.in_steps(ROWS_AT_ONCE):
                yield [self._displace(row) for row in rows if self._may_go(row, limit)]
        finally:
            self.slabs.reopen(slab)

    def _displace(self, row: int) -> Displaced:
        self.counters["evicted"] += 1
        return Displaced(self._key(row), self._remove(row))

    # ---- the start, and checking

    def restore(self, found: Restored) -> None:
        """Take the pages found at start, row i = page i; into an empty catalogue only.

        Their heats are of an earlier life: kept as an order, below every heat of this one.
        """
        assert not self._by_key, "not empty"
        num = len(found.keys)
        self._by_key = dict(zip(found.keys, range(num), strict=True))
        self._offsets = array("Q", found.offsets.tobytes())
        self._generations = array("Q", found.generations.tobytes())
        self._page_sizes = array("Q", found.page_sizes.tobytes())
        self._slot_sizes = array("Q", found.slot_sizes.tobytes())
        self._keys = bytearray(b"".join(found.keys))
        heats = found.ranked_heats(2 * HEAT_MAX)
        self._heats = array("d", heats.tobytes())
        self._pins = array("H", bytes(2 * num))
        self._states = array("B", bytes([RowState.HERE]) * num)
        self.used_nbytes = int(found.page_sizes.sum())
        self.slabs.restore(found.offsets, found.slot_sizes)
        for slot_nbytes, rows in found.coldest_first():
            self._heaps.setdefault(slot_nbytes, HeatHeap()).fill(rows, heats[rows])

    def check(self) -> None:
        """Assert the invariants; O(pages)."""
        self.slabs.check()
        for key, row in self._by_key.items():
            assert self._key(row) == key, row
            assert self._states[row] in (RowState.WRITING, RowState.HERE), row
            evictable = self._states[row] == RowState.HERE and not self._pins[row]
            assert (row in self._heap(row)) == evictable, row
        for heap in self._heaps.values():
            heap.check()
        held = [row for row, state in enumerate(self._states) if state != RowState.FREE]
        slots = {(self._offsets[row], self._slot_sizes[row]) for row in held}
        assert len(slots) == len(held) == self.slabs.num_used
        assert all(self.slabs.holds(offset, nbytes) for offset, nbytes in slots)
        used = sum(self._page_sizes[row] for row in self._by_key.values())
        assert used == self.used_nbytes, (used, self.used_nbytes)

    # ---- rows

    def _key(self, row: int) -> PageKey:
        return PageKey(bytes(self._keys[row * KEY_NBYTES : (row + 1) * KEY_NBYTES]))

    def _heap(self, row: int) -> HeatHeap:
        return self._heaps.setdefault(self._slot_sizes[row], HeatHeap())

    def _offer(self, row: int) -> None:
        self._heap(row).push(row, self._heats[row])

    def _grant(self, key: PageKey, row: int) -> Grant:
        return Grant(
            key,
            row,
            self._offsets[row],
            self._slot_sizes[row],
            self._page_sizes[row],
            self._generations[row],
        )

    def _forget(self, row: int) -> None:
        del self._by_key[self._key(row)]
        self.used_nbytes -= self._page_sizes[row]
        self._states[row] = RowState.DOOMED

    def _free(self, row: int) -> None:
        self.slabs.free(self._offsets[row])
        self._states[row] = RowState.FREE
        self._free_rows.append(row)

    def _new_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        row = len(self._states)
        self._keys.extend(bytes(KEY_NBYTES))
        self._heats.append(0.0)
        for column in (self._offsets, self._generations, self._page_sizes, self._slot_sizes):
            column.append(0)
        for small in (self._pins, self._states):
            small.append(0)
        return row


def _cut(heat: float) -> float:
    """Heats that compare: not NaN, within +- HEAT_MAX."""
    return 0.0 if heat != heat else min(max(heat, -HEAT_MAX), HEAT_MAX)
