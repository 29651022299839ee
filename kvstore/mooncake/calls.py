"""How the loop waits for calls that cannot be interrupted.

Whoever waits leaves at its deadline, and the call (``transfer/blocking_calls.py``) ends by itself,
at the latest after the 60 s that Mooncake grants a transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from transfer.interface import remaining_s

T = TypeVar("T")


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
