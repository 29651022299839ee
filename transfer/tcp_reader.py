"""Takes a byte stream apart into frames, payload straight into its destination. Sans-I/O.

The shell passes a function that receives into buffers; the reader says which. Payload of a DATA
frame goes into the sink's memory while its gate is open and into scratch afterwards, so that the
stream stays in step when an operation is cancelled or a region revoked in the middle of a frame.

::

    HEADER ──control op──▶ BODY ──complete──▶ HEADER     (frame handed to ``on_frame``)
       └────DATA─────────▶ DATA ──complete──▶ HEADER     (``on_data_end`` with the sink)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from transfer.cursor import Cursor
from transfer.errors import FrameInvalid
from transfer.gate import Gate
from transfer.tcp_codec import HEADER_NBYTES, Header, Op, decode_header

SCRATCH_NBYTES = 256 * 1024

Receive = Callable[[Sequence[memoryview]], int]


class Sink:
    """Where the payload of one request goes."""

    __slots__ = ("cursor", "gate", "nbytes", "remaining", "request_id")

    def __init__(self, request_id: int, cursor: Cursor | None, gate: Gate, nbytes: int) -> None:
        self.request_id = request_id
        self.cursor = cursor
        self.gate = gate
        self.nbytes = nbytes
        self.remaining = nbytes


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
        self._header_data = memoryview(bytearray(HEADER_NBYTES))
        self._header_filled = 0
        self._header: Header | None = None
        self._body = bytearray()
        self._body_filled = 0
        self._sink: Sink | None = None
        self._frame_left = 0
        self._scratch = memoryview(bytearray(0))

    @property
    def mid_frame(self) -> bool:
        """True if the stream ended here in the middle of a frame."""
        return self._header is not None or self._header_filled > 0

    def fill(self, receive: Receive) -> int:
        """Receive once; return what ``receive`` returned (0: end of stream).

        Raises:
            FrameInvalid: the bytes do not follow the protocol.
        """
        if self._sink is not None:
            return self._fill_data(self._sink, receive)
        if self._header is not None:
            count = receive([memoryview(self._body)[self._body_filled :]])
            self._body_filled += count
            self._end_control_frame()
            return count
        count = receive([self._header_data[self._header_filled :]])
        self._header_progress(count)
        return count

    def _header_progress(self, count: int) -> None:
        self._header_filled += count
        if self._header_filled < HEADER_NBYTES:
            return
        header = decode_header(self._header_data)
        self._header_filled = 0
        if header.op is Op.DATA:
            sink = self._handler.sink_for(header)
            if header.body_nbytes > sink.remaining:
                raise FrameInvalid(
                    f"DATA of {header.body_nbytes} bytes, request {header.request_id} expects "
                    f"{sink.remaining}"
                )
            self._sink, self._frame_left, self._header = sink, header.body_nbytes, header
            return
        self._header = header
        self._body = bytearray(header.body_nbytes)
        self._body_filled = 0
        self._end_control_frame()

    def _end_control_frame(self) -> None:
        header = self._header
        if header is None or self._body_filled < header.body_nbytes:
            return
        body, self._body = bytes(self._body), bytearray()
        self._header = None
        self._body_filled = 0
        self._handler.on_frame(header, body)

    def _fill_data(self, sink: Sink, receive: Receive) -> int:
        """Receive payload and, with the same call, the next header if the frame ends here."""
        cursor = sink.cursor
        if cursor is not None and sink.gate.enter():
            try:
                buffers = cursor.buffers(self._frame_left)
                reach = sum(b.nbytes for b in buffers)
                if reach == self._frame_left:
                    buffers.append(self._header_data)
                count = receive(buffers)
            finally:
                sink.gate.leave()
            payload = min(count, reach)
            cursor.advance(payload)
        else:
            reach = min(self._frame_left, SCRATCH_NBYTES)
            buffers = [self._scratch_space()[:reach]]
            if reach == self._frame_left:
                buffers.append(self._header_data)
            count = receive(buffers)
            payload = min(count, reach)
        sink.remaining -= payload
        self._frame_left -= payload
        if self._frame_left == 0:
            self._sink = self._header = None
            self._handler.on_data_end(sink)
            self._header_progress(count - payload)
        return count

    def _scratch_space(self) -> memoryview:
        if not self._scratch:
            self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        return self._scratch
