"""Slots of several sizes in one file.

Owns which slot holds which row. Knows no keys and no bytes. The file is cut into equal slabs; a
slab serves one slot size while it holds a page, and any size again when it is empty::

    | block 0 | slab 0: 24 KiB slots ....| slab 1: 364 KiB slots ...| slab 2: empty ... |

Where the slabs lie follows from the superblock, what they serve from the pages in them: nothing
else needs to be written down.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.ssd.config import BLOCK_NBYTES

Integers = npt.NDArray[np.int64]


class Slab:
    """A run of equal slots. ``rows[i]`` is meaningful where ``used[i]`` is 1."""

    def __init__(self, index: int, slot_nbytes: int, num_slots: int) -> None:
        self.index = index
        self.slot_nbytes = slot_nbytes
        self.used = bytearray(num_slots)
        self.rows = array("q", bytes(8 * num_slots))
        self.is_closed = False  # no slot of it is granted: it is being emptied
        self.free = array("q", range(num_slots - 1, -1, -1))  # the last one goes first

    def in_steps(self, num_slots: int) -> Iterator[list[int]]:
        """The rows held, as they are at each step over so many slots."""
        for start in range(0, len(self.used), num_slots):
            part = slice(start, start + num_slots)
            held = zip(self.rows[part], self.used[part], strict=True)
            yield [row for row, used in held if used]

    @property
    def num_used(self) -> int:
        return len(self.used) - len(self.free)


class Slabs:
    """Slot allocator over ``num_slabs`` slabs."""

    def __init__(self, num_slabs: int, slab_nbytes: int) -> None:
        self.num_slabs = num_slabs
        self.slab_nbytes = slab_nbytes
        self._slabs: dict[int, Slab] = {}
        self._empty = list(range(num_slabs))  # a heap: low offsets first
        self._partial: dict[int, dict[int, Slab]] = {}  # slot_nbytes -> slabs with a free slot

    def has_room(self, slot_nbytes: int) -> bool:
        if slot_nbytes > self.slab_nbytes:
            return False
        return bool(self._empty) or bool(self._partial.get(slot_nbytes))

    @property
    def num_used(self) -> int:
        return sum(slab.num_used for slab in self._slabs.values())

    def holds(self, offset: int, slot_nbytes: int) -> bool:
        """True when a slot of that size begins there and is in use."""
        slab = self.slab_at(offset)
        i, beside = divmod(offset - self.offset_of(slab.index), slab.slot_nbytes)
        return not beside and slab.slot_nbytes == slot_nbytes and bool(slab.used[i])

    def allocate(self, slot_nbytes: int, row: int) -> int | None:
        """Return the offset of a slot, now held by ``row``; None when there is no room."""
        if not self.has_room(slot_nbytes):
            return None
        partial = self._partial.setdefault(slot_nbytes, {})
        if not partial:
            slab = self._open(heapq.heappop(self._empty), slot_nbytes)
        else:
            slab = next(iter(partial.values()))
        i = slab.free.pop()
        slab.used[i], slab.rows[i] = 1, row
        if not slab.free:
            del partial[slab.index]
        return self.offset_of(slab.index) + i * slot_nbytes

    def free(self, offset: int) -> None:
        slab = self.slab_at(offset)
        i = (offset - self.offset_of(slab.index)) // slab.slot_nbytes
        assert slab.used[i], f"slot at {offset} is free"
        slab.used[i] = 0
        slab.free.append(i)
        if not slab.num_used:
            self._partial.get(slab.slot_nbytes, {}).pop(slab.index, None)
            del self._slabs[slab.index]
            heapq.heappush(self._empty, slab.index)
        elif not slab.is_closed:
            self._partial.setdefault(slab.slot_nbytes, {})[slab.index] = slab

    def close(self, slab: Slab) -> None:
        """Grant no slot of ``slab`` until it is empty, or reopened."""
        slab.is_closed = True
        partial = self._partial.get(slab.slot_nbytes, {})
        if partial.get(slab.index) is slab:
            del partial[slab.index]

    def reopen(self, slab: Slab) -> None:
        """Undo ``close``; does nothing for a slab that was emptied."""
        slab.is_closed = False
        if self._slabs.get(slab.index) is slab and slab.free:
            self._partial.setdefault(slab.slot_nbytes, {})[slab.index] = slab

    def slab_at(self, offset: int) -> Slab:
        return self._slabs[(offset - BLOCK_NBYTES) // self.slab_nbytes]

    def offset_of(self, index: int) -> int:
        return BLOCK_NBYTES + index * self.slab_nbytes

    def fitting(self, offsets: Integers, slot_sizes: Integers) -> npt.NDArray[np.bool_]:
        """Which of the slots found at start can all be there; later ones win over earlier ones.

        A slab keeps the slot size of the last slot named in it.
        """
        slab = (offsets - BLOCK_NBYTES) // self.slab_nbytes
        inside: npt.NDArray[np.bool_] = (
            (offsets >= BLOCK_NBYTES) & (slab < self.num_slabs) & (slot_sizes >= BLOCK_NBYTES)
        )
        slab[~inside] = 0
        serves: Integers = np.zeros(self.num_slabs, dtype=np.int64)
        serves[slab[inside]] = slot_sizes[inside]  # of equal indices, numpy keeps the last
        in_slab = offsets - BLOCK_NBYTES - slab * self.slab_nbytes
        whole = in_slab + slot_sizes <= self.slab_nbytes
        fits: npt.NDArray[np.bool_] = inside & whole & (slot_sizes == serves[slab])
        fits &= in_slab % np.maximum(slot_sizes, 1) == 0
        return fits

    def restore(self, offsets: Integers, slot_sizes: Integers) -> None:
        """Hold slots that fit, row i at ``offsets[i]``; into empty slabs only."""
        index = (offsets - BLOCK_NBYTES) // self.slab_nbytes
        order = np.argsort(index, kind="stable")
        starts = np.flatnonzero(np.diff(index[order], prepend=np.int64(-1)))
        for rows in np.split(order, starts[1:]) if len(order) else ():
            slab = self._open(int(index[rows[0]]), int(slot_sizes[rows[0]]))
            at = (offsets[rows] - self.offset_of(slab.index)) // slab.slot_nbytes
            np.frombuffer(slab.used, dtype=np.uint8)[at] = 1
            np.frombuffer(slab.rows, dtype=np.int64)[at] = rows
            slab.free = array("q", [i for i in slab.free if not slab.used[i]])
            if not slab.free:
                del self._partial[slab.slot_nbytes][slab.index]
        self._empty = [i for i in range(self.num_slabs) if i not in self._slabs]

    def check(self) -> None:
        """Assert that slabs and the empty ones are all there are, and that counts agree."""
        assert sorted([*self._empty, *self._slabs]) == list(range(self.num_slabs))
        for slab in self._slabs.values():
            assert slab.num_used == sum(slab.used) > 0, slab.index
            in_partial = slab.index in self._partial.get(slab.slot_nbytes, {})
            assert in_partial == bool(slab.free and not slab.is_closed), slab.index
            assert all(not slab.used[i] for i in slab.free), slab.index

    def _open(self, index: int, slot_nbytes: int) -> Slab:
        slab = Slab(index, slot_nbytes, self.slab_nbytes // slot_nbytes)
        self._slabs[index] = slab
        self._partial.setdefault(slot_nbytes, {})[index] = slab
        return slab
