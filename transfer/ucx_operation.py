"""One read or write over ucx, seen from both threads.

Owns the hand-over between the application's loop, which waits, and the ucx loop, which moves bytes.
Invariant: ``wait`` ends only when no piece of the operation is aboard, whatever ended it: UCX is
not told to touch the local memory any more, and has said that it does not, or is progressed no more
(``ucx_stragglers``). To stop is therefore a question to the ucx loop, and waiting for its answer;
``UcxLink`` bounds how long that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from transfer.errors import DeadlineExceeded, PeerClosed, TransferError
from transfer.interface import Range
from transfer.ranges import split, total_nbytes
from transfer.transports import Move
from transfer.ucx_freight import Freight


class UcxRequest:
    """A part of an operation that fits one ASK and the window."""

    def __init__(self, operation: UcxOperation, ranges: list[Range]) -> None:
        self.operation = operation
        self.ranges = ranges
        self.nbytes = total_nbytes(ranges)
        self.freight: Freight | None = None
        self.answered = False  # by the owner, with success or not
        self.complete = False  # every piece has moved


class UcxOperation:
    """Created on the application's loop; all but ``wait`` is called on the ucx loop, or lent.

    It is also the ``Access`` of its own freight: open until it has been finished.
    """

    def __init__(self, move: Move, *, max_ranges: int, max_nbytes: int) -> None:
        self.move = move
        self.finished = False
        self._error: TransferError | None = None
        self._num_aboard = 0
        self._again: list[list[Range]] = []
        self._parts: Iterator[list[Range]] = split(
            move.ranges, max_ranges=max_ranges, max_nbytes=max_nbytes
        )
        self._bytes_left = total_nbytes(move.ranges)
        self._loop = asyncio.get_running_loop()
        self._quiet: asyncio.Future[None] = self._loop.create_future()

    def take(self) -> UcxRequest | None:
        """Return the next request; None when all were taken or the operation is over."""
        if self.finished:
            return None
        part = self._again.pop() if self._again else next(self._parts, None)
        return None if part is None else UcxRequest(self, part)

    def give_back(self, request: UcxRequest) -> None:
        """The request moved nothing and is to be taken again."""
        self._again.append(request.ranges)

    def settle(self, request: UcxRequest) -> None:
        """One request succeeded."""
        self._bytes_left -= request.nbytes
        if self._bytes_left == 0:
            self.finish(None)

    def finish(self, error: TransferError | None) -> None:
        """End the operation, when it is quiet; only the first call counts."""
        if not self.finished:
            self.finished = True
            self._error = error
            self._tell_when_quiet()

    @property
    def is_open(self) -> bool:
        return not self.finished

    def enter(self) -> bool:
        if self.finished:
            return False
        self._num_aboard += 1
        return True

    def leave(self) -> None:
        self._num_aboard -= 1
        if self.finished:
            self._tell_when_quiet()

    def _tell_when_quiet(self) -> None:
        if self.finished and self._num_aboard == 0:
            try:
                self._loop.call_soon_threadsafe(self._on_quiet)
            except RuntimeError:
                pass  # the application's loop is closed: nobody waits

    def _on_quiet(self) -> None:
        if not self._quiet.done():
            self._quiet.set_result(None)

    async def wait(self, withdraw: Callable[[UcxOperation, TransferError], None]) -> None:
        """Wait for the end, and for quiet.

        Args:
            withdraw: tells the ucx loop to end the operation with this error; returns at once, and
                raises ``PeerClosed`` when that loop has ended, and with it every operation.

        Raises:
            DeadlineExceeded: the operation's deadline passed first.
            TransferError: what it failed with.
        """
        cancelled: asyncio.CancelledError | None = None
        stop: TransferError | None = None
        try:
            async with asyncio.timeout_at(self.move.deadline_s):
                await asyncio.shield(self._quiet)
        except TimeoutError:
            stop = DeadlineExceeded(
                f"{self._bytes_left} bytes had not moved when the deadline passed"
            )
        except asyncio.CancelledError as error:
            cancelled, stop = error, PeerClosed("the operation was cancelled")
        if stop is not None:
            cancelled = await self._stop(withdraw, stop) or cancelled
        if cancelled is not None:
            raise cancelled
        if self._error is not None:
            raise self._error

    async def _stop(
        self, withdraw: Callable[[UcxOperation, TransferError], None], error: TransferError
    ) -> asyncio.CancelledError | None:
        """End early; returns when quiet, with what tried to cancel the wait for it."""
        cancelled: asyncio.CancelledError | None = None
        try:
            withdraw(self, error)
        except PeerClosed:
            return None
        while not self._quiet.done():
            try:
                await asyncio.shield(self._quiet)
            except asyncio.CancelledError as again:
                cancelled = again
        return cancelled
