"""One thread that gives work to a device and waits for it.

Owns the order of the jobs and their hand-over between event loops and the device. Knows neither
copies nor memory. A job is *withdrawn* for as long as it has not begun; afterwards whoever asked
for it is told only when the device has done it. So what a caller does after ``run`` never meets the
device's work on the same memory, however the call ended::

    queued ──begun──▶ on the device ──event──▶ ended
      └──cancelled──▶ withdrawn

Two jobs are on the device at a time: it goes from one to the next without waiting for this thread,
and a cancelled caller waits for two at most.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from transfer.device_memory import DeviceEvent
from transfer.errors import DeviceFailed, PeerClosed, TransferError

MAX_ON_DEVICE = 2
MAX_QUEUED = 4096  # far beyond what the bounce rings of one device can ask for

Start = Callable[[], DeviceEvent | None]  # None: done already
Ended = Callable[[TransferError | None], None]


class _Job:
    __slots__ = ("ended", "event", "start")

    def __init__(self, start: Start, ended: Ended) -> None:
        self.start = start
        self.ended = ended
        self.event: DeviceEvent | None = None

    def begin(self) -> TransferError | None:
        try:
            self.event = self.start()
        except TransferError as error:
            return error
        return None

    def finish(self) -> None:
        """Wait for the device; once, because waiting also ends what the job holds."""
        event, self.event = self.event, None
        assert event is not None, "a job that is not on the device"
        try:
            event.wait()
        except TransferError as error:
            self.ended(error)
        else:
            self.ended(None)


class DeviceLane:
    """Runs jobs in order. Thread-safe; its thread starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[_Job] = deque()
        self._on_device: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, start: Start, *, only_waits: bool = False) -> None:
        """Have ``start`` called on the lane's thread, and wait for the event it returns.

        However this ends, the device is done with the job, or was never given it. A job that
        ``only_waits`` touches nothing: cancelling ends it at once.

        Raises:
            PeerClosed: the lane was closed before the job had begun.
            DeviceFailed: too many wait already.
            TransferError: whatever ``start`` or its event raised.
        """
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        job = _Job(start, lambda error: _hand_over(loop, end, error))
        self._put(job)
        cancelled: asyncio.CancelledError | None = None
        while not end.done():
            try:
                await asyncio.wait([end])
            except asyncio.CancelledError as error:
                cancelled = error
                if self._withdraw(job) or only_waits:
                    end.cancel()
                    raise
        failure = end.exception()
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure

    def _put(self, job: _Job) -> None:
        with self._changed:
            if self._closed:
                raise PeerClosed("this transfer engine is closed")
            if len(self._queue) >= MAX_QUEUED:
                raise DeviceFailed(f"{MAX_QUEUED} operations wait for {self._name} already")
            self._queue.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _withdraw(self, job: _Job) -> bool:
        """Return True if the job had not begun, and now never will."""
        with self._changed:
            if job not in self._queue:
                return False
            self._queue.remove(job)
            return True

    @property
    def is_alive(self) -> bool:
        """False when the thread has ended, in order or by a bug."""
        return self._thread is None or self._thread.is_alive()

    def _run(self) -> None:
        _run_anywhere()
        try:
            self._work()
        finally:  # there is something left only if a bug ended the thread
            try:
                self._finish_what_is_on_the_device()
            finally:
                self.close(wait=False)

    def _finish_what_is_on_the_device(self) -> None:
        """Nobody else waits for it: its memory would stay taken, and closing would hang."""
        for job in list(self._on_device):
            if job.event is not None:
                job.finish()
                self._drop(job)

    def _work(self) -> None:
        while self._await_work():
            for job in self._begin_some():
                error = job.begin()
                if error is not None or job.event is None:
                    job.ended(error)
                    self._drop(job)
            if self._on_device:
                oldest = self._on_device[0]
                oldest.finish()
                self._drop(oldest)

    def _await_work(self) -> bool:
        """Return True when there is something to do, False when the lane is closed."""
        with self._changed:
            while not (self._queue or self._on_device or self._closed):
                self._changed.wait()
            return bool(self._queue or self._on_device)

    def _begin_some(self) -> list[_Job]:
        """Move as many jobs from the queue to the device as there is room for."""
        with self._changed:
            room = MAX_ON_DEVICE - len(self._on_device)
            begun = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
            self._on_device.extend(begun)
            return begun

    def _drop(self, job: _Job) -> None:
        with self._changed:
            self._on_device.remove(job)

    def close(self, *, wait: bool = True) -> None:
        """End what has not begun with ``PeerClosed``; wait for the rest. Idempotent.

        Without ``wait``, those on the device are told the same at once.
        """
        with self._changed:
            self._closed = True
            ended = list(self._queue)
            if not wait:
                ended += self._on_device
            self._queue.clear()
            self._changed.notify()
        for job in ended:
            job.ended(PeerClosed("this transfer engine was closed"))
        if wait and self._thread is not None:
            self._thread.join()


def _run_anywhere() -> None:
    """Take the cores of the process: whoever started this thread may be kept off one for now."""
    if sys.platform == "linux":
        with suppress(OSError):  # threads may not be moved here
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


def _hand_over(
    loop: asyncio.AbstractEventLoop, end: asyncio.Future[None], error: TransferError | None
) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, end, error)
    except RuntimeError:
        pass  # the caller's loop is closed: nobody waits


def _resolve(end: asyncio.Future[None], error: TransferError | None) -> None:
    if end.done():
        return  # nobody waits, or it was told when the lane was closed
    if error is None:
        end.set_result(None)
    else:
        end.set_exception(error)
