"""How a request is cut into pieces: a pure rule that both sides apply to the same lengths.

Knows no memory. A long run becomes pieces of its own, which travel without a copy from region to
region. Short runs are packed: several of them share one piece, gathered and scattered through a
bounce buffer, because a message costs more than the copy of a few kilobytes::

    runs      |aaaaaaaaaaaaaaaaaaaa|bb|c|ddd|eeeeeeeeee|
    pieces    |aaaaaaaa|aaaaaaaa|aa| b+c+d |eeeeeeeeee|

Where both sides *gather*, a message may lie in several places: long runs that fit a piece share it
too, and still travel without a copy from region to region::

    runs      |aaaaaa|bbbbbb|cccccc|dd|e|ffffff|gggggg|
    pieces    | aaaaaa+bbbbbb|cccccc|d+e| ffffff+gggggg |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transfer.errors import FrameInvalid
from transfer.ucx_codec import MAX_PIECES

MIN_PIECE_NBYTES = 4096
MAX_PIECE_NBYTES = 64 << 20
PACKED_RUN_NBYTES = 32 * 1024  # a run below this is packed
MAX_PACKED_NBYTES = 256 * 1024  # the size of a bounce buffer


class Piece(NamedTuple):
    """``nbytes`` of run ``first`` from ``skip`` on; or runs ``first`` to ``first + num_runs``."""

    first: int
    num_runs: int
    skip: int
    nbytes: int


def cut(
    lengths: Sequence[int], piece_nbytes: int, *, packs: bool, gathers: bool = False
) -> list[Piece]:
    """Return the pieces of runs of these lengths, in order.

    Args:
        lengths: bytes of each run, none of them 0.
        piece_nbytes: the longest piece.
        packs: whether short runs may share a piece.
        gathers: whether long runs may; a piece has either short ones or long ones.

    Raises:
        FrameInvalid: an impossible ``piece_nbytes``, or too many pieces.
    """
    if not MIN_PIECE_NBYTES <= piece_nbytes <= MAX_PIECE_NBYTES:
        raise FrameInvalid(f"pieces of {piece_nbytes} bytes are not possible")
    if sum(lengths) // piece_nbytes + len(lengths) > MAX_PIECES:
        raise FrameInvalid(f"{len(lengths)} runs make more than {MAX_PIECES} pieces")
    pieces: list[Piece] = []
    room, last_short = 0, False  # left in the last piece, for runs of its kind
    for index, nbytes in enumerate(lengths):
        short = packs and nbytes < PACKED_RUN_NBYTES
        if nbytes <= room and short == last_short:
            last = pieces[-1]
            pieces[-1] = Piece(last.first, last.num_runs + 1, 0, last.nbytes + nbytes)
            room -= nbytes
            continue
        last_short = short
        if nbytes <= piece_nbytes:
            pieces.append(Piece(index, 1, 0, nbytes))
            limit = MAX_PACKED_NBYTES if short else piece_nbytes if gathers else 0
            room = min(piece_nbytes, limit) - nbytes
            continue
        room = 0
        pieces += [
            Piece(index, 1, skip, min(piece_nbytes, nbytes - skip))
            for skip in range(0, nbytes, piece_nbytes)
        ]
    return pieces
