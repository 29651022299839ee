"""Puts frames on a byte stream, payload straight from its source. Sans-I/O.

Control frames go first; payload sources take turns, one DATA frame of at most ``piece_nbytes``
each, so that a small request is not held up by a huge one. A source whose gate closes, or that is
dropped, in the middle of a frame has the rest of that frame filled with zeros: the stream stays in
step and the end of the request tells the peer that the bytes are void.

::

    queued ──turn──▶ in frame ──frame sent──▶ queued
      └── dropped, gate closed ──▶ ended ◀── last byte, dropped, gate closed ──┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from transfer.cursor import Cursor
from transfer.gate import Gate
from transfer.tcp_codec import Op, encode_header

ZEROS = memoryview(bytes(256 * 1024))
MAX_CONTROL_BATCH_NBYTES = 64 * 1024

Send = Callable[[Sequence[memoryview]], int]


class Source:
    """Payload of one request on its way out. ``on_end(complete)`` is called exactly once."""

    __slots__ = ("cursor", "dropped", "gate", "on_end", "request_id")

    def __init__(
        self, request_id: int, cursor: Cursor, gate: Gate, on_end: Callable[[bool], None]
    ) -> None:
        self.request_id = request_id
        self.cursor = cursor
        self.gate = gate
        self.on_end = on_end
        self.dropped = False

    @property
    def void(self) -> bool:
        return self.dropped or not self.gate.is_open


class FrameWriter:
    """One per connection. Not thread-safe; lives on the I/O loop."""

    def __init__(self, piece_nbytes: int) -> None:
        self._piece_nbytes = piece_nbytes
        self.control_nbytes = 0  # of queued control frames
        self._control: deque[bytes] = deque()
        self._sources: deque[Source] = deque()
        self._head = memoryview(b"")  # header or control bytes that must go out first
        self._current: Source | None = None
        self._frame_left = 0

    @property
    def idle(self) -> bool:
        """True if nothing is waiting to be sent."""
        return not (self._head or self._current or self._control or self._sources)

    def put(self, frame: bytes) -> None:
        """Queue a whole control frame."""
        self._control.append(frame)
        self.control_nbytes += len(frame)

    def add(self, source: Source) -> None:
        """Queue payload, behind the control frames that were put before."""
        self._sources.append(source)

    def drop_all(self) -> None:
        """Void every source; only the frame that is on its way will be completed."""
        for source in (*self._sources, *((self._current,) if self._current else ())):
            source.dropped = True

    def pump(self, send: Send) -> int:
        """Send once; return the number of bytes taken by ``send``, 0 if nothing was left to send.

        ``send`` raises ``BlockingIOError`` when the stream takes no more for now.
        """
        if not self._head and self._current is None and not self._next_frame():
            return 0
        source = self._current
        if source is None:
            count = send([self._head])
            self._head = self._head[count:]
            return count
        count = self._send_payload(source, send)
        if self._frame_left == 0 and not self._head:
            self._end_frame(source)
        return count

    def _next_frame(self) -> bool:
        if self._control:
            batch = self._control.popleft()
            while self._control and len(batch) < MAX_CONTROL_BATCH_NBYTES:
                batch += self._control.popleft()
            self._head = memoryview(batch)
            self.control_nbytes -= len(batch)
            return True
        while self._sources:
            source = self._sources.popleft()
            if source.void:
                source.on_end(False)  # may put a control frame
                if self._control:
                    return self._next_frame()
                continue
            self._current = source
            self._frame_left = min(self._piece_nbytes, source.cursor.remaining)
            self._head = memoryview(encode_header(Op.DATA, source.request_id, self._frame_left))
            return True
        return False

    def _send_payload(self, source: Source, send: Send) -> int:
        head_nbytes = self._head.nbytes
        buffers = [self._head] if head_nbytes else []
        if not source.dropped and source.gate.enter():
            try:
                count = send(buffers + source.cursor.buffers(self._frame_left))
            finally:
                source.gate.leave()
            payload = max(0, count - head_nbytes)
            source.cursor.advance(payload)
        else:
            source.dropped = True
            count = send([*buffers, ZEROS[: self._frame_left]])
            payload = max(0, count - head_nbytes)
        self._head = self._head[count:]
        self._frame_left -= payload
        return count

    def _end_frame(self, source: Source) -> None:
        self._current = None
        if source.void or source.cursor.remaining == 0:
            source.on_end(source.cursor.remaining == 0 and not source.dropped)
        else:
            self._sources.append(source)
