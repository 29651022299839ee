"""The pages of one tier: which are there, where, how warm, and who is using them.

Owns keys, slots, pins and heat. A synchronous core: no clock, no file, no thread. The shell
(``kvstore/ssd/tier.py``) reads and writes what this grants.

::

             admit               commit               pin, unpin
    absent ─────────▶ WRITING ───────────▶ HERE ◀───────────────┐
      ▲                 │  │                 │ └────────────────┘
      │ abandon         │  │ remove          │ remove, evict
      ├─────────────────┘  ▼                 ▼
      │                 DOOMED ◀──────── (while pinned)
      └── abandon, commit, last unpin ───────┘ (else at once)

A slot is never granted while a read or a write of it is under way. A page that is neither pinned
nor being written can be evicted; nothing else can.

Columns, not objects: about 300 bytes a page, and nothing for the garbage collector to walk.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from kvstore.page import KEY_NBYTES, PageKey
from kvstore.ssd.heat_heap import HeatHeap
from kvstore.ssd.restored import Restored
from kvstore.ssd.slabs import Slab, Slabs

NAMESPACES_MAX = 65_536
HEAT_MAX = 2.0**999  # heats are cut to +- this; those of pages found at start are below


class RowState(IntEnum):
    FREE = 0
    WRITING = 1
    HERE = 2
    DOOMED = 3  # not reachable by key; its slot is still in use


class Grant(NamedTuple):
    """A slot to write to or read from, until it is given back."""

    row: int
    offset: int
    slot_nbytes: int
    page_nbytes: int
    generation: int


class Evicted(NamedTuple):
    key: PageKey
    offset: int


class Catalogue:
    """See the module's docstring.

    Args:
        slabs: the slots; nobody else allocates from them.
        first_generation: above all that this file has ever seen.
        evicts: a warm page may displace colder ones. Else a page without room is refused.
    """

    def __init__(self, slabs: Slabs, *, first_generation: int, evicts: bool) -> None:
        self.slabs = slabs
        self.counters: Counter[str] = Counter()
        self.used_nbytes = 0
        self.evicts = evicts
        self._generation = first_generation
        self._by_key: dict[PageKey, int] = {}
        self._keys = bytearray()
        self._offsets, self._generations = array("Q"), array("Q")
        self._page_sizes, self._slot_sizes = array("Q"), array("Q")
        self._heats, self._pins = array("d"), array("H")
        self._states, self._tenants = array("B"), array("H")
        self._free_rows = array("q")
        self._namespaces: dict[bytes, int] = {}
        self._heaps: dict[int, HeatHeap] = {}  # by slot size: pages that may be evicted

    # ---- looking

    def __len__(self) -> int:
        """Pages that are being written or here."""
        return len(self._by_key)

    def __contains__(self, key: PageKey) -> bool:
        """True for pages that ``pin`` would find."""
        row = self._by_key.get(key)
        return row is not None and self._states[row] == RowState.HERE

    def has_room(self, slot_nbytes: int) -> bool:
        return self.slabs.has_room(slot_nbytes)

    def is_held(self, grant: Grant) -> bool:
        """False when the page was removed since it was granted."""
        same = self._generations[grant.row] == grant.generation
        return same and self._states[grant.row] in (RowState.WRITING, RowState.HERE)

    # ---- writing

    def admit(
        self, key: PageKey, namespace: bytes, sizes: tuple[int, int], heat: float
    ) -> tuple[Grant | None, list[Evicted]]:
        """Grant a slot for a page that is absent. ``sizes``: of the slot, of the page.

        Returns the grant, None when there is no room and nothing colder, and the pages evicted.
        """
        assert key not in self._by_key, key
        slot_nbytes, page_nbytes = sizes
        heat = _cut(heat)
        tenant = self._tenant(namespace)
        evicted: list[Evicted] = []
        if tenant is None or slot_nbytes > self.slabs.slab_nbytes:
            self.counters["refused_size"] += 1
            return None, evicted
        if self.evicts and not self.has_room(slot_nbytes):
            evicted = self._make_room(slot_nbytes, heat)
        row = self._new_row()
        offset = self.slabs.allocate(slot_nbytes, row)
        if offset is None:
            self._free_rows.append(row)
            self.counters["refused_full"] += 1
            return None, evicted
        self._generation += 1
        self._keys[row * KEY_NBYTES : (row + 1) * KEY_NBYTES] = key
        self._offsets[row], self._generations[row] = offset, self._generation
        self._page_sizes[row], self._slot_sizes[row] = page_nbytes, slot_nbytes
        self._heats[row], self._pins[row] = heat, 0
        self._states[row], self._tenants[row] = RowState.WRITING, tenant
        self._by_key[key] = row
        self.used_nbytes += page_nbytes
        return self._grant(row), evicted

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
        return self._grant(row)

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

    def keys_of(self, namespace: bytes | None) -> list[PageKey]:
        """Pages of one namespace, or all."""
        if namespace is None:
            return list(self._by_key)
        tenant = self._namespaces.get(namespace)
        return [key for key, row in self._by_key.items() if self._tenants[row] == tenant]

    def restore(self, found: Restored) -> None:
        """Take the pages found at start, row i = page i; into an empty catalogue only.

        Their heats are of an earlier life: kept as an order, below every heat of this one.
        """
        assert not self._by_key, "not empty"
        num = len(found.keys)
        self._by_key = dict(zip(found.keys, range(num), strict=True))
        self._keys = bytearray(b"".join(found.keys))
        self._offsets = array("Q", found.offsets.tobytes())
        self._generations = array("Q", found.generations.tobytes())
        self._page_sizes = array("Q", found.page_sizes.tobytes())
        self._slot_sizes = array("Q", found.slot_sizes.tobytes())
        self._heats = array("d", found.ranked_heats(2 * HEAT_MAX).tobytes())
        self._pins = array("H", bytes(2 * num))
        self._states = array("B", bytes([RowState.HERE]) * num)
        for namespace in dict.fromkeys(found.namespaces):
            self._tenant(namespace)
        tenants = [self._namespaces.get(namespace, 0) for namespace in found.namespaces]
        self._tenants = array("H", tenants)
        self.used_nbytes = int(found.page_sizes.sum())
        self.slabs.restore(found.offsets, found.slot_sizes)
        for slot_nbytes, rows in found.coldest_first():
            heap = self._heaps.setdefault(slot_nbytes, HeatHeap())
            heap.fill(rows, [self._heats[row] for row in rows])

    def check(self) -> None:
        """Assert the invariants; O(pages)."""
        self.slabs.check()
        used = 0
        for key, row in self._by_key.items():
            assert self._key(row) == key, row
            assert self._states[row] in (RowState.WRITING, RowState.HERE), row
            slab = self.slabs.slab_at(self._offsets[row])
            assert row in slab.held_rows(), row
            used += self._page_sizes[row]
            evictable = self._states[row] == RowState.HERE and not self._pins[row]
            assert (row in self._heap(row)) == evictable, row
        assert used == self.used_nbytes, (used, self.used_nbytes)
        for heap in self._heaps.values():
            heap.check()
        held = [RowState(state) for state in self._states if state != RowState.FREE]
        assert len(held) == len(self._by_key) + held.count(RowState.DOOMED)

    # ---- eviction

    def _make_room(self, slot_nbytes: int, heat: float) -> list[Evicted]:
        """Evict the coldest page of this slot size, or a whole slab that is colder still."""
        heap = self._heaps.get(slot_nbytes)
        coldest = heap.coldest() if heap is not None else None
        limit = heat if coldest is None else min(heat, coldest[1])
        slab = self._colder_slab(slot_nbytes, limit)
        if slab is not None:
            self.counters["slabs_emptied"] += 1
            rows = list(slab.held_rows())
        elif coldest is not None and coldest[1] < heat:
            rows = [coldest[0]]
        else:
            return []
        self.counters["evicted"] += len(rows)
        return [Evicted(self._key(row), self._remove(row)) for row in rows]

    def _colder_slab(self, slot_nbytes: int, heat: float) -> Slab | None:
        """A slab of another slot size whose every page may go and is colder than ``heat``."""
        for other, heap in self._heaps.items():
            coldest = heap.coldest()
            if other == slot_nbytes or coldest is None or coldest[1] >= heat:
                continue
            slab = self.slabs.slab_at(self._offsets[coldest[0]])
            if all(row in heap and self._heats[row] < heat for row in slab.held_rows()):
                return slab
        return None

    # ---- rows

    def _grant(self, row: int) -> Grant:
        return Grant(
            row,
            self._offsets[row],
            self._slot_sizes[row],
            self._page_sizes[row],
            self._generations[row],
        )

    def _key(self, row: int) -> PageKey:
        return PageKey(bytes(self._keys[row * KEY_NBYTES : (row + 1) * KEY_NBYTES]))

    def _heap(self, row: int) -> HeatHeap:
        return self._heaps.setdefault(self._slot_sizes[row], HeatHeap())

    def _offer(self, row: int) -> None:
        self._heap(row).push(row, self._heats[row])

    def _remove(self, row: int) -> int:
        if self._states[row] == RowState.HERE and not self._pins[row]:
            self._heap(row).remove(row)
            self._forget(row)
            self._free(row)
        else:
            self._forget(row)
        return self._offsets[row]

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
        for column in (self._offsets, self._generations, self._page_sizes, self._slot_sizes):
            column.append(0)
        self._heats.append(0.0)
        for small in (self._pins, self._states, self._tenants):
            small.append(0)
        return row

    def _tenant(self, namespace: bytes) -> int | None:
        known = self._namespaces.get(namespace)
        if known is None and len(self._namespaces) < NAMESPACES_MAX:
            known = self._namespaces[namespace] = len(self._namespaces)
        return known


def _cut(heat: float) -> float:
    """Heats that compare: not NaN, within +- HEAT_MAX."""
    return 0.0 if heat != heat else min(max(heat, -HEAT_MAX), HEAT_MAX)
