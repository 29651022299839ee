"""Blocking calls on daemon threads, awaited on the loop.

Owns a few threads for one kind of call: reads of a disk, say, or questions to a foreign library. A
call cannot be interrupted, and one that hangs must keep neither the loop nor the process: the
threads are daemons, which ``concurrent.futures`` does not offer (its threads are joined at exit).
Knows no calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class BlockingCalls:
    """``num_threads`` threads, started when they are needed. Callers bound what queues here."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = name, num_threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way: dict[asyncio.Future[Any], None] = {}
        self._closed = False

    def __len__(self) -> int:
        """Calls under way or queued, those included that nobody waits for any more."""
        return len(self._under_way)

    def start(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run ``function`` on a thread, to its end, also when the future is cancelled."""
        assert not self._closed, self._name
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._under_way[future] = None
        future.add_done_callback(self._ended)
        self._jobs.put(partial(_run, loop, future, partial(function, *args, **kwargs)))
        if len(self._threads) < min(self._num_threads, len(self._under_way)):
            self._add_thread()
        return asyncio.shield(future)

    def _add_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ended(self, future: asyncio.Future[Any]) -> None:
        del self._under_way[future]

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False when that takes longer than ``timeout_s``."""
        if self._under_way:
            await asyncio.wait(list(self._under_way), timeout=timeout_s)
        return not self._under_way

    def close(self) -> None:
        """Take no more calls; the threads end with what they were given. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its buffers are not held while the next one is waited for


def _run(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], function: Callable[[], T]
) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(_succeed, future, function())
    except Exception as error:  # noqa: BLE001 - the call's error is its outcome
        settle = partial(_fail, future, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(settle)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
