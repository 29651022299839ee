"""Small tasks that outlive the call that started them: releases of leases, aborts of reservations.

Owns the tasks: none is orphaned, their number is bounded, ``close`` gives them a moment and then
cancels them. A task that is dropped because there are too many is not lost work: the lease or
reservation ends by itself at the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from kvstore.config import BACKGROUND_MAX


class Background:
    """Named owner of fire-and-forget tasks, which must handle their own errors."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, None], name: str) -> bool:
        """Run ``work``; False: dropped, as this is closed or too many are running."""
        if self._closed or len(self._tasks) >= BACKGROUND_MAX:
            self.num_dropped += 1
            work.close()
            return False
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._finished)
        return True

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            context = {"message": f"{task.get_name()} failed", "exception": task.exception()}
            asyncio.get_running_loop().call_exception_handler(context)

    async def idle(self) -> None:
        """Return when nothing is running."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for what runs, then cancel it. Idempotent."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """Cancel everything at once."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
