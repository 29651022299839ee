"""Pieces of one request, without UCX: counted, gated, each moved once, quiet at the end."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.transfer.bulk_harness import pattern
from transfer.errors import FrameInvalid
from transfer.gate import Gate
from transfer.region import HostRegion, RegionTable
from transfer.ucx_binding import Runs
from transfer.ucx_cargo import Cargo
from transfer.ucx_freight import Delivery, Shipment
from transfer.ucx_pieces import MAX_PACKED_NBYTES, PACKED_RUN_NBYTES, Piece, cut

SPANS = [(0, 10), (20, 100_000), (200_000, 5), (200_010, 7)]
PIECE_NBYTES = 65_536


def cargo_in(memory: bytearray) -> Cargo:
    region = RegionTable(lambda *_: b"").register_host(memoryview(memory))
    assert isinstance(region, HostRegion)
    return Cargo(region, SPANS, piece_nbytes=PIECE_NBYTES, packs=True)


class Both:
    """A shipment and a delivery of the same runs, in two memories."""

    def __init__(self) -> None:
        self.source = bytearray(pattern(300_000).tobytes())
        self.target = bytearray(300_000)
        self.gate = Gate()
        self.ended: list[bool] = []
        self.shipment = Shipment(1, cargo_in(self.source), Gate(), lambda _complete: None)
        self.delivery = Delivery(1, cargo_in(self.target), self.gate, self.ended.append)

    def loaded(self) -> list[tuple[int, bytes]]:
        """Send every piece."""
        pieces = []
        while (piece := self.shipment.load()) is not None:
            index, nbytes, data = piece
            assert memoryview(data).nbytes == nbytes  # type: ignore[arg-type]
            pieces.append((index, bytes(memoryview(data))))  # type: ignore[arg-type]
            self.shipment.sent(failed=False)
        return pieces

    def land(self, index: int, data: bytes) -> None:
        found = self.delivery.berth(index, len(data))
        assert found is not None
        piece, berth = found
        memoryview(berth)[:] = data  # type: ignore[arg-type]
        self.delivery.landed(piece, berth, failed=False)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_land_in_any_order_and_only_where_the_runs_are(seed: int) -> None:
    both = Both()
    pieces = both.loaded()
    random.Random(seed).shuffle(pieces)
    for index, data in pieces:
        assert not both.ended
        both.land(index, data)
    assert both.ended == [True]
    assert both.shipment.ended
    expected = np.zeros(300_000, np.uint8)
    for offset, nbytes in SPANS:
        expected[offset : offset + nbytes] = list(both.source[offset : offset + nbytes])
    assert both.target == expected.tobytes()


def test_a_piece_lands_once_at_its_size_or_not_at_all() -> None:
    both = Both()
    (index, data), *_ = both.loaded()
    for wrong in ((index, len(data) - 1), (99, len(data))):
        with pytest.raises(FrameInvalid):
            both.delivery.berth(*wrong)
    both.land(index, data)
    with pytest.raises(FrameInvalid):
        both.delivery.berth(index, len(data))
    assert both.delivery.num_aboard == 0


def test_what_is_called_off_ends_only_when_nothing_is_aboard() -> None:
    both = Both()
    (index, data), *_ = both.loaded()
    found = both.delivery.berth(index, len(data))
    assert found is not None
    both.delivery.call_off()
    assert both.delivery.unwanted
    assert not both.ended
    piece, berth = found
    both.delivery.landed(piece, berth, failed=False)
    both.delivery.call_off()
    assert both.ended == [False]
    assert both.target == bytes(300_000), "a packed piece was unloaded after it was called off"


def test_a_closed_gate_turns_pieces_away_and_is_left_by_all() -> None:
    both = Both()
    pieces = both.loaded()
    both.land(*pieces[0])
    both.gate.close()  # returns: nobody is inside
    assert both.delivery.berth(pieces[1][0], len(pieces[1][1])) is None
    assert both.ended == [False]


def test_a_shipment_whose_gate_closes_sends_no_more() -> None:
    gate, ended = Gate(), list[bool]()
    shipment = Shipment(1, cargo_in(bytearray(300_000)), gate, ended.append)
    assert shipment.load() is not None
    assert shipment.num_aboard == 1
    shipment.sent(failed=False)
    gate.close()
    assert shipment.load() is None
    assert ended == [False]


def test_a_piece_that_was_put_back_is_the_next_again() -> None:
    both = Both()
    first = both.shipment.load()
    both.shipment.put_back()
    assert both.shipment.num_aboard == 0
    again = both.shipment.load()
    assert first is not None
    assert again is not None
    assert again[0] == first[0]
    data = bytes(memoryview(first[2]))  # type: ignore[arg-type]
    assert both.delivery.berth(0, len(data)) is not None
    both.delivery.put_back(0)
    both.land(0, data)


def test_short_runs_share_pieces_and_long_ones_do_not() -> None:
    short = PACKED_RUN_NBYTES - 1
    assert cut([5, 6, 7], 4096, packs=True) == [Piece(0, 3, 0, 18)]
    assert [p.num_runs for p in cut([5, PACKED_RUN_NBYTES, 6], 1 << 20, packs=True)] == [1, 1, 1]
    assert len(cut([5, 6, 7], 4096, packs=False)) == 3
    assert max(p.nbytes for p in cut([short] * 100, 1 << 20, packs=True)) <= MAX_PACKED_NBYTES
    assert cut([10_000], 4096, packs=True) == [
        Piece(0, 1, 0, 4096),
        Piece(0, 1, 4096, 4096),
        Piece(0, 1, 8192, 1808),
    ]


def test_long_runs_share_pieces_where_both_sides_gather_and_never_with_short_ones() -> None:
    page = 368_640
    shared = cut([page] * 64, 4 << 20, packs=True, gathers=True)
    assert [piece.num_runs for piece in shared] == [11] * 5 + [9]
    mixed = cut([5, PACKED_RUN_NBYTES, PACKED_RUN_NBYTES, 6, 7], 1 << 20, packs=True, gathers=True)
    assert [piece.num_runs for piece in mixed] == [1, 2, 2]


LONG_SPANS = [(0, 40_000), (50_000, 40_000), (100_000, 5), (100_010, 7), (120_000, 50_000)]


def long_cargo(memory: bytearray, *, takes_runs: bool) -> Cargo:
    region = RegionTable(lambda *_: b"").register_host(memoryview(memory))
    return Cargo(
        region,
        LONG_SPANS,
        piece_nbytes=PIECE_NBYTES * 2,
        packs=True,
        gathers=True,
        takes_runs=takes_runs,
    )


def test_a_gathered_piece_is_the_memory_of_its_runs_and_is_not_copied() -> None:
    memory = bytearray(pattern(300_000).tobytes())
    cargo = long_cargo(memory, takes_runs=True)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    first, short, last = cargo.pieces
    for place in (cargo.load(first), cargo.berth(first)):
        assert isinstance(place, Runs)
        assert place.runs == [(start, 40_000), (start + 50_000, 40_000)]
    cargo.unload(first, cargo.berth(first))  # the bytes are where they belong
    assert isinstance(cargo.berth(short), bytearray)
    assert (last.num_runs, last.nbytes) == (1, 50_000)


def test_a_side_that_cannot_gather_gives_the_same_bytes_by_way_of_a_buffer() -> None:
    source, target = bytearray(pattern(300_000).tobytes()), bytearray(300_000)
    sent, received = long_cargo(source, takes_runs=False), long_cargo(target, takes_runs=False)
    assert sent.pieces == long_cargo(source, takes_runs=True).pieces, "both sides cut alike"
    for piece in sent.pieces:
        berth = received.berth(piece)
        memoryview(berth)[:] = memoryview(sent.load(piece))  # type: ignore[arg-type]
        received.unload(piece, berth)
    for offset, nbytes in LONG_SPANS:
        assert target[offset : offset + nbytes] == source[offset : offset + nbytes]
    assert target.count(0) >= 300_000 - sum(nbytes for _, nbytes in LONG_SPANS)
