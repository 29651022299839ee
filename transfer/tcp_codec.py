"""The wire format of bulk tcp connections. Sans-I/O: bytes in, frames out.

Owns headers and message bodies. Knows no sockets.

Every frame is a 24-byte little-endian header and a body::

    0      4   5   6       8            16           24
    | magic|op |pad| status| request_id | body_nbytes| body ...
    | KVF1 | u8| u8| u16   | u64        | u64        |

Requests travel from the side that connected ("client") to the side that accepted ("server")::

    client                                  server
    HELLO  {protocol, incarnation, nonce} ─▶
                                          ◀─ HELLO {protocol, incarnation, nonce, proof}
    PROOF  {proof}                        ─▶
                                          ◀─ READY
    READ   {region, capability, spans, priority} ─▶
                                          ◀─ DATA ... DATA, DONE
    WRITE  {region, capability, spans, priority} ─▶
    DATA ... DATA                         ─▶
                                          ◀─ DONE         (every byte is in the region)
    CANCEL                                ─▶              (READ: answered with DONE)
    TAKEN                                 ─▶              (READ of many bytes: the socket is empty)
    GOODBYE                               ◀─▶             (either side: closing in order)

DATA frames of different requests interleave; those of one request are in order. A server may send
bytes by reference: until TAKEN, what the client finds in its socket is the server's memory itself
(``loans``). So TAKEN follows DONE however the READ ended: what was sent of it came before DONE.
Nobody waits for TAKEN but who revokes that memory.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from transfer.decoding import decode_foreign
from transfer.error_codes import MAX_TEXT_NBYTES, status_of
from transfer.errors import FrameInvalid, TransferError
from transfer.interface import Priority

TCP_PROTOCOL_VERSION = 4  # 2: requests carry their priority; 3: TAKEN; 4: also of what failed
MAGIC = b"KVF1"
HEADER = struct.Struct("<4sBxHQQ")
HEADER_NBYTES = HEADER.size
MAX_CONTROL_NBYTES = 128 * 1024  # body of any frame but DATA: 4096 spans and change
MAX_HELLO_NBYTES = 4096  # body of a frame from somebody who has not proven the secret yet
COPIED_NBYTES = 64 * 1024  # the answer to a longer READ may be sent by reference: TAKEN follows
MAX_DATA_NBYTES = 64 << 20  # body of one DATA frame

_ENCODER = msgspec.msgpack.Encoder()


class Op(IntEnum):
    HELLO = 1
    PROOF = 2
    READY = 3
    READ = 4
    WRITE = 5
    DATA = 6
    DONE = 7
    CANCEL = 8
    GOODBYE = 9
    TAKEN = 10


_OPS = {int(op): op for op in Op}


class Header(NamedTuple):
    op: Op
    status: int
    request_id: int
    body_nbytes: int


class HelloBody(msgspec.Struct, frozen=True):
    """``expected`` names the incarnation that a client wants; ``proof`` is the server's."""

    protocol: int
    incarnation: str
    nonce: bytes
    expected: str = ""
    proof: bytes = b""


class ProofBody(msgspec.Struct, frozen=True):
    proof: bytes


class RequestBody(msgspec.Struct, frozen=True, array_like=True):
    """READ and WRITE. ``spans`` packs (offset, nbytes) as little-endian u64 pairs."""

    region_id: int
    capability: bytes
    spans: bytes
    priority: Priority = Priority.NOW

    def unpack(self) -> list[tuple[int, int]]:
        if not self.spans or len(self.spans) % 16:
            raise FrameInvalid(f"{len(self.spans)} bytes are no list of spans")
        return [(offset, nbytes) for offset, nbytes in struct.iter_unpack("<QQ", self.spans)]


def pack_spans(spans: list[tuple[int, int]]) -> bytes:
    flat = [number for span in spans for number in span]
    return struct.pack(f"<{len(flat)}Q", *flat)


def encode_header(op: Op, request_id: int = 0, body_nbytes: int = 0, status: int = 0) -> bytes:
    return HEADER.pack(MAGIC, op, status, request_id, body_nbytes)


def decode_header(
    data: bytes | bytearray | memoryview, max_control_nbytes: int = MAX_CONTROL_NBYTES
) -> Header:
    """Return the header.

    Raises:
        FrameInvalid: wrong magic, unknown op, or a body longer than the limit of its op.
    """
    magic, op, status, request_id, body_nbytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise FrameInvalid(f"bad magic {magic!r}: the peer does not speak kvferry bulk transfer")
    known = _OPS.get(op)  # a tenth of the time of Op(op)
    if known is None:
        raise FrameInvalid(f"unknown op {op}")
    limit = MAX_DATA_NBYTES if known is Op.DATA else max_control_nbytes
    if body_nbytes > limit or (known is Op.DATA and body_nbytes == 0):
        raise FrameInvalid(f"{known.name} frame with a body of {body_nbytes} bytes")
    return Header(known, status, request_id, body_nbytes)


def control_frame(
    op: Op, request_id: int = 0, body: msgspec.Struct | bytes = b"", status: int = 0
) -> bytes:
    """Return a whole frame of any op but DATA."""
    data = body if isinstance(body, bytes) else _ENCODER.encode(body)
    assert len(data) <= MAX_CONTROL_NBYTES, f"{op.name} body of {len(data)} bytes"
    return encode_header(op, request_id, len(data), status) + data


def done_frame(request_id: int, error: TransferError | None) -> bytes:
    """Return the answer to a request: success, or why not."""
    if error is None:
        return encode_header(Op.DONE, request_id)
    reason = str(error).encode()[:MAX_TEXT_NBYTES]
    return control_frame(Op.DONE, request_id, reason, status_of(error))


B = TypeVar("B", bound=msgspec.Struct)
_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (HelloBody, ProofBody, RequestBody)
}


def decode_body(data: bytes, body_type: type[B]) -> B:
    """Return the body.

    Raises:
        FrameInvalid: the bytes are not a ``body_type``.
    """
    body: B = decode_foreign(data, _DECODERS[body_type].decode, body_type.__name__)
    return body
