"""Notices when a client's process is gone: what it was writing is given up then.

Owns the streams that clients hold open for as long as they live, counted by incarnation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from kvstore.config import SESSIONS_MAX
from kvstore.messages import HoldSession, StoreDone
from transfer.channel import Caller
from transfer.errors import RemoteFailed


class Sessions:
    """Args:
    ended: called with a client's incarnation when its last session has ended.
    """

    def __init__(self, ended: Callable[[str], object]) -> None:
        self._ended = ended
        self._sessions: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return self._sessions.total()

    async def hold(self, message: HoldSession, caller: Caller) -> AsyncIterator[StoreDone]:
        """Answer once, and stay until the caller is gone."""
        if self.num_open >= SESSIONS_MAX:
            raise RemoteFailed("busy", f"this store node holds {SESSIONS_MAX} sessions already")
        writer = caller.peer.incarnation
        self._sessions[writer] += 1
        try:
            yield StoreDone()
            await asyncio.get_running_loop().create_future()  # until this is cancelled
        finally:
            self._sessions[writer] -= 1
            if not self._sessions[writer]:
                del self._sessions[writer]
                self._ended(writer)
