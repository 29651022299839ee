"""Who waits for the SSD to make room in memory, and for how long.

Owns the queue of those who need a slot while memory is full of pages that the SSD has yet to be
given: they are served in the order in which they came, as copies are made. Who needs nothing that
those before him wait for (slots of another size are free) is served at once. Knows no pages: what
is tried again and again is the caller's.

::

    try, sparing what has no copy ──done──▶ answered at once
       │ no room                     ▲
       ▼                             │ a copy was made, a page committed, or a tick
    in the queue ──first in it──▶ try again
       │ the time of the caller is over, or nothing moves
       ▼
    try, sparing nobody: pages without a copy go (counted as ``unspilled``)

When nothing has moved in ``STILL_S`` of waiting, be it one wait or several after one another (no
copy was made, no page committed), the disk is *stalled*: nobody waits for it until it has made a
copy, or ``STALL_S`` have passed. So a disk that hangs costs one wait now and then, not one for
each put. Without an SSD nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvstore.server.polls import now_s

STILL_S = 2.0  # without a copy or a commit, while somebody waits: nobody does any more
STALL_S = 10.0  # before anybody does again
WAITING_MAX = 4096  # who wait at once; more are not spared the loss

Try = Callable[[bool], bool]  # takes ``patient``; False: no room, while pages are spared


class Want(NamedTuple):
    """What somebody needs: how to try for it, slots of which size, and whether free ones do."""

    attempt: Try
    page_nbytes: int
    fits: Callable[[], bool]


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
        self._waiting: Counter[int] = Counter()  # who wait, by the size of the slots
        self._since_s = 0.0  # when something moved, or somebody began to wait
        self._still_s = 0.0  # for which somebody had waited before that, and nothing moved
        self._stalled_until_s = 0.0

    def now(self, want: Want) -> bool:
        """Try without waiting; False: ``wait`` is worth it. Who waits already comes first."""
        if self._is_stalled or self._waiting.total() >= WAITING_MAX:
            return want.attempt(False)
        free = not self._waiting or (not self._waiting[want.page_nbytes] and want.fits())
        return free and want.attempt(True)

    async def wait(self, want: Want, wait_s: float) -> None:
        """Try until there is room; at the end of the patience, once with none.

        What an attempt raises ends the wait.
        """
        self._counters["room_waits"] += 1
        if not self._waiting:
            self._since_s = now_s()
        self._waiting[want.page_nbytes] += 1
        try:
            async with asyncio.timeout(wait_s), self._turn:
                while not self._is_stalled:
                    self._changed.clear()
                    self._kick()
                    if want.attempt(True):
                        return
                    await self._next()
        except TimeoutError:
            pass  # it has been long enough
        finally:
            self._waiting[want.page_nbytes] -= 1
            self._waiting += Counter()  # keeps no sizes that nobody waits for
            if not self._waiting:
                self._still_s += now_s() - self._since_s
        self._counters["room_waits_over"] += 1
        want.attempt(False)

    @property
    def _is_stalled(self) -> bool:
        return now_s() < self._stalled_until_s

    async def _next(self) -> None:
        """Wait until something has changed; note when nothing moves."""
        stalled_at_s = self._since_s + STILL_S - self._still_s
        if now_s() < stalled_at_s:
            handle = asyncio.get_running_loop().call_at(stalled_at_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                handle.cancel()
        else:
            self._stalled_until_s = now_s() + STALL_S
            self._still_s = 0.0

    def copied(self) -> None:
        """A copy was made (or was not wanted): the disk works."""
        self._stalled_until_s = 0.0
        self.committed()

    def committed(self) -> None:
        """There are pages to copy; things go on, though not for the disk."""
        self._since_s, self._still_s = now_s(), 0.0
        self._changed.set()

    def look(self) -> None:
        """There may be room, an SSD that takes no pages any more, or a node that takes none."""
        self._changed.set()
