"""Copies between two mapped memories in bounded pieces, off the event loop when it is long.

Owns the copy threads of one engine. Knows no peers: whether the memory may be touched is asked of
an ``Access`` around each piece. Invariant: when ``copy`` returns, raises or is cancelled, no thread
of this copier touches the two memories for it any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from transfer.errors import DeadlineExceeded, PeerClosed, TransferError
from transfer.interface import Range
from transfer.ranges import split, total_nbytes

SMALL_NBYTES = 4096  # below it a memoryview assignment is cheaper than a numpy call
PARALLEL_NBYTES = 8 << 20  # a second thread is not worth waking for less
MAX_PIECE_RANGES = 256


class Access(Protocol):
    """Permission to touch memory, for the time of one piece."""

    def enter(self) -> None:
        """Raise a ``TransferError`` if the memory must not be touched."""
        ...

    def leave(self) -> None:
        """Raise a ``TransferError`` if the piece that was copied cannot be trusted."""
        ...


class Copy(NamedTuple):
    """What to copy: ``remote_offset`` is in ``remote``, ``local_offset`` in ``local``."""

    local: memoryview
    remote: memoryview
    ranges: Sequence[Range]
    access: Access
    to_local: bool  # a read; else a write


class _Stop:
    """Why a running copy has to end early; set once."""

    __slots__ = ("_ends_at", "error")

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at
        self.error: TransferError | None = None

    def set(self, error: TransferError) -> None:
        if self.error is None:
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error
        if time.monotonic() >= self._ends_at:
            raise DeadlineExceeded("the deadline passed while bytes were being copied")


def copy_piece(copy: Copy, piece: Sequence[Range]) -> None:
    """Copy every range of ``piece``; numpy releases the interpreter lock for long ones."""
    source, target = (copy.remote, copy.local) if copy.to_local else (copy.local, copy.remote)
    for remote_offset, local_offset, nbytes in piece:
        start, end = (
            (remote_offset, local_offset) if copy.to_local else (local_offset, remote_offset)
        )
        if nbytes <= SMALL_NBYTES:
            target[end : end + nbytes] = source[start : start + nbytes]
        else:
            np.copyto(
                np.frombuffer(target, np.uint8, nbytes, end),
                np.frombuffer(source, np.uint8, nbytes, start),
            )


Job = Future[TransferError | None]


class Copier:
    """Runs copies inline or on its threads."""

    def __init__(self, *, threads: int, piece_nbytes: int, inline_nbytes: int) -> None:
        self._threads = threads
        self._piece_nbytes = piece_nbytes
        self._inline_nbytes = inline_nbytes
        self._pool: ThreadPoolExecutor | None = None
        self._active: set[_Stop] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def copy(self, copy: Copy, deadline_s: float) -> None:
        """Copy every range.

        Raises:
            DeadlineExceeded: the deadline passed; the destination is quiet.
            PeerClosed: this copier was closed.
            TransferError: whatever ``copy.access`` raised.
        """
        remaining = deadline_s - asyncio.get_running_loop().time()
        stop = _Stop(time.monotonic() + remaining)
        nbytes = total_nbytes(copy.ranges)
        if nbytes <= self._inline_nbytes:
            self._run(copy, copy.ranges, stop)
            return
        shares = max(1, min(self._threads, nbytes // PARALLEL_NBYTES))
        parts = list(
            split(copy.ranges, max_ranges=len(copy.ranges), max_nbytes=-(-nbytes // shares))
        )
        with self._lock:
            pool = self._open_pool()
            self._active.add(stop)
            jobs = [pool.submit(self._run_job, copy, part, stop) for part in parts]
        try:
            await _finish(jobs, stop, remaining)
        finally:
            with self._lock:
                self._active.discard(stop)

    def _open_pool(self) -> ThreadPoolExecutor:
        if self._closed:
            raise PeerClosed("this transfer engine is closed")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvferry-copy")
        return self._pool

    def _run_job(self, copy: Copy, ranges: Sequence[Range], stop: _Stop) -> TransferError | None:
        """Run in a thread; a failure also stops the other threads of the same copy."""
        try:
            self._run(copy, ranges, stop)
        except TransferError as error:
            stop.set(error)
            return error
        return None

    def _run(self, copy: Copy, ranges: Sequence[Range], stop: _Stop) -> None:
        for piece in self._pieces(ranges):
            stop.check()
            copy.access.enter()
            try:
                copy_piece(copy, piece)
            finally:
                copy.access.leave()

    def _pieces(self, ranges: Sequence[Range]) -> Iterator[list[Range]]:
        return split(ranges, max_ranges=MAX_PIECE_RANGES, max_nbytes=self._piece_nbytes)

    def close(self) -> None:
        """End running copies with ``PeerClosed``; wait at most for one piece of each."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
            for stop in self._active:
                stop.set(PeerClosed("this transfer engine was closed"))
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


async def _finish(jobs: list[Job], stop: _Stop, timeout_s: float) -> None:
    """Wait for all jobs; on deadline, failure or cancellation stop them and wait until quiet."""
    waiters = [asyncio.wrap_future(job) for job in jobs]
    cancelled: asyncio.CancelledError | None = None
    pending: set[asyncio.Future[TransferError | None]] = set(waiters)
    try:
        _, pending = await asyncio.wait(waiters, timeout=timeout_s)
        if pending:
            stop.set(DeadlineExceeded("the deadline passed during a copy"))
    except asyncio.CancelledError as error:
        cancelled = error
        stop.set(PeerClosed("the copy was cancelled"))
    for job in jobs if pending else ():
        job.cancel()  # succeeds only for those that no thread has begun
    while pending:
        try:
            _, pending = await asyncio.wait(waiters)
        except asyncio.CancelledError as error:
            cancelled = error
    outcomes = [waiter.result() for waiter in waiters if not waiter.cancelled()]
    if cancelled is not None:
        raise cancelled
    if stop.error is not None:
        raise stop.error
    assert not any(outcomes), "a job that failed sets the reason to stop"
