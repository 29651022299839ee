"""The pieces of one request on their way, out of or into this side's memory.

Owns what is known of each piece, and the gate: whoever lets UCX touch the memory is inside of it,
piece by piece. Knows no UCX; ``UcxLink`` carries them. At the owner the gate is the region's, which
``revoke`` closes. At the asking side it is the operation's ``Quay``.

::

    Shipment   loaded ──▶ aboard ──▶ sent         ended: all sent, or called off and none aboard
    Delivery   announced ──▶ aboard ──▶ unloaded  ended: all unloaded, or called off and none aboard
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transfer.errors import FrameInvalid
from transfer.ucx_cargo import Cargo
from transfer.ucx_pieces import Piece


class Access(Protocol):
    """Permission to touch memory while a piece is aboard (``Gate`` is one)."""

    @property
    def is_open(self) -> bool: ...

    def enter(self) -> bool: ...

    def leave(self) -> None: ...


class Freight:
    """What both directions have in common."""

    def __init__(
        self, request: int, cargo: Cargo, access: Access, on_end: Callable[[bool], None]
    ) -> None:
        """Args:
        on_end: called once, when no piece is aboard any more, with whether all of them moved.
        """
        self.request = request
        self.num_aboard = 0
        self._cargo = cargo
        self._access = access
        self._on_end = on_end
        self._called_off = False
        self._ended = False

    @property
    def unwanted(self) -> bool:
        """True when nobody wants the pieces that are still aboard, and somebody waits for them."""
        return self._called_off or not self._access.is_open

    @property
    def ended(self) -> bool:
        return self._ended

    def call_off(self) -> None:
        """Move no further piece. Idempotent."""
        self._called_off = True
        if not self.num_aboard:
            self._end(complete=False)

    def quarantine(self) -> None:
        """UCX may go on to touch this memory after the end: nobody else uses it any more."""
        self._cargo.quarantine()

    def _board(self) -> bool:
        if self._ended or self._called_off or not self._access.enter():
            return False
        self.num_aboard += 1
        return True

    def _disembark(self) -> None:
        self.num_aboard -= 1
        self._access.leave()

    def _end(self, *, complete: bool) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(complete)


class Shipment(Freight):
    """Pieces to send."""

    def __init__(
        self, request: int, cargo: Cargo, access: Access, on_end: Callable[[bool], None]
    ) -> None:
        super().__init__(request, cargo, access, on_end)
        self._next = 0

    def load(self) -> tuple[int, int, object] | None:
        """Return number, length and bytes of the next piece; None if none is left, or may go."""
        index = self._next
        if index == len(self._cargo.pieces):
            return None
        if not self._board():
            self.call_off()
            return None
        self._next = index + 1
        piece = self._cargo.pieces[index]
        return index, piece.nbytes, self._cargo.load(piece)

    def put_back(self) -> None:
        """The piece that was loaded last could not be sent yet."""
        self._next -= 1
        self._disembark()

    def sent(self, *, failed: bool) -> None:
        """One piece has left this side's memory."""
        self._disembark()
        self._called_off |= failed
        if not self.num_aboard and (self._called_off or self._next == len(self._cargo.pieces)):
            self._end(complete=not self._called_off)


class Delivery(Freight):
    """Pieces to receive; each exactly once, in any order."""

    def __init__(
        self, request: int, cargo: Cargo, access: Access, on_end: Callable[[bool], None]
    ) -> None:
        super().__init__(request, cargo, access, on_end)
        self._awaited = bytearray(b"\x01") * len(cargo.pieces)
        self._num_left = len(cargo.pieces)

    @property
    def complete(self) -> bool:
        return self._num_left == 0

    def berth(self, index: int, nbytes: int) -> tuple[Piece, object] | None:
        """Return where an announced piece goes; None if it is to be dropped.

        Raises:
            FrameInvalid: no such piece is awaited.
        """
        if index >= len(self._awaited) or not self._awaited[index]:
            raise FrameInvalid(f"piece {index} of request {self.request} is not awaited")
        piece = self._cargo.pieces[index]
        if piece.nbytes != nbytes:
            raise FrameInvalid(f"piece {index} has {nbytes} bytes instead of {piece.nbytes}")
        if not self._board():
            self.call_off()
            return None
        self._awaited[index] = 0
        return piece, self._cargo.berth(piece)

    def put_back(self, index: int) -> None:
        """The piece could not be received yet."""
        self._awaited[index] = 1
        self._disembark()

    def landed(self, piece: Piece, berth: object, *, failed: bool) -> None:
        """One piece has arrived, or will not."""
        if failed:
            self._called_off = True
        elif piece.num_runs > 1 and self._access.is_open and not self._called_off:
            self._cargo.unload(piece, berth)
        self._num_left -= 1
        self._disembark()
        if not self.num_aboard and (self._called_off or not self._num_left):
            self._end(complete=not self._called_off)
