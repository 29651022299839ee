"""Messages of a ucx peer that says anything: control messages, cards, and how requests are cut."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.fuzzing import BOUNDED, EDGES, NESTED, allocates_at_most, examples, mutated
from transfer.errors import FrameInvalid, HelloRefused
from transfer.tcp_codec import pack_spans
from transfer.ucx_codec import (
    KEY_BITS,
    MAX_CONTROL_NBYTES,
    MAX_PIECES,
    MAX_REQUEST,
    UCX_PROTOCOL_VERSION,
    Ask,
    Cancel,
    Card,
    Done,
    Tag,
    decode_card,
    decode_control,
    encode_control,
    unpack_tag,
)
from transfer.ucx_pieces import (
    MAX_PACKED_NBYTES,
    MAX_PIECE_NBYTES,
    MIN_PIECE_NBYTES,
    PACKED_RUN_NBYTES,
    Piece,
    cut,
)

ASK = Ask(7, "r", 1 << 16, b"c" * 16, 1 << 20, True, True, pack_spans([(0, 4096), (8192, 1)]))
MESSAGES = [ASK, Done(7, 2, "no"), Cancel(7)]
CARD = Card(UCX_PROTOCOL_VERSION, "tag", 1 << 31, b"address" * 20)
CUT_NBYTES = 16 << 20  # of piece lists; the largest request makes MAX_PIECES of them


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_mutated_control_message_decodes_or_is_invalid(message: Ask | Done | Cancel) -> None:
    valid = encode_control(message)
    for example in examples(1500):
        with example as rng, suppress(FrameInvalid):
            decoded = decode_control(mutated(rng, valid))
            assert 1 <= decoded.request <= MAX_REQUEST
            if isinstance(decoded, Ask):
                decoded.unpack()


@BOUNDED
@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_and_a_card_or_invalid(data: bytes) -> None:
    with suppress(FrameInvalid):
        decode_control(data)
    with suppress(FrameInvalid, HelloRefused):
        decode_card(data, "tag")


def test_nesting_beyond_the_recursion_limit_is_invalid() -> None:
    with pytest.raises(FrameInvalid, match="recursion"):
        decode_control(b"\x93\x03\x07" + NESTED)
    with pytest.raises(FrameInvalid, match="recursion"):
        decode_card(b"\x81\xa1x" + NESTED, "tag")


def test_a_mutated_card_is_a_card_or_refused() -> None:
    valid = msgspec.msgpack.encode(CARD)
    for example in examples(1500):
        with example as rng, suppress(FrameInvalid, HelloRefused):
            card = decode_card(mutated(rng, valid), "tag")
            assert 0 <= card.key < 1 << KEY_BITS


@pytest.mark.parametrize("request_", [0, -1, MAX_REQUEST + 1, 1 << 40])
def test_a_number_that_would_reach_into_the_key_of_another_peer_is_refused(request_: int) -> None:
    for message in MESSAGES:
        forged = msgspec.structs.replace(message, request=request_)
        with pytest.raises(FrameInvalid):
            decode_control(encode_control(forged))


@BOUNDED
@given(st.integers(0, (1 << 64) - 1))
def test_every_tag_says_one_thing(tag: int) -> None:
    parts = Tag(*unpack_tag(tag))
    assert parts.pack() == tag
    assert parts.request <= MAX_REQUEST
    assert parts.piece < MAX_PIECES


lengths = st.lists(st.one_of(st.integers(1, 1 << 16), st.sampled_from(EDGES[1:])), max_size=40)


@BOUNDED
@given(
    lengths,
    st.one_of(st.integers(0, 1 << 27), st.sampled_from(EDGES)),
    st.booleans(),
    st.booleans(),
)
def test_a_request_is_cut_into_few_pieces_that_cover_it_or_refused(
    runs: list[int], piece_nbytes: int, packs: bool, gathers: bool
) -> None:
    try:
        pieces = cut(runs, piece_nbytes, packs=packs, gathers=gathers)
    except FrameInvalid:
        assert may_refuse(runs, piece_nbytes)
        return
    assert MIN_PIECE_NBYTES <= piece_nbytes <= MAX_PIECE_NBYTES
    assert len(pieces) <= MAX_PIECES
    check_that_they_cover(pieces, runs)
    for piece in pieces:
        assert piece.nbytes <= piece_nbytes
        shared = runs[piece.first : piece.first + piece.num_runs]
        if piece.num_runs > 1 and packs and min(shared) < PACKED_RUN_NBYTES:
            assert max(shared) < PACKED_RUN_NBYTES, "short and long ones in one piece"
            assert piece.nbytes <= MAX_PACKED_NBYTES
        assert piece.num_runs == 1 or packs or gathers


def may_refuse(runs: list[int], piece_nbytes: int) -> bool:
    """An impossible length; or more pieces than can be numbered, give or take one for each run."""
    if not MIN_PIECE_NBYTES <= piece_nbytes <= MAX_PIECE_NBYTES:
        return True
    most = sum(-(-nbytes // piece_nbytes) for nbytes in runs)  # where no runs share one
    return most + len(runs) > MAX_PIECES


def check_that_they_cover(pieces: list[Piece], runs: list[int]) -> None:
    """Every byte of every run is in one piece, in order."""
    index, skip = 0, 0  # of the next byte
    for piece in pieces:
        assert (piece.first, piece.skip) == (index, skip)
        assert piece.num_runs >= 1
        if piece.num_runs > 1:
            assert skip == 0, "the end of a long run in one piece with the next"
            index += piece.num_runs
            assert piece.nbytes == sum(runs[piece.first : index])
        else:
            skip += piece.nbytes
            assert 0 < piece.nbytes <= skip <= runs[index]
            index, skip = (index + 1, 0) if skip == runs[index] else (index, skip)
    assert (index, skip) == (len(runs), 0)


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_as_many_pieces_are_made_as_can_be_numbered_and_no_more(packs: bool, gathers: bool) -> None:
    for piece_nbytes in (MIN_PIECE_NBYTES, MAX_PIECE_NBYTES):
        most = MAX_PIECES * piece_nbytes
        pieces = cut([most - 1], piece_nbytes, packs=packs, gathers=gathers)
        assert len(pieces) == MAX_PIECES
        check_that_they_cover(pieces, [most - 1])
        with pytest.raises(FrameInvalid):
            cut([most + 1], piece_nbytes, packs=packs, gathers=gathers)


def test_the_longest_request_costs_a_bounded_amount() -> None:
    runs = [7 * 4096] * (MAX_CONTROL_NBYTES // 16)
    with allocates_at_most(CUT_NBYTES):
        for packs in (True, False):
            assert cut(runs, 4096, packs=packs)
