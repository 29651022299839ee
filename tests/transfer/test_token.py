"""Tokens come back as they went, and whatever is no token is refused as such."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from transfer.errors import FrameInvalid
from transfer.token import (
    MAX_TOKEN_NBYTES,
    TOKEN_VERSION,
    Endpoint,
    Token,
    decode_token,
    encode_token,
)

TOKEN = Token(
    version=TOKEN_VERSION,
    endpoint=Endpoint("life", "process", "host", "local-1", "kvferry/x", "127.0.0.1:1"),
    region_id=65536,
    nbytes=4096,
    rights="rw",
    capability=bytes(range(16)),
    in_shared_memory=True,
)


def test_a_token_survives_the_wire() -> None:
    assert decode_token(encode_token(TOKEN)) == TOKEN


@pytest.mark.parametrize(
    "changes",
    [{"version": TOKEN_VERSION + 1}, {"nbytes": -1}, {"capability": b"short"}, {"rights": "x"}],
)
def test_impossible_tokens_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FrameInvalid):
        decode_token(encode_token(replace(TOKEN, **changes)))


def test_a_huge_token_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(FrameInvalid, match="at most"):
        decode_token(bytes(MAX_TOKEN_NBYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_give_a_token_or_frame_invalid(data: bytes) -> None:
    with contextlib.suppress(FrameInvalid):
        decode_token(data)


@given(st.integers(0, len(encode_token(TOKEN)) - 1), st.integers(1, 255))
def test_one_changed_byte_never_escapes_as_a_foreign_exception(place: int, flip: int) -> None:
    data = bytearray(encode_token(TOKEN))
    data[place] ^= flip
    with contextlib.suppress(FrameInvalid):
        assert decode_token(bytes(data)) != TOKEN
