"""One read or write over tcp, seen from both threads.

Owns the hand-over between the application's loop, which waits, and the I/O loop, which moves bytes.
Invariant: after ``wait`` has returned, raised or was cancelled, the local memory is not touched:
the gate is closed, and closing waits for the one piece that may be in progress.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from transfer.cursor import Cursor
from transfer.errors import DeadlineExceeded, TransferError
from transfer.gate import Gate
from transfer.interface import Range
from transfer.ranges import split, total_nbytes
from transfer.tcp_codec import Op, RequestBody, control_frame, pack_spans
from transfer.tcp_reader import Sink
from transfer.tcp_writer import Source
from transfer.transports import Move

SMALL_NBYTES = 512 * 1024  # a read that costs more waking than moving bytes


@dataclass(slots=True, eq=False)
class Request:
    """A part of an operation that fits one frame and the window."""

    operation: TcpOperation
    ranges: list[Range]
    nbytes: int
    sink: Sink | None = None
    source: Source | None = None
    sent_s: float = 0.0

    @property
    def moved(self) -> bool:
        """True when every byte has been received, or sent."""
        if self.sink is not None:
            return self.sink.remaining == 0
        return self.source is not None and self.source.cursor.remaining == 0

    def frame(self, request_id: int) -> bytes:
        move, token = self.operation.move, self.operation.move.token
        spans = pack_spans([(r.remote_offset, r.nbytes) for r in self.ranges])
        body = RequestBody(token.region_id, token.capability, spans, move.priority)
        return control_frame(Op.READ if move.right == "r" else Op.WRITE, request_id, body)

    def cursor(self) -> Cursor:
        """The local bytes. They are copied, not lent: a cancelled write leaves nothing of what its
        memory is used for next on the way to the peer."""
        spans = [(r.local_offset, r.nbytes) for r in self.ranges]
        return Cursor(self.operation.move.region.view, spans)


Watch = Callable[["TcpOperation"], Coroutine[Any, Any, None]]


class TcpOperation:
    """Created on the application's loop; ``take`` and ``settle`` are called on the I/O loop."""

    def __init__(self, move: Move, *, max_ranges: int, max_nbytes: int) -> None:
        self.move = move
        self.gate = Gate()
        self.finished = False
        self.nbytes = total_nbytes(move.ranges)
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._parts: Iterator[list[Range]] = split(
            move.ranges, max_ranges=max_ranges, max_nbytes=max_nbytes
        )
        self._bytes_left = self.nbytes

    @property
    def is_late(self) -> bool:
        """True when the deadline has passed."""
        return self._loop.time() >= self.move.deadline_s

    def take(self) -> Request | None:
        """Return the next request; None when all were taken or the operation is over."""
        part = None if self.finished else next(self._parts, None)
        return None if part is None else Request(self, part, total_nbytes(part))

    def settle(self, request: Request) -> None:
        """One request succeeded."""
        self._bytes_left -= request.nbytes
        if self._bytes_left == 0:
            self.finish(None)

    def finish(self, error: TransferError | None) -> None:
        """Complete the operation; only the first call counts."""
        if self.finished:
            return
        self.finished = True
        if error is not None:
            self.gate.shut()  # what still arrives is for nobody: it may not be the owner's any more
        try:
            if threading.get_ident() == self._thread:  # the I/O loop is lent to it
                self._resolve(error)
            else:
                self._loop.call_soon_threadsafe(self._resolve, error)
        except RuntimeError:  # the application's loop is closed: nobody waits
            self.gate.close()

    def _resolve(self, error: TransferError | None) -> None:
        if self._future.done():
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    async def wait(self, watch: Watch) -> None:
        """Wait for the end; ``watch`` may bring it about, or return before.

        Raises:
            DeadlineExceeded: the operation's deadline passed first.
            TransferError: what it failed with.
        """
        try:
            await watch(self)
            if not self._future.done():
                await self._wait()
            self._future.result()
        finally:
            self.gate.close()
            self._end_future()

    def _end_future(self) -> None:
        """Whoever was cancelled does not ask how it ended."""
        if not (self._future.cancel() or self._future.cancelled()):
            self._future.exception()

    async def _wait(self) -> None:
        timer = self._loop.call_at(self.move.deadline_s, self._expire)
        try:
            await self._future
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._resolve(
            DeadlineExceeded(f"{self._bytes_left} bytes had not moved when the deadline passed")
        )
