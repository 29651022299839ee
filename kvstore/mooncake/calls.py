"""Blocking calls on few threads, and how the loop waits for what cannot be cancelled.

Owns the threads of one kind of call. A call of the library cannot be interrupted: whoever waits
leaves at its deadline, and the call ends by itself, at the latest after the 60 s that Mooncake
grants a transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from transfer.interface import remaining_s

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """``num_threads`` threads for one kind of call. Callers bound what queues here."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"mooncake-{name}")
        self._under_way: dict[asyncio.Future[Any], None] = {}

    def __len__(self) -> int:
        """Calls under way or queued."""
        return len(self._under_way)

    def start(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run ``function`` on a thread. The future must not be cancelled."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))
        self._under_way[future] = None
        future.add_done_callback(lambda done: self._under_way.pop(done, None))
        return future

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False when that takes longer than ``timeout_s``."""
        if self._under_way:
            await asyncio.wait(list(self._under_way), timeout=timeout_s)
        return not self._under_way

    def close(self) -> None:
        """Take no more calls; the threads end with the calls that they are in."""
        self._pool.shutdown(wait=False)


async def done_by(future: asyncio.Future[Any], deadline_s: float) -> bool:
    """Wait for ``future`` until the deadline; True when it is done. Never cancels it."""
    await asyncio.wait({future}, timeout=max(0.0, remaining_s(deadline_s)))
    return future.done()


async def finished(short: asyncio.Future[T]) -> T:
    """Wait for what is over in a moment, also when cancelled; the cancellation comes after it."""
    cancelled: asyncio.CancelledError | None = None
    while not short.done():
        try:
            await asyncio.wait({short})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return short.result()


def when_done(future: asyncio.Future[T], act: Callable[[asyncio.Future[T]], None]) -> None:
    """Call ``act`` at once if ``future`` is done, else when it is."""
    if future.done():
        act(future)
    else:
        future.add_done_callback(act)


async def within(awaitable: Awaitable[T], deadline_s: float) -> T | None:
    """Await what can be cancelled; None at the deadline."""
    try:
        async with asyncio.timeout_at(deadline_s):
            return await awaitable
    except TimeoutError:
        return None
