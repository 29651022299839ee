"""The frames of the control protocol: vocabulary, encoding, checksums, limits.

Owns what travels on a channel, byte for byte, and the check of two hellos against one another.
Knows no sockets, no time and no state: ``rpc_client.py`` and ``rpc_server.py`` are the two state
machines, ``rpc.py`` and ``rpc_handlers.py`` the shells around them.

One frame on the wire::

    ┌─────────┬──────────────────┬───────────────────────────────┐
    │ version │ xxh3-64 of body  │ body: msgpack, tagged array   │
    │ 1 byte  │ 8 bytes, LE      │ [tag, field, field, ...]      │
    └─────────┴──────────────────┴───────────────────────────────┘

A frame with another version, a wrong checksum or a body that does not decode raises
``FrameInvalid``; the state machines count and drop it, so corruption looks like loss.

What a peer can make this side hold is bounded: frames in bytes, lists in items *before* they are
built (a list of small numbers takes thirty times its bytes), texts in characters.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import xxhash

from transfer.channel import Hello
from transfer.decoding import Data, decode_foreign
from transfer.errors import FrameInvalid

FRAME_VERSION = 1
MAX_FRAME_NBYTES = 16 << 20
MAX_HELLO_NBYTES = 64 << 10  # a frame of somebody who has not said hello yet
MAX_TEXT_NCHARS = 1000  # of an error or a reason: names that a peer sent are quoted in them
MAX_OUTSTANDING = 4096  # requests and streams on one channel at one time
MAX_CONNECTIONS = 4096  # channels served by one listener; the longest idle one gives way
STREAM_WINDOW = 64  # items that a stream may be ahead of its consumer
HELLO_RETRY_S = 0.25  # first repetition of an unanswered hello; doubles up to the maximum
HELLO_RETRY_MAX_S = 1.0
LONG_NBYTES = 8192  # payloads from here on are not copied out of their frame
MAX_SCRATCH_NBYTES = 1 << 20  # of memory kept for the next long frame
OWN_PAUSE_S = 0.5  # a timer this late means that our own process stood still, not the peer

_HEADER = struct.Struct("<BQ")


Outstanding = Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_OUTSTANDING)]
Ids = Annotated[list[int], msgspec.Meta(max_length=MAX_OUTSTANDING)]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base of all frames."""


class HelloFrame(Frame, frozen=True, array_like=True, tag=1):
    """Client → server, first; repeated until answered."""

    hello: Hello


class HelloAccepted(Frame, frozen=True, array_like=True, tag=2):
    """Server → client: the channel is open."""

    hello: Hello


class HelloRefusedFrame(Frame, frozen=True, array_like=True, tag=3):
    """Server → client: the two do not fit; the message prints both sides."""

    message: str


class Request(Frame, frozen=True, array_like=True, tag=4):
    """Client → server. Ids rise by one and are never used twice on a channel.

    ``window`` is 0 for a request with one reply, else the number of items granted at the start.
    """

    id: int
    name: str
    payload: bytes
    timeout_s: float
    window: int


class Reply(Frame, frozen=True, array_like=True, tag=5):
    id: int
    payload: bytes


class Item(Frame, frozen=True, array_like=True, tag=6):
    id: int
    seq: int
    payload: bytes


class End(Frame, frozen=True, array_like=True, tag=7):
    """The stream is over; ``num_items`` lets the reader see that the last ones were lost."""

    id: int
    num_items: int


class Failed(Frame, frozen=True, array_like=True, tag=8):
    id: int
    code: str
    message: str


class Cancel(Frame, frozen=True, array_like=True, tag=9):
    id: int


class Credit(Frame, frozen=True, array_like=True, tag=10):
    """The stream may send items with ``seq < granted``. Absolute, so that repeats are harmless."""

    id: int
    granted: int


class Ping(Frame, frozen=True, array_like=True, tag=11):
    """Client → server, while anything is outstanding.

    Lists every outstanding id with its grant, so that a lost ``Cancel`` or ``Credit`` heals.
    """

    nonce: int
    outstanding: Outstanding


class Pong(Frame, frozen=True, array_like=True, tag=12):
    """Server → client. ``unknown`` are ids of the ping that are not running here.

    The wire keeps the order, so their request or their answer was lost on the way.
    """

    nonce: int
    unknown: Ids


class Goodbye(Frame, frozen=True, array_like=True, tag=13):
    """Either side, last. ``orderly`` tells a close from a conversation that is not known (any
    more)."""

    reason: str
    orderly: bool


AnyFrame = (
    HelloFrame
    | HelloAccepted
    | HelloRefusedFrame
    | Request
    | Reply
    | Item
    | End
    | Failed
    | Cancel
    | Credit
    | Ping
    | Pong
    | Goodbye
)


class _LongRequest(Request, frozen=True, array_like=True, tag=4):
    payload: memoryview  # type: ignore[assignment]  # a view costs more than a short copy


class _LongReply(Reply, frozen=True, array_like=True, tag=5):
    payload: memoryview  # type: ignore[assignment]


class _Scratch(threading.local):
    """Where long frames are put together; one for each thread that has a loop."""

    def __init__(self) -> None:
        self.buffer = bytearray(_HEADER.size)


_scratch = _Scratch()
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyFrame)
_long_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    HelloFrame
    | HelloAccepted
    | HelloRefusedFrame
    | _LongRequest
    | _LongReply
    | Item
    | End
    | Failed
    | Cancel
    | Credit
    | Ping
    | Pong
    | Goodbye
)


def encode_message(message: msgspec.Struct) -> bytes:
    """Return the payload bytes of a typed message."""
    return _encoder.encode(message)


@lru_cache(maxsize=256)  # a program has a few dozen types of messages
def message_decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of the payloads that ``encode_message`` makes of such messages."""
    return msgspec.msgpack.Decoder(message_type)


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of ``frame``.

    Raises:
        FrameInvalid: longer than ``MAX_FRAME_NBYTES``.
    """
    if len(getattr(frame, "payload", b"")) >= LONG_NBYTES:
        return _encode_long(frame)
    body = _encoder.encode(frame)
    _check_length(len(body))
    return _HEADER.pack(FRAME_VERSION, xxhash.xxh3_64_intdigest(body)) + body


def _encode_long(frame: Frame) -> bytes:
    """Fresh memory is dear (page faults): only the frame itself is."""
    buffer = _scratch.buffer
    _encoder.encode_into(frame, buffer, _HEADER.size)
    _check_length(len(buffer) - _HEADER.size)
    checksum = xxhash.xxh3_64_intdigest(memoryview(buffer)[_HEADER.size :])
    _HEADER.pack_into(buffer, 0, FRAME_VERSION, checksum)
    if len(buffer) > MAX_SCRATCH_NBYTES:
        _scratch.buffer = bytearray(_HEADER.size)
    return bytes(buffer)


def _check_length(body_nbytes: int) -> None:
    if body_nbytes + _HEADER.size > MAX_FRAME_NBYTES:
        raise FrameInvalid(
            f"message of {body_nbytes} bytes exceeds the frame limit of {MAX_FRAME_NBYTES} bytes; "
            "bulk data belongs in a region"
        )


def decode_frame(data: Data) -> AnyFrame:
    """Return the frame in ``data``; long payloads are views of it.

    Raises:
        FrameInvalid: wrong version, size or checksum, or not a frame.
    """
    if not _HEADER.size < len(data) <= MAX_FRAME_NBYTES:
        raise FrameInvalid(f"frame of {len(data)} bytes")
    version, checksum = _HEADER.unpack_from(data)
    if version != FRAME_VERSION:
        raise FrameInvalid(f"frame version {version}, this side speaks {FRAME_VERSION}")
    body = memoryview(data)[_HEADER.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise FrameInvalid("checksum of the frame is wrong")
    decoder = _decoder if len(data) <= LONG_NBYTES else _long_decoder
    frame: AnyFrame = decode_foreign(body, decoder.decode, "a frame")
    return frame


def clip(text: str) -> str:
    """Return ``text``, or its beginning: whatever is quoted in it, it fits into a frame."""
    return text if len(text) <= MAX_TEXT_NCHARS else f"{text[:MAX_TEXT_NCHARS]}..."


def type_name(message_type: type[msgspec.Struct]) -> str:
    """Return the name under which a message type travels: its string tag, else its class name."""
    tag = message_type.__struct_config__.tag
    return tag if isinstance(tag, str) else message_type.__name__


def _describe(hello: Hello, facts: Iterable[str]) -> str:
    identity = hello.identity
    stated = {"protocol": hello.protocol, **hello.contract}
    shown = ", ".join(f"{fact}={stated[fact]}" for fact in facts)
    return f"{identity.role.value} {identity.node_id} ({shown})"


def hello_conflict(ours: Hello, theirs: Hello) -> str | None:
    """Return why the two do not fit together, printing both sides, or None when they do.

    Only contract facts that both sides state are compared.
    """
    both = sorted(ours.contract.keys() & theirs.contract.keys())
    differing = [key for key in both if ours.contract[key] != theirs.contract[key]]
    if ours.protocol != theirs.protocol:
        differing.insert(0, "protocol")
    if not differing:
        return None
    return (
        f"peers differ: {clip(_describe(ours, differing))} against "
        f"{clip(_describe(theirs, differing))}; "
        "start both with the same model, page settings and kvferry version"
    )
