"""Copies between two mapped memories in bounded pieces, off the event loop when it is long.

Owns the copy threads of one engine. Knows no peers: whether the memory may be touched is asked of
an ``Access`` around each piece. Who goes first is decided in ``copy_queue``; several threads may
work on one copy, a piece each.

::

    copy() ──small──▶ copy_piece in the caller's loop ──────────────▶ copy() returns
       └─────large──▶ CopyQueue ──turn──▶ copy_piece in a thread ──quiet──▶ ▲
                          ▲                    │
                          └──── more pieces ───┘

An error, the deadline, a cancellation or ``close`` drops what is queued and waits for what runs.

Invariant: when ``copy`` returns, raises or is cancelled, no thread of this copier touches the two
memories for it any more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from transfer.copy_pieces import Mover, cut, piece_nbytes_of
from transfer.copy_queue import CopyQueue
from transfer.errors import DeadlineExceeded, PeerClosed, PeerUnreachable, TransferError
from transfer.interface import Priority, Range
from transfer.ranges import total_nbytes

_LOG = logging.getLogger(__name__)

PARALLEL_NBYTES = 8 << 20  # one more thread for each; 24 MB: 0.95 of memcpy, by one thread 0.85
MAX_QUEUED_COPIES = 4096  # of each priority, waiting or running; more wait their turn to queue


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
    priority: Priority = Priority.NOW


def copy_piece(mover: Mover, piece: Sequence[Range], access: Access) -> None:
    """Copy one piece. Every byte that loopback and shm move passes through here.

    Raises:
        TransferError: whatever ``access`` raised.
    """
    access.enter()
    try:
        mover.move(piece)
    finally:
        access.leave()


class _Job:
    """One copy on its way through the threads. Guarded by the copier's lock."""

    def __init__(self, copy: Copy, *, piece_nbytes: int, max_threads: int, ends_at: float) -> None:
        self.priority = copy.priority
        self.max_threads = max_threads
        self.access = copy.access
        self.mover = Mover(copy.local, copy.remote, to_local=copy.to_local)
        self.num_running = 0
        self.error: BaseException | None = None
        self._pieces = cut(copy.ranges, piece_nbytes)
        self._next = next(self._pieces, None)
        self._ends_at = ends_at
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.is_quiet = False  # set on the caller's loop

    @property
    def wants_turn(self) -> bool:
        has_more = self._next is not None and self.error is None
        return has_more and self.num_running < self.max_threads

    def take(self) -> Turn:
        piece = self._next
        assert piece is not None, "took a piece of a copy that has none left"
        self._next = next(self._pieces, None)
        self.num_running += 1
        return self, piece

    def check(self) -> None:
        if time.monotonic() >= self._ends_at:
            raise DeadlineExceeded("the deadline passed while bytes were being copied")

    def fail(self, error: BaseException) -> None:
        """The first reason to end early is the one that is raised."""
        if self.error is None:
            self.error = error

    def settle(self) -> None:
        """Wake the caller if nothing runs and nothing will."""
        if self.num_running == 0 and not self.wants_turn:
            with suppress(RuntimeError):  # the loop that waited is closed: nobody waits
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self.is_quiet = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when quiet. Cancelling it stops nothing: wait again."""
        self._waiter = self._loop.create_future()
        await self._waiter


Turn = tuple[_Job, Sequence[Range]]


class Copier:
    """Runs copies inline or on its threads."""

    def __init__(self, *, threads: int, piece_nbytes: int, inline_nbytes: int) -> None:
        self._max_threads = threads
        self._piece_nbytes = piece_nbytes
        self._inline_nbytes = inline_nbytes
        self._room = {priority: asyncio.Semaphore(MAX_QUEUED_COPIES) for priority in Priority}
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)
        self._queue: CopyQueue[_Job] = CopyQueue()
        self._active: set[_Job] = set()
        self._threads: set[threading.Thread] = set()
        self._num_started = 0
        self._num_idle = 0  # threads that wait and were not woken yet
        self._closed = False

    async def copy(self, copy: Copy, deadline_s: float) -> None:
        """Copy every range.

        Raises:
            DeadlineExceeded: the deadline passed; the destination is quiet.
            PeerClosed: this copier was closed.
            PeerUnreachable: the system has no thread to copy with.
            TransferError: whatever ``copy.access`` raised.
        """
        nbytes = total_nbytes(copy.ranges)
        if nbytes <= self._inline_nbytes:
            self._copy_inline(copy)
            return
        room = self._room[copy.priority]
        if room.locked():
            await _wait_for(room, deadline_s)
        else:
            await room.acquire()  # does not suspend
        try:
            await self._run_on_threads(self._job(copy, nbytes, deadline_s), deadline_s)
        finally:
            room.release()

    def _job(self, copy: Copy, nbytes: int, deadline_s: float) -> _Job:
        remaining_s = deadline_s - asyncio.get_running_loop().time()
        return _Job(
            copy,
            piece_nbytes=piece_nbytes_of(nbytes, self._piece_nbytes),
            max_threads=min(self._max_threads, 1 + nbytes // PARALLEL_NBYTES),
            ends_at=time.monotonic() + remaining_s,
        )

    def _copy_inline(self, copy: Copy) -> None:
        """No deadline is looked at: it is checked before, and the copy takes microseconds."""
        mover = Mover(copy.local, copy.remote, to_local=copy.to_local)
        for piece in cut(copy.ranges, self._piece_nbytes):
            copy_piece(mover, piece, copy.access)

    async def _run_on_threads(self, job: _Job, deadline_s: float) -> None:
        timer = asyncio.get_running_loop().call_at(deadline_s, self._expire, job)
        try:
            self._begin(job)
            await self._until_quiet(job)
            if job.error is not None:
                raise job.error
        finally:
            timer.cancel()
            with self._lock:
                self._active.discard(job)
            del job  # the error's traceback holds this frame: the job must not live as long

    def _expire(self, job: _Job) -> None:
        self._stop(job, DeadlineExceeded("the deadline passed during a copy"))

    async def _until_quiet(self, job: _Job) -> None:
        """Wait until no thread works for ``job``, also when cancelled meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while not job.is_quiet:
            try:
                await job.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                self._stop(job, PeerClosed("the copy was cancelled"))
        if cancelled is not None:
            raise cancelled

    def _begin(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise PeerClosed("this transfer engine is closed")
            self._call_a_thread()  # first: where there is none, nothing is left in the queue
            self._active.add(job)
            self._queue.add(job, job.priority)

    def _call_a_thread(self) -> None:
        """Wake a thread, or start one if all are busy. Call it under the lock.

        Each calls the next if there is work for it: a thread that is woken by another finds the
        caller's processor idle, while two that the caller wakes often end up on the same one.
        """
        if self._num_idle:
            self._num_idle -= 1
            self._work_came.notify()
        elif len(self._threads) < self._max_threads:
            self._start_thread()

    def _start_thread(self) -> None:
        """Where the system has no thread left, those that run do the work alone.

        Raises:
            PeerUnreachable: none runs.
        """
        name = f"kvferry-copy-{self._num_started + 1}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise PeerUnreachable(
                    f"no thread to copy with: {error}; raise the limit on processes (ulimit -u)"
                ) from error
            _LOG.warning("transfer: %d copy threads go on alone: %s", len(self._threads), error)
            return
        self._num_started += 1
        self._threads.add(thread)

    def _stop(self, job: _Job, error: TransferError) -> None:
        """End ``job`` early; it is quiet after the pieces that run now. Idempotent."""
        with self._lock:
            job.fail(error)
            self._queue.drop(job)
            job.settle()

    def _work(self) -> None:
        """Take turns until the copier is closed. Runs in a thread."""
        try:
            while self._take_turn():
                pass
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                if self._queue and not self._closed:  # a bug ended this thread: not the others'
                    self._call_a_thread()

    def _take_turn(self) -> bool:
        """Copy one piece; False when the copier is closed."""
        turn = self._wait_for_turn()
        if turn is None:
            return False
        job, piece = turn
        try:
            _run(job, piece)
        finally:
            with self._lock:
                self._end_turn(job)
        return True

    def _wait_for_turn(self) -> Turn | None:
        """Hold no reference to any memory while waiting."""
        with self._lock:
            while (turn := self._queue.next(_Job.take)) is None:
                if self._closed:
                    return None
                self._num_idle += 1
                self._work_came.wait()
            if self._queue:
                self._call_a_thread()
            return turn

    def _end_turn(self, job: _Job) -> None:
        """Call it under the lock."""
        job.num_running -= 1
        if job.error is None:
            self._queue.add(job, job.priority)
        else:
            self._queue.drop(job)
        job.settle()

    def close(self) -> None:
        """End running copies with ``PeerClosed``; wait at most for one piece of each thread."""
        with self._lock:
            self._closed = True
            jobs, threads = list(self._active), list(self._threads)
            self._work_came.notify_all()
        for job in jobs:
            self._stop(job, PeerClosed("this transfer engine was closed"))
        for thread in threads:
            thread.join()


def _run(job: _Job, piece: Sequence[Range]) -> None:
    """Copy one piece; a failure also stops the other threads of the same copy."""
    if job.error is not None:
        return  # stopped since the turn was given
    outcome: BaseException | None = AssertionError("a bug of ours ended a copy thread")
    try:
        job.check()
        copy_piece(job.mover, piece, job.access)
        outcome = None
    except TransferError as error:
        outcome = error
    finally:
        if outcome is not None:
            job.fail(outcome)


async def _wait_for(room: asyncio.Semaphore, deadline_s: float) -> None:
    try:
        async with asyncio.timeout_at(deadline_s):
            await room.acquire()
    except TimeoutError:
        raise DeadlineExceeded(
            f"{MAX_QUEUED_COPIES} copies were queued until the deadline"
        ) from None
