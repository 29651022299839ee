"""Puts frames on a byte stream, payload straight from its source. Sans-I/O.

Control frames go first. Payload sources take turns, one DATA frame of at most ``piece_nbytes``
each, so that a small request is not held up by a huge one; urgent sources go before background
ones, which keep their share (``window.BackgroundShare``). A source that has nothing ready
(``Payload``) steps aside until it wakes. A source whose gate closes, or that is dropped, in the
middle of a frame has the rest of that frame filled with zeros: the stream stays in step and the end
of the request tells the peer that the bytes are void.

::

    queued ──turn──▶ in frame ──frame sent──▶ queued
      │ ▲ └── dropped, gate closed ──▶ ended ◀── last byte, dropped, gate closed ──┘
      ▼ │ woken, dropped
    parked (nothing ready)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from transfer.cursor import MIN_FILE_NBYTES, FileRun, Payload
from transfer.gate import Gate
from transfer.interface import Priority
from transfer.tcp_codec import Op, encode_header
from transfer.window import BackgroundShare

ZEROS = memoryview(bytes(256 * 1024))
MAX_CONTROL_BATCH_NBYTES = 64 * 1024

Send = Callable[[Sequence[memoryview | bytes]], int]
SendFile = Callable[[memoryview, FileRun], int]  # what goes before it, and the run


class Source:
    """Payload of one request on its way out. ``on_end(complete)`` is called exactly once.

    ``tail`` is a frame that follows the last byte, and goes out with it; only if all are valid.
    """

    __slots__ = ("cursor", "dropped", "gate", "on_end", "priority", "request_id", "tail")

    def __init__(
        self,
        request_id: int,
        cursor: Payload,
        gate: Gate,
        on_end: Callable[[bool], None],
        priority: Priority = Priority.NOW,
        tail: bytes = b"",
    ) -> None:
        self.request_id = request_id
        self.cursor = cursor
        self.gate = gate
        self.on_end = on_end
        self.priority = priority
        self.tail = tail
        self.dropped = False

    @property
    def void(self) -> bool:
        return self.dropped or self.cursor.error is not None or not self.gate.is_open

    @property
    def ready(self) -> bool:
        """True if it has something to send, or is over."""
        return self.cursor.ready_nbytes > 0 or self.void


class FrameWriter:
    """One per connection. Not thread-safe; lives on the I/O loop."""

    def __init__(self, piece_nbytes: int, send_file: SendFile | None = None) -> None:
        """Args:
        send_file: sends bytes of a file without copying them, and what goes before them.
        """
        self._piece_nbytes = piece_nbytes
        self._send_file = send_file
        self.control_nbytes = 0  # of queued control frames
        self._control: deque[bytes] = deque()
        self._urgent: deque[Source] = deque()
        self._background: deque[Source] = deque()
        self._share = BackgroundShare()
        self._parked: dict[Source, None] = {}  # ordered set
        self._head = memoryview(b"")  # header or control bytes that must go out first
        self._current: Source | None = None
        self._frame_left = 0

    @property
    def idle(self) -> bool:
        """True if nothing can be sent now. Parked sources count as nothing."""
        at_work = self._head or self._current or self._control
        return not (at_work or self._urgent or self._background)

    def put(self, frame: bytes) -> None:
        """Queue a whole control frame."""
        self._control.append(frame)
        self.control_nbytes += len(frame)

    def add(self, source: Source) -> None:
        """Queue payload, behind the control frames that were put before."""
        if source.ready:
            self._queue_of(source.priority).append(source)
        else:
            self._parked[source] = None

    def _queue_of(self, priority: Priority) -> deque[Source]:
        return self._urgent if priority is Priority.NOW else self._background

    def unpark(self, source: Source) -> None:
        """Queue a source that has woken; does nothing for one that was not parked."""
        if source in self._parked:
            del self._parked[source]
            self.add(source)

    def drop_all(self) -> None:
        """Void every source; only the frame that is on its way will be completed."""
        current = (self._current,) if self._current else ()
        for source in (*current, *self._urgent, *self._background, *self._parked):
            source.dropped = True
        for source in list(self._parked):
            self.unpark(source)

    def pump(self, send: Send) -> int:
        """Send once; return the number of bytes taken by ``send``, 0 if nothing was left to send.

        ``send`` raises ``BlockingIOError`` when the stream takes no more for now.
        """
        if not self._head and self._current is None and not self._next_frame():
            return 0
        source = self._current
        if source is None or self._frame_left == 0:
            count = send([self._head])
            self._head = self._head[count:]
        else:
            count = self._send_payload(source, send)
        if source is not None and self._frame_left == 0 and not self._head:
            self._end_frame(source)
        return count

    def _next_frame(self) -> bool:
        """Set up the next frame; False if there is none."""
        while not self._control:
            source = self._next_source()
            if source is None:
                return False
            if not source.void:
                self._begin(source)
                return True
            source.on_end(False)  # may put a control frame
        batch = self._control.popleft()
        while self._control and len(batch) < MAX_CONTROL_BATCH_NBYTES:
            batch += self._control.popleft()
        self._head = memoryview(batch)
        self.control_nbytes -= len(batch)
        return True

    def _next_source(self) -> Source | None:
        """Take the source whose turn it is out of its queue."""
        urgent, background = self._urgent, self._background
        if background and (not urgent or self._share.is_due(self._frame_nbytes(background[0]))):
            return background.popleft()
        return urgent.popleft() if urgent else None

    def _frame_nbytes(self, source: Source) -> int:
        return min(self._piece_nbytes, source.cursor.ready_nbytes)

    def _begin(self, source: Source) -> None:
        self._current = source
        self._frame_left = self._frame_nbytes(source)
        self._head = memoryview(encode_header(Op.DATA, source.request_id, self._frame_left))
        other = Priority.NOW if source.priority is Priority.BACKGROUND else Priority.BACKGROUND
        both_wait = bool(self._queue_of(other))
        self._share.started(source.priority, self._frame_left, both_wait=both_wait)

    def _send_payload(self, source: Source, send: Send) -> int:
        """Send head and payload, and behind the last byte the tail, as one vector."""
        head_nbytes = self._head.nbytes
        buffers: list[memoryview | bytes] = [self._head] if head_nbytes else []
        valid = not source.dropped and source.cursor.error is None and source.gate.enter()
        if valid:
            try:
                count = self._send_run(source)
                if count is None:
                    payload = source.cursor.buffers(self._frame_left)
                    buffers += payload
                    if source.tail and sum(map(len, payload)) == source.cursor.remaining:
                        buffers.append(source.tail)
                    count = send(buffers)
            finally:
                source.gate.leave()
        else:
            source.dropped = True
            count = send([*buffers, ZEROS[: self._frame_left]])
        moved = min(max(0, count - head_nbytes), self._frame_left)
        self._head = self._head[count:]
        self._frame_left -= moved
        if valid:
            source.cursor.advance(moved)
            if source.cursor.remaining == 0:
                self._head = memoryview(source.tail)[count - head_nbytes - moved :]
        return count

    def _send_run(self, source: Source) -> int | None:
        """Send head and payload from the file that the payload lies in; None: copy it."""
        file = source.cursor.file
        if file is None or self._send_file is None:
            return None
        start, nbytes = source.cursor.next_run(self._frame_left)
        if nbytes < MIN_FILE_NBYTES or (place := file.enter()) is None:
            return None
        try:
            fd, offset = place
            return self._send_file(self._head, FileRun(fd, offset + start, nbytes))
        finally:
            file.leave()

    def _end_frame(self, source: Source) -> None:
        self._current = None
        if source.void or source.cursor.remaining == 0:
            source.on_end(source.cursor.remaining == 0)
        else:
            self.add(source)
