"""Where work on the disk is done: lanes, each with threads of its own.

Owns threads. Writes never wait behind reads, nor the index behind either. Knows no jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lane(StrEnum):
    WRITE = "write"
    READ = "read"
    INDEX = "index"  # one job at a time


class Lanes(Protocol):
    def submit(self, lane: Lane, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``job`` off the loop; a job that was given runs to its end."""
        ...

    def close(self) -> None:
        """End the threads; every job has ended."""
        ...


class ThreadLanes:
    """Lanes of threads."""

    def __init__(self, num_writers: int, num_readers: int) -> None:
        sizes = {Lane.WRITE: num_writers, Lane.READ: num_readers, Lane.INDEX: 1}
        self._pools = {
            lane: ThreadPoolExecutor(size, thread_name_prefix=f"ssd-{lane}")
            for lane, size in sizes.items()
        }

    def submit(self, lane: Lane, job: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pools[lane], job)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()


class InlineLanes:
    """No threads: a job runs where it is given, and ends a turn of the loop later.

    For the simulator, where the order of events must not depend on a scheduler.
    """

    def submit(self, lane: Lane, job: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        try:
            result = job()
        except Exception as error:  # noqa: BLE001 - the job's error is its outcome
            loop.call_soon(_fail, future, error)
        else:
            loop.call_soon(_settle, future, result)
        return future

    def close(self) -> None:
        pass


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
