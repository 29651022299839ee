"""A timer that is moved far more often than it fires.

Owns one timer of the running loop. Lazy: putting it off costs nothing, the timer fires early, and
its owner arms it again. It is moved only when it would fire too late. Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LazyTimer:
    """Calls ``fire(now_s, late_s)`` at the armed time or before, never earlier than some ``arm``.

    ``now_s`` is at least the time that the timer was set to (a loop may fire early, by its
    resolution); ``late_s`` is how far behind the loop is.
    """

    def __init__(self, fire: Callable[[float, float], None]) -> None:
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def arm(self, due_s: float) -> None:
        """See to it that the timer fires at ``due_s`` at the latest."""
        if self._handle is not None:
            if self._due_s <= due_s:
                return
            self._handle.cancel()
        self._due_s = due_s
        self._handle = asyncio.get_running_loop().call_at(due_s, self._due)

    def cancel(self) -> None:
        """Fire no more, until armed again. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _due(self) -> None:
        self._handle = None
        now_s = max(asyncio.get_running_loop().time(), self._due_s)
        self._fire(now_s, now_s - self._due_s)
