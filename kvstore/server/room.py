"""Who waits for the SSD to make room in memory, and for how long.

Owns the queue of those who need a slot while memory is full of pages that the SSD has yet to be
given: they are served in the order in which they came, as copies are made. Knows no pages: what
is tried again and again is the caller's.

::

    try, sparing what has no copy ──done──▶ answered at once
       │ no room                     ▲
       ▼                             │ a copy was made, a page committed, or a tick
    in the queue ──first in it──▶ try again
       │ the time of the caller is over, or nothing moves
       ▼
    try, sparing nobody: pages without a copy go (counted as ``unspilled``)

When nothing has moved for ``STILL_S`` although somebody waits (no copy was made, no page committed)
the disk is *stalled*: nobody waits for it until it has made a copy, or ``STALL_S`` have passed. So
a disk that hangs costs one wait now and then, not one for each put. Without an SSD nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from kvstore.server.polls import now_s

STILL_S = 2.0  # without a copy or a commit, while somebody waits: nobody does any more
STALL_S = 10.0  # before anybody does again
WAITING_MAX = 4096  # who wait at once; more are not spared the loss

Try = Callable[[bool], bool]  # takes ``patient``; False: no room, while pages are spared


class Room:
    """See the module's docstring.

    Args:
        kick: has copies made, of what is next to go.
        counters: gets ``room_waits`` and ``room_waits_over``.
    """

    def __init__(self, kick: Callable[[], None], counters: Counter[str]) -> None:
        self._kick = kick
        self._counters = counters
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._moved_s = 0.0  # when something did, or somebody began to wait
        self._stalled_until_s = 0.0

    def now(self, attempt: Try) -> bool:
        """Try without waiting; False: ``wait`` is worth it. Who waits already comes first."""
        if self._is_stalled or self._num_waiting >= WAITING_MAX:
            return attempt(False)
        return not self._num_waiting and attempt(True)

    async def wait(self, attempt: Try, until_s: float) -> None:
        """Try until there is room; at the end of the patience, once with none."""
        self._counters["room_waits"] += 1
        if not self._num_waiting:
            self._moved_s = now_s()
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(until_s), self._turn:
                while not self._is_stalled:
                    self._changed.clear()
                    self._kick()
                    if attempt(True):
                        return
                    await self._next()
        except TimeoutError:
            pass  # it has been long enough
        finally:
            self._num_waiting -= 1
        self._counters["room_waits_over"] += 1
        attempt(False)

    @property
    def _is_stalled(self) -> bool:
        return now_s() < self._stalled_until_s

    async def _next(self) -> None:
        """Wait until something has changed; note when nothing moves."""
        still_s = self._moved_s + STILL_S
        if now_s() < still_s:
            handle = asyncio.get_running_loop().call_at(still_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                handle.cancel()
        else:
            self._stalled_until_s = now_s() + STALL_S

    def copied(self) -> None:
        """A copy was made (or was not wanted): the disk works."""
        self._stalled_until_s = 0.0
        self.committed()

    def committed(self) -> None:
        """There are pages to copy; things go on, though not for the disk."""
        self._moved_s = now_s()
        self._changed.set()

    def look(self) -> None:
        """There may be room, or an SSD that takes no pages any more."""
        self._changed.set()
