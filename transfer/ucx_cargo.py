"""The memory side of one request: which bytes each of its pieces is.

Owns nothing but a list of runs in one region, and bounce buffers while they are in use. Knows no
UCX and no peers. A piece of one run is a part of the region itself, on whatever device; one of
several long runs is all of these parts; a packed piece is a bounce buffer of the host.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transfer.buffers import address_of
from transfer.device_memory import DeviceMemory
from transfer.region import DeviceRegion, RegisteredRegion, Spans
from transfer.ucx_binding import Runs
from transfer.ucx_pieces import PACKED_RUN_NBYTES, Piece, cut

_LOG = logging.getLogger(__name__)


class Cargo:
    """The runs of a request in this side's region, and how they are cut."""

    def __init__(
        self,
        region: RegisteredRegion,
        spans: Spans,
        *,
        piece_nbytes: int,
        packs: bool,
        gathers: bool = False,
        takes_runs: bool = False,
    ) -> None:
        """Args:
        piece_nbytes, packs, gathers: as for ``cut``; the same on both sides.
        takes_runs: whether this side's UCX takes ``Runs``; else they pass a bounce buffer.
        """
        self._region = region
        self._spans = spans
        self._memory: DeviceMemory | None = None
        if isinstance(region, DeviceRegion):
            self._memory = region.memory
        else:
            self._view = region.view
            self._address = address_of(region.view) if gathers and takes_runs else 0
        lengths = [nbytes for _, nbytes in spans]
        self.pieces: Sequence[Piece] = cut(lengths, piece_nbytes, packs=packs, gathers=gathers)
        self.nbytes = sum(lengths)

    def load(self, piece: Piece) -> object:
        """Return the bytes to send: memory of the region, or a bounce buffer full of it."""
        if piece.num_runs == 1:
            return self._part(piece)
        if self._address and self._is_long(piece):
            return self._parts(piece)
        view = self._view
        return b"".join(view[offset : offset + nbytes] for offset, nbytes in self._runs(piece))

    def berth(self, piece: Piece) -> object:
        """Return where to receive a piece: memory of the region, or an empty bounce buffer."""
        if piece.num_runs == 1:
            return self._part(piece)
        if self._address and self._is_long(piece):
            return self._parts(piece)
        return bytearray(piece.nbytes)

    def unload(self, piece: Piece, berth: object) -> None:
        """Put a received piece where it belongs."""
        if piece.num_runs == 1 or isinstance(berth, Runs):
            return
        assert isinstance(berth, bytearray), "a packed piece lies in a bounce buffer"
        view, packed, start = self._view, memoryview(berth), 0
        for offset, nbytes in self._runs(piece):
            view[offset : offset + nbytes] = packed[start : start + nbytes]
            start += nbytes

    def quarantine(self) -> None:
        """Take the region out of use, for good: later operations fail with ``RegionRevoked``."""
        if not self._region.revoked:
            _LOG.error(
                "a device may still touch region %d for ucx, after its operation has ended: the "
                "region is revoked; do not reuse its %d bytes, release them",
                self._region.region_id,
                self._region.nbytes,
            )
        self._region.gate.shut()

    def _runs(self, piece: Piece) -> Spans:
        return self._spans[piece.first : piece.first + piece.num_runs]

    def _is_long(self, piece: Piece) -> bool:
        """Whether the runs of the piece are long ones: all of them are, or none."""
        return self._spans[piece.first][1] >= PACKED_RUN_NBYTES

    def _parts(self, piece: Piece) -> Runs:
        start = self._address
        return Runs(self._view, [(start + at, nbytes) for at, nbytes in self._runs(piece)])

    def _part(self, piece: Piece) -> object:
        offset = self._spans[piece.first][0] + piece.skip
        if self._memory is not None:
            return self._memory.array(offset, piece.nbytes)
        return self._view[offset : offset + piece.nbytes]


def may_pack(region: RegisteredRegion) -> bool:
    """Return whether the host can gather from and scatter into ``region``."""
    return not isinstance(region, DeviceRegion)
