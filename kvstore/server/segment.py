"""Page slots inside one contiguous segment of memory.

Owns which bytes of the segment are handed out. Knows no keys, no leases and no memory: offsets
only. Pages of several sizes share the segment through *slabs*; a slab serves one page size and
goes back to the free extents when its last slot is freed::

    segment  | slab 2048 B x 8  | slab 4096 B x 4  |  free extent ............ |
                 ▲ slot = (offset, nbytes, generation)

Every grant of a slot has a new *generation*, unique for the life of the segment: who holds an old
one cannot be mistaken for the present holder. Slots with low offsets go first, so that pages
written together lie together and move as one range.

Invariant: slabs and free extents tile the segment; extents never touch one another.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from typing import NamedTuple

SLABS_PER_SEGMENT = 16  # a slab is about this fraction of a small segment ...
SLAB_NBYTES_MAX = 64 << 20  # ... and never more than this (unless one page is)


class Slot(NamedTuple):
    """Room for one page, as granted once."""

    offset: int
    nbytes: int
    generation: int


class Slab:
    """A run of equal slots.

    Attributes:
        slab_id: small number, used again after the slab is gone.
        owners: row of the page in each slot, for the directory; 0 while it has none.
    """

    def __init__(self, slab_id: int, offset: int, page_nbytes: int, num_slots: int) -> None:
        self.slab_id = slab_id
        self.offset = offset
        self.page_nbytes = page_nbytes
        self.num_slots = num_slots
        self.num_used = 0
        self.owners = array("i", bytes(4 * num_slots))
        self._generations = array("q", bytes(8 * num_slots))  # 0: free
        self._num_fresh = num_slots  # slots at the end that were never used
        self._freed: list[int] = []  # other free slots, by number: a heap

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.page_nbytes

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_used

    def take(self, generation: int) -> int:
        """Grant the free slot of the lowest offset; there must be one."""
        if self._freed:
            number = heapq.heappop(self._freed)
        else:
            number = self.num_slots - self._num_fresh
            self._num_fresh -= 1
        self._generations[number] = generation
        self.num_used += 1
        return self.offset + number * self.page_nbytes

    def give_back(self, slot: Slot) -> None:
        """Free the slot of that grant."""
        number = self.number_of(slot.offset)
        assert self._generations[number] == slot.generation, f"{slot} is not granted"
        self._generations[number] = self.owners[number] = 0
        self.num_used -= 1
        heapq.heappush(self._freed, number)

    def number_of(self, offset: int) -> int:
        return (offset - self.offset) // self.page_nbytes

    def check(self) -> None:
        free = {*self._freed, *range(self.num_slots - self._num_fresh, self.num_slots)}
        assert len(free) == self.num_free == len(self._freed) + self._num_fresh
        for number, generation in enumerate(self._generations):
            assert (generation == 0) == (number in free), (self.offset, number)


class Segment:
    """Slot allocator over ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0, nbytes
        self.nbytes = nbytes
        self.used_nbytes = 0
        self.num_used = 0
        self._slab_nbytes = max(1, min(nbytes // SLABS_PER_SEGMENT, SLAB_NBYTES_MAX))
        self._extents: list[tuple[int, int]] = [(0, nbytes)]  # (offset, nbytes), by offset
        self._slabs: dict[int, Slab] = {}
        self._by_id: dict[int, Slab] = {}
        self._free_ids: list[int] = []  # a heap
        self._offsets: list[int] = []  # of slabs, sorted
        self._partial: dict[int, list[int]] = {}  # page_nbytes -> slabs with a free slot, sorted
        self._generation = 0

    def can_allocate(self, page_nbytes: int) -> bool:
        return bool(self._partial.get(page_nbytes)) or any(
            n >= page_nbytes for _, n in self._extents
        )

    def allocate(self, page_nbytes: int) -> Slot | None:
        """Grant one slot with a new generation; None when no slab has or can get room."""
        assert page_nbytes > 0, page_nbytes
        partial = self._partial.setdefault(page_nbytes, [])
        if not partial and not self._open_slab(page_nbytes):
            del self._partial[page_nbytes]
            return None
        slab = self._slabs[partial[0]]
        self._generation += 1
        offset = slab.take(self._generation)
        if not slab.num_free:
            del partial[0]
        self.num_used += 1
        self.used_nbytes += page_nbytes
        return Slot(offset, page_nbytes, self._generation)

    def free(self, slot: Slot) -> None:
        """Take a slot back; it must be the grant that is out."""
        slab = self.slab_of(slot)
        was_full = not slab.num_free
        slab.give_back(slot)
        self.num_used -= 1
        self.used_nbytes -= slot.nbytes
        if not slab.num_used:
            self._close_slab(slab)
        elif was_full:
            insort(self._partial.setdefault(slab.page_nbytes, []), slab.offset)

    def slab_of(self, slot: Slot) -> Slab:
        index = bisect_left(self._offsets, slot.offset + 1) - 1
        return self._slabs[self._offsets[index]]

    def slab(self, slab_id: int) -> Slab:
        return self._by_id[slab_id]

    def slabs(self) -> list[Slab]:
        """All slabs, by offset."""
        return [self._slabs[offset] for offset in self._offsets]

    def num_free_slots(self, page_nbytes: int) -> int:
        """Slots of this size that could be granted without freeing anything."""
        in_slabs = sum(self._slabs[o].num_free for o in self._partial.get(page_nbytes, ()))
        return in_slabs + sum(n // page_nbytes for _, n in self._extents)

    def _open_slab(self, page_nbytes: int) -> bool:
        for i, (offset, nbytes) in enumerate(self._extents):
            if nbytes < page_nbytes:
                continue
            num_slots = max(1, min(nbytes, self._slab_nbytes) // page_nbytes)
            slab_id = heapq.heappop(self._free_ids) if self._free_ids else len(self._by_id)
            slab = Slab(slab_id, offset, page_nbytes, num_slots)
            self._by_id[slab_id] = slab
            rest = nbytes - slab.nbytes
            self._extents[i : i + 1] = [(offset + slab.nbytes, rest)] if rest else []
            self._slabs[offset] = slab
            insort(self._offsets, offset)
            insort(self._partial[page_nbytes], offset)
            return True
        return False

    def _close_slab(self, slab: Slab) -> None:
        del self._slabs[slab.offset]
        del self._by_id[slab.slab_id]
        heapq.heappush(self._free_ids, slab.slab_id)
        del self._offsets[bisect_left(self._offsets, slab.offset)]
        partial = self._partial.get(slab.page_nbytes, [])
        index = bisect_left(partial, slab.offset)
        if index < len(partial) and partial[index] == slab.offset:
            del partial[index]
        if not partial:
            self._partial.pop(slab.page_nbytes, None)
        self._give_extent(slab.offset, slab.nbytes)

    def _give_extent(self, offset: int, nbytes: int) -> None:
        """Insert a free extent and join it with its neighbours."""
        i = bisect_left(self._extents, (offset, 0))
        if i < len(self._extents) and offset + nbytes == self._extents[i][0]:
            nbytes += self._extents.pop(i)[1]
        if i and sum(self._extents[i - 1]) == offset:
            offset, before = self._extents.pop(i - 1)
            nbytes += before
            i -= 1
        self._extents.insert(i, (offset, nbytes))

    def check(self) -> None:
        """Assert the invariants; O(slots)."""
        pieces = sorted([*self._extents, *((s.offset, s.nbytes) for s in self._slabs.values())])
        end = 0
        for offset, nbytes in pieces:
            assert offset == end, (pieces, end)
            assert nbytes > 0, pieces
            end = offset + nbytes
        assert end == self.nbytes
        for slab in self._slabs.values():
            slab.check()
            in_partial = slab.offset in self._partial.get(slab.page_nbytes, ())
            assert in_partial == bool(slab.num_free), slab.offset
            assert slab.num_used, slab.offset
            assert self._by_id[slab.slab_id] is slab
        assert len(self._by_id) == len(self._slabs)
        assert self.num_used == sum(slab.num_used for slab in self._slabs.values())
        used = sum(slab.num_used * slab.page_nbytes for slab in self._slabs.values())
        assert self.used_nbytes == used
