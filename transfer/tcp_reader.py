"""Takes a byte stream apart into frames, payload straight into its destination. Sans-I/O.

The shell passes a function that receives into buffers; the reader says which. Payload of a DATA
frame goes into the sink's memory while its gate is open and into scratch afterwards, so that the
stream stays in step when an operation is cancelled or a region revoked in the middle of a frame.
A sink that has no room for now (``Payload``) stops the stream: ``stalled``.

::

    HEADER ──control op──▶ BODY ──complete──▶ HEADER     (frame handed to ``on_frame``)
       └────DATA─────────▶ DATA ──complete──▶ HEADER     (``on_data_end`` with the sink)

    read ahead between frames:  ahead[ used ... start ... not used yet ... end ... free ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from transfer.cursor import Payload
from transfer.errors import FrameInvalid
from transfer.gate import Gate
from transfer.tcp_codec import (
    HEADER_NBYTES,
    MAX_CONTROL_NBYTES,
    MAX_HELLO_NBYTES,
    Header,
    Op,
    decode_header,
)

SCRATCH_NBYTES = 256 * 1024
# Received between frames before the kind of the next is known: a small read and its answer come in
# one call each. What it holds of a DATA frame is copied once more: a hundredth of a piece.
AHEAD_NBYTES = 8 * 1024
# Payload worth waiting for at one go. A reader that is woken for each 64 KiB that the kernel has
# got pays for the waking, not for the bytes.
BATCH_NBYTES = 1 << 20
MIN_BATCH_NBYTES = 64 * 1024

Receive = Callable[[Sequence[memoryview]], int]


class Sink:
    """Where the payload of one request goes."""

    __slots__ = ("cursor", "gate", "nbytes", "remaining", "request_id")

    def __init__(self, request_id: int, cursor: Payload | None, gate: Gate, nbytes: int) -> None:
        self.request_id = request_id
        self.cursor = cursor
        self.gate = gate
        self.nbytes = nbytes
        self.remaining = nbytes

    @property
    def void(self) -> bool:
        """True if what still arrives is thrown away."""
        return self.cursor is None or self.cursor.error is not None or not self.gate.is_open


class FrameHandler(Protocol):
    """Reacts to frames. May raise ``TransferError``: the connection is then dropped."""

    def on_frame(self, header: Header, body: bytes) -> None: ...

    def sink_for(self, header: Header) -> Sink:
        """Return the sink of a DATA frame; raise ``FrameInvalid`` if nobody asked for it."""
        ...

    def on_data_end(self, sink: Sink) -> None:
        """One DATA frame has arrived in full."""
        ...


class FrameReader:
    """One per connection. Not thread-safe; lives on the I/O loop."""

    def __init__(self, handler: FrameHandler) -> None:
        self._handler = handler
        self._ahead = memoryview(bytearray(AHEAD_NBYTES))
        self._start = self._end = 0  # of what lies in _ahead and was not used yet
        self._header: Header | None = None
        self._body = memoryview(b"")
        self._body_filled = 0
        self._sink: Sink | None = None
        self._frame_left = 0
        self._scratch = memoryview(b"")
        self._max_control_nbytes = MAX_HELLO_NBYTES
        self._stopped = False
        self.drained = False  # the last ``receive`` gave less than it could have

    def trust(self) -> None:
        """The peer has proven who it is: its frames may be longer than a hello."""
        self._max_control_nbytes = MAX_CONTROL_NBYTES

    def stop(self) -> None:
        """Hand out nothing more, not even what was received with the frame that ended it all."""
        self._stopped = True

    @property
    def buffered(self) -> bool:
        """True if ``fill`` can go on without the stream: payload that waits for its sink."""
        return self._sink is not None and self._start < self._end

    @property
    def stalled(self) -> bool:
        """True while the sink has no room: do not ``fill`` until it has woken the connection."""
        sink = self._sink
        if sink is None or sink.cursor is None or sink.cursor.ready_nbytes:
            return False
        return not sink.void

    @property
    def batch_nbytes(self) -> int:
        """How many bytes are sure to come and worth being woken for together; 1: any."""
        if self._sink is None or self._frame_left < MIN_BATCH_NBYTES:
            return 1
        return min(self._frame_left, BATCH_NBYTES)

    @property
    def left_nbytes(self) -> int:
        """Payload that is still to come for the request whose frame arrives now."""
        return 0 if self._sink is None else self._sink.remaining

    @property
    def mid_frame(self) -> bool:
        """True if the stream ended here in the middle of a frame."""
        return self._header is not None or self._sink is not None or self._start < self._end

    def fill(self, receive: Receive) -> int:
        """Receive once, or use what was received; return the bytes got (0: end of stream).

        ``receive`` and gates may raise ``BlockingIOError``; nothing is lost then.

        Raises:
            FrameInvalid: the bytes do not follow the protocol.
        """
        if self._sink is not None:
            count = self._fill_data(self._sink, receive)
        elif self._header is not None:
            count = self._receive([self._body[self._body_filled :]], receive)
            self._body_filled += count
            self._end_control_frame(self._header)
        else:
            count = self._fill_ahead(receive)
        while not (self._sink or self._stopped) and self._end - self._start >= HEADER_NBYTES:
            self._next_header()
        return count

    def _receive(self, buffers: list[memoryview], receive: Receive) -> int:
        count = receive(buffers)
        self.drained = count < sum(map(len, buffers))
        return count

    def _fill_ahead(self, receive: Receive) -> int:
        """Between frames: small frames, bodies and payload come with one call."""
        left = self._end - self._start  # a part of a header
        self._ahead[:left] = self._ahead[self._start : self._end]
        self._start, self._end = 0, left
        count = self._receive([self._ahead[left:]], receive)
        self._end += count
        return count

    def _next_header(self) -> None:
        body_at = self._start + HEADER_NBYTES
        header = decode_header(self._ahead[self._start : body_at], self._max_control_nbytes)
        self._start = body_at
        if header.op is Op.DATA:
            self._begin_data(header)
            return
        if header.body_nbytes <= self._end - body_at:
            self._start += header.body_nbytes
            self._handler.on_frame(header, bytes(self._ahead[body_at : self._start]))
            return
        count = self._end - body_at
        self._header = header
        self._body = memoryview(bytearray(header.body_nbytes))
        self._body[:count] = self._ahead[body_at : body_at + count]
        self._body_filled = count
        self._start += count

    def _begin_data(self, header: Header) -> None:
        sink = self._handler.sink_for(header)
        if header.body_nbytes > sink.remaining:
            raise FrameInvalid(
                f"DATA of {header.body_nbytes} bytes, request {header.request_id} expects "
                f"{sink.remaining}"
            )
        self._sink, self._frame_left = sink, header.body_nbytes

    def _end_control_frame(self, header: Header) -> None:
        if self._body_filled < header.body_nbytes:
            return
        body, self._body = bytes(self._body), memoryview(b"")
        self._header = None
        self._handler.on_frame(header, body)

    def _fill_data(self, sink: Sink, receive: Receive) -> int:
        """Receive payload into its place, or into scratch."""
        cursor = sink.cursor
        if cursor is not None and cursor.error is None and sink.gate.enter():
            try:
                payload, count = self._take(cursor.buffers(self._frame_left), receive)
            finally:
                sink.gate.leave()
            cursor.advance(payload)
        else:
            room = min(self._frame_left, SCRATCH_NBYTES)
            payload, count = self._take([self._scratch_space()[:room]], receive)
        sink.remaining -= payload
        self._frame_left -= payload
        if self._frame_left == 0:
            self._sink = None
            self._handler.on_data_end(sink)
        return count

    def _take(self, buffers: list[memoryview], receive: Receive) -> tuple[int, int]:
        """Fill ``buffers``; return the bytes of payload, and those got with the header behind."""
        if self._start < self._end:
            count = self._copy_ahead(buffers)
            return count, count
        room = sum(map(len, buffers))
        if room == self._frame_left:
            buffers.append(self._ahead[:HEADER_NBYTES])
        count = self._receive(buffers, receive)
        payload = min(count, room)
        self._start, self._end = 0, count - payload
        return payload, count

    def _copy_ahead(self, buffers: list[memoryview]) -> int:
        before = self._start
        for buffer in buffers:
            count = min(len(buffer), self._end - self._start)
            buffer[:count] = self._ahead[self._start : self._start + count]
            self._start += count
        return self._start - before

    def _scratch_space(self) -> memoryview:
        if not self._scratch:
            self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        return self._scratch
