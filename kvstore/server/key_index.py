"""From 32-byte keys to rows: a hash table in two arrays, without an object per key.

Owns the keys of the rows and an open-addressed table of row numbers (linear probing, at most half
full, deletion by shifting back: no tombstones). Knows nothing else of a row.

::

    slots   | 0 | 7 | 3 | 0 | 9 | ...      0: empty          home(key) = top bits of hash(key)
              ▲   ▲   ▲
              │   └───┴─ a run: every key is between its home and the next empty slot
    words   | row 0: null | row 1: 4 x uint64 | ...           hashes | uint32 per row |

Keys are content hashes, but a client may send any 32 bytes: so they are hashed again, by a function
that is drawn by ``seed`` from a strongly universal family (the upper half of the sum of the key's
eight 32-bit words, each times a random 64-bit number; Thorup 2015, "High Speed Hashing for Integers
and Strings"). Who does not know the seed cannot choose keys that share a run. One lookup costs
about 0.7 us; ``find_many`` works on whole batches: about 0.05 us a key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.page import KEY_NBYTES
from kvstore.server.columns import NULL_ROW, NUM_ROWS_FIRST

_HALVES = struct.Struct("<8I")
_MASK_64 = (1 << 64) - 1
_HASH_BITS = 32

Rows = npt.NDArray[np.int64]


class KeyIndex:
    """See the module's docstring. Rows are chosen by the caller, who also grows the index.

    Args:
        seed: nobody's business; what is found where does not depend on it.

    Attributes:
        primed: hashes that are known already.
    """

    def __init__(self, seed: bytes = b"") -> None:
        drawn = hashlib.shake_256(seed).digest(9 * 8)
        self._factors = struct.unpack("<9Q", drawn)  # eight, and what is added
        self._factor_array = np.array(self._factors[:8], np.uint64)
        self.primed: dict[bytes, int] = {}
        self._num = 0
        self._num_rows = 0
        self._words: npt.NDArray[np.uint64] = np.zeros((0, 4), "<u8")
        self._hashes: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._slots: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.grow(NUM_ROWS_FIRST, 0)

    def __len__(self) -> int:
        return self._num

    def grow(self, num_rows: int, used: int) -> None:
        """Make room for ``num_rows`` rows, of which the first ``used`` may have keys."""
        used = min(used, self._num_rows)
        words = np.zeros((num_rows, 4), "<u8")
        words[:used] = self._words[:used]
        hashes = np.zeros(num_rows, np.uint32)
        hashes[:used] = self._hashes[:used]
        indexed = self._slots[self._slots != NULL_ROW].astype(np.int64)
        self._num_rows, self._words, self._hashes = num_rows, words, hashes
        self._bits = (2 * num_rows - 1).bit_length()
        self._mask = (1 << self._bits) - 1
        self._shift = _HASH_BITS - self._bits
        assert self._shift >= 0, num_rows
        self._slots = np.zeros(1 << self._bits, np.int32)
        self._place(indexed)
        in_bytes: Any = words.reshape(-1).view(np.uint8)
        self._key_bytes: Any = memoryview(in_bytes)
        self._hash: Any = memoryview(hashes)  # type: ignore[arg-type]
        self._slot: Any = memoryview(self._slots)  # type: ignore[arg-type]

    def _place(self, rows: Rows) -> None:
        """Insert many rows into an empty table: whoever loses a slot tries the next one."""
        at = (self._hashes[rows] >> np.uint32(self._shift)).astype(np.int64)
        while len(rows):
            free = self._slots[at] == NULL_ROW
            self._slots[at[free]] = rows[free]
            lost = self._slots[at] != rows
            rows, at = rows[lost], (at[lost] + 1) & self._mask

    # ---- one key

    def key(self, row: int) -> bytes:
        """The key last given to ``row``, indexed or not."""
        return bytes(self._key_bytes[row * KEY_NBYTES : (row + 1) * KEY_NBYTES])

    def find(self, key: bytes) -> int:
        """The row of ``key``; ``NULL_ROW`` when it is not indexed (or no key at all)."""
        if len(key) != KEY_NBYTES:
            return NULL_ROW
        hashed = self._hash_of(key)
        slots, hashes, mask = self._slot, self._hash, self._mask
        at = hashed >> self._shift
        while row := slots[at]:
            if hashes[row] == hashed and self.key(row) == key:
                return row  # type: ignore[no-any-return]
            at = (at + 1) & mask
        return NULL_ROW

    def _hash_of(self, key: bytes) -> int:
        if self.primed and (primed := self.primed.get(key)) is not None:
            return primed
        a, b, c, d, e, f, g, h = _HALVES.unpack(key)
        fa, fb, fc, fd, fe, ff, fg, fh, plus = self._factors
        total: int = a * fa + b * fb + c * fc + d * fd + e * fe + f * ff + g * fg + h * fh + plus
        return (total & _MASK_64) >> 32

    def insert(self, row: int, key: bytes) -> None:
        """Index ``key``, which must be new, under ``row``."""
        hashed = self._hash_of(key)
        self._key_bytes[row * KEY_NBYTES : (row + 1) * KEY_NBYTES] = key
        self._hash[row] = hashed
        slots, mask = self._slot, self._mask
        at = hashed >> self._shift
        while slots[at]:
            at = (at + 1) & mask
        slots[at] = row
        self._num += 1

    def remove(self, row: int) -> None:
        """Take an indexed row out; ``key`` still tells its key."""
        slots, hashes, mask, shift = self._slot, self._hash, self._mask, self._shift
        hole = hashes[row] >> shift
        while slots[hole] != row:
            assert slots[hole], f"row {row} is not indexed"
            hole = (hole + 1) & mask
        at = hole
        while follower := slots[at := (at + 1) & mask]:
            home = hashes[follower] >> shift
            if (at - home) & mask >= (at - hole) & mask:  # may stand in the hole
                slots[hole] = follower
                hole = at
        slots[hole] = NULL_ROW
        self._num -= 1

    def note(self, row: int, key: bytes) -> None:
        """Have ``key`` tell this key of a row that is not indexed."""
        self._key_bytes[row * KEY_NBYTES : (row + 1) * KEY_NBYTES] = key

    # ---- many keys

    def hashed(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """What ``primed`` is to be while each of ``keys`` is looked at several times; keys of
        another length are left out. Indexes of one seed may share it."""
        keys = [key for key in keys if len(key) == KEY_NBYTES]
        return dict(zip(keys, self._hashes_of(b"".join(keys)).tolist(), strict=True))

    def _hashes_of(self, packed: bytes) -> npt.NDArray[np.uint32]:
        halves = np.frombuffer(packed, "<u4").reshape(-1, 8).astype(np.uint64)
        totals = halves @ self._factor_array + np.uint64(self._factors[8])
        return (totals >> np.uint64(32)).astype(np.uint32)

    def packed_keys(self, rows: Rows) -> bytes:
        """The keys last given to ``rows``, one after the other."""
        return self._words[rows].tobytes()

    def find_many(self, packed: bytes) -> Rows:
        """The row of each packed key; ``NULL_ROW`` where it is not indexed."""
        words = np.frombuffer(packed, "<u8").reshape(-1, 4)
        hashed = self._hashes_of(packed)
        at = (hashed >> np.uint32(self._shift)).astype(np.int64)
        found = np.zeros(len(words), np.int64)
        open_ = np.arange(len(words))  # positions that are not decided yet
        while len(open_):
            rows = self._slots.take(at)
            taken = rows != NULL_ROW
            same = self._hashes.take(rows) == hashed
            same &= taken
            hits = np.flatnonzero(same)
            equal = (self._words.take(rows[hits], axis=0) == words.take(open_[hits], axis=0)).all(1)
            hits = hits[equal]
            found[open_[hits]] = rows[hits]
            taken[hits] = False
            left = np.flatnonzero(taken)
            open_, hashed, at = open_[left], hashed[left], (at[left] + 1) & self._mask
        return found

    # ---- proof

    def longest_run(self) -> int:
        """Slots that the worst search looks at; O(slots)."""
        empty = np.flatnonzero(self._slots == NULL_ROW)
        around = np.append(empty, empty[0] + len(self._slots))
        return int(np.diff(around).max())

    def check(self) -> None:
        """Assert that every indexed row is found by its key; O(keys)."""
        rows = self._slots[self._slots != NULL_ROW]
        assert len(rows) == self._num, (len(rows), self._num)
        assert 2 * self._num <= len(self._slots)
        found = self.find_many(self._words[rows].tobytes())
        assert (found == rows).all(), "a key is not where its hash says"
