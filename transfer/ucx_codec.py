"""The wire format of the ucx transport: tags, control messages and the card. Sans-I/O.

Knows no UCX. Every message is one tagged UCX message. Its 64-bit tag says what it is::

    63                    32 31          16 15           0
    | key of the receiver   | request      | piece        |     request 0: a control message

The key is random, chosen by the receiving side for this connection and told to the peer in the
card, after both have proven the cluster secret. Control messages are msgpack; pieces are payload::

    client                                      owner
    ASK  {request, right "r", region, spans}  ─▶
                                              ◀─ piece 0, 1, ... of the request
                                              ◀─ DONE {request, status}
    ASK  {request, right "w", region, spans}  ─▶
    piece 0, 1, ...                           ─▶
                                              ◀─ DONE       (every byte is in the region)
    CANCEL {request}                          ─▶            (answered with DONE)

Every ASK gets exactly one DONE, after which the owner sends nothing more of that request. A number
is used again only after DONE, when no piece of it is under way.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Annotated, NamedTuple

import msgspec

from transfer.decoding import decode_foreign
from transfer.errors import FrameInvalid, HelloRefused
from transfer.interface import Rights
from transfer.region import Spans

UCX_PROTOCOL_VERSION = 2
MAX_CONTROL_NBYTES = 128 * 1024  # 4096 spans and change
MAX_CARD_NBYTES = 64 * 1024  # worker addresses grow with the number of devices
MAX_REQUEST = (1 << 16) - 1
MAX_PIECES = 1 << 16
KEY_BITS = 32
UNPACKABLE = 255  # status of DONE: ask again with ``packs`` false, the region is a device's


# What fits between key and piece of a tag: a larger one would reach into another peer's key.
Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUEST)]


class Card(msgspec.Struct, frozen=True):
    """What each side tells the other before the first message: how to reach its worker."""

    protocol: int
    dialect: str
    key: int
    address: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A read or write. ``spans`` packs (offset, nbytes) as little-endian u64 pairs.

    ``piece_nbytes`` cuts them into pieces, by the same rule on both sides (``ucx_pieces``).
    """

    request: Number
    right: Rights
    region_id: int
    capability: bytes
    piece_nbytes: int
    packs: bool
    gathers: bool
    spans: bytes

    def unpack(self) -> Spans:
        if not self.spans or len(self.spans) % 16:
            raise FrameInvalid(f"{len(self.spans)} bytes are no list of spans")
        return [(offset, nbytes) for offset, nbytes in struct.iter_unpack("<QQ", self.spans)]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The end of a request; ``status`` as in ``error_codes``."""

    request: Number
    status: int = 0
    text: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    request: Number


Control = Ask | Done | Cancel


class Tag(NamedTuple):
    key: int
    request: int
    piece: int

    def pack(self) -> int:
        return pack_tag(self.key, self.request, self.piece)


def pack_tag(key: int, request: int, piece: int) -> int:
    return key << 32 | request << 16 | piece


def unpack_tag(tag: int) -> tuple[int, int, int]:
    """Return key, request and piece, as plain numbers: this is done for each piece that moves."""
    return tag >> 32, tag >> 16 & MAX_REQUEST, tag & (MAX_PIECES - 1)


def encode_control(message: Control) -> bytes:
    data = msgspec.msgpack.encode(message)
    assert len(data) <= MAX_CONTROL_NBYTES, f"a control message of {len(data)} bytes"
    return data


def decode_control(data: bytes | memoryview) -> Control:
    """Return the message; raises ``FrameInvalid`` if it is none."""
    return decode_foreign(data, _CONTROL.decode, "a ucx control message")


def decode_card(data: bytes, dialect: str) -> Card:
    """Return the peer's card.

    Raises:
        FrameInvalid: it is none.
        HelloRefused: the peer speaks another version or dialect.
    """
    card: Card = decode_foreign(data, partial(msgspec.msgpack.decode, type=Card), "a ucx card")
    if (card.protocol, card.dialect) != (UCX_PROTOCOL_VERSION, dialect):
        raise HelloRefused(
            f"ucx protocols differ: {UCX_PROTOCOL_VERSION}/{dialect} here, "
            f"{card.protocol}/{card.dialect[:20]} there; install the same kvferry and the same "
            "binding (ucxx) on both sides"
        )
    if not 0 <= card.key < 1 << KEY_BITS:
        raise FrameInvalid("a ucx card with an impossible key")
    return card


_CONTROL: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
