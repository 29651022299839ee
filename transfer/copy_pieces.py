"""Cuts a copy into pieces, and moves the bytes of one. Knows no threads and no peers.

Owns the choice of how bytes are moved. Both ways end in the C library's copy; they differ in what
else they cost (Python 3.11, one core of an EPYC 9005, 2026-11)::

    memoryview assignment   0.1 µs a range, keeps the interpreter lock: for short ranges
    ctypes.memmove          0.35 µs a range, releases the lock: for long ones, so that the event
                            loop and other copy threads run meanwhile
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from transfer.buffers import address_of
from transfer.interface import Range

HOLD_LOCK_NBYTES = 16 << 10  # 0.4 µs or less: getting the interpreter lock back would cost more
MAX_PIECE_RANGES = 256
LONG_COPY_NBYTES = 8 << 20
LONG_PIECE = 4  # times as long


def piece_nbytes_of(copy_nbytes: int, piece_nbytes: int) -> int:
    """Return how large the pieces of a copy are.

    After each piece the interpreter runs with cold caches, some 10 µs: a tenth of what it takes to
    copy 1 MiB. So long copies have longer pieces; still each takes a fraction of a millisecond.
    """
    return LONG_PIECE * piece_nbytes if copy_nbytes >= LONG_COPY_NBYTES else piece_nbytes


def cut(ranges: Sequence[Range], piece_nbytes: int) -> Iterator[list[Range]]:
    """Yield pieces of at most ``piece_nbytes`` and ``MAX_PIECE_RANGES``, in order.

    Only a range that is longer than a piece is cut: a piece may be shorter than it could be, which
    costs less than one more range.
    """
    piece: list[Range] = []
    room = piece_nbytes
    for whole in ranges:
        rest = whole
        if piece and (rest.nbytes > room or len(piece) == MAX_PIECE_RANGES):
            yield piece
            piece, room = [], piece_nbytes
        while rest.nbytes > piece_nbytes:
            remote, local, nbytes = rest
            yield [Range(remote, local, piece_nbytes)]
            rest = Range(remote + piece_nbytes, local + piece_nbytes, nbytes - piece_nbytes)
        piece.append(rest)
        room -= rest.nbytes
    if piece:
        yield piece


class Mover:
    """Moves ranges from one memory to another; keeps both alive."""

    __slots__ = ("_addresses", "_source", "_target", "_to_local")

    def __init__(self, local: memoryview, remote: memoryview, *, to_local: bool) -> None:
        self._to_local = to_local
        self._source, self._target = (remote, local) if to_local else (local, remote)
        assert not self._target.readonly, "a copy into memory that is read-only"
        self._addresses: tuple[int, int] | None = None

    def move(self, piece: Sequence[Range]) -> None:
        """Copy every range of ``piece``. The ranges lie in both memories: the caller checked."""
        source, target = self._source, self._target
        for remote, local, nbytes in piece:
            start, end = (remote, local) if self._to_local else (local, remote)
            if nbytes <= HOLD_LOCK_NBYTES:
                target[end : end + nbytes] = source[start : start + nbytes]
            else:
                self._move_long(start, end, nbytes)

    def _move_long(self, start: int, end: int, nbytes: int) -> None:
        assert 0 <= start <= self._source.nbytes - nbytes, "a copy out of bounds of its source"
        assert 0 <= end <= self._target.nbytes - nbytes, "a copy out of bounds of its target"
        if self._addresses is None:
            self._addresses = (address_of(self._source), address_of(self._target))
        source, target = self._addresses
        ctypes.memmove(target + end, source + start, nbytes)
