"""Who waits for the SSD to make room in memory, and for how long.

Owns the queues of those who need a slot while memory is full of pages that the SSD has yet to be
given: readers of spilled pages come before writers, each kind is served in the order in which it
came, as copies are made. Who needs nothing that those before him wait for (slots of another size
are free) is served at once. Knows no pages: what is tried again and again is the caller's.

::

    try, sparing what has no copy ──done──▶ answered at once
       │ no room                     ▲
       ▼                             │ a copy was made, a page committed, or a tick
    in the queue ──first in it──▶ try again
       │ the time of the caller is over, or nothing moves
       ▼
    try, sparing nobody: pages without a copy go (counted as ``unspilled``)

When nothing has moved in ``STILL_S`` of waiting, be it one wait or several after one another (no
copy was made; a commit counts only where there was nothing to copy before it), the disk is
*stalled*: nobody waits for it until it has made a copy, or ``STALL_S`` have passed. So a disk that
hangs costs one wait now and then, not one for each put. Without an SSD nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvstore.server.polls import now_s

STILL_S = 2.0  # without a copy, while somebody waits: nobody does any more
STALL_S = 10.0  # before anybody does again
WAITING_MAX = 4096  # who wait at once; more are not spared the loss

Try = Callable[[bool], bool]  # takes ``patient``; False: no room, while pages are spared


class Want(NamedTuple):
    """What somebody needs: how to try for it, slots of which size, whether free ones do, and
    whether it is for a reader."""

    attempt: Try
    page_nbytes: int
    fits: Callable[[], bool]
    reads: bool = False


class _Queue:
    """Who wait: one at a time tries, in the order in which they came."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.sizes: Counter[int] = Counter()  # how many wait for slots of this size

    def __len__(self) -> int:
        return self.sizes.total()

    def enter(self, page_nbytes: int) -> None:
        self.sizes[page_nbytes] += 1

    def leave(self, page_nbytes: int) -> None:
        self.sizes[page_nbytes] -= 1
        self.sizes += Counter()  # keeps no sizes that nobody waits for


class Room:
    """See the module's docstring.

    Args:
        kick: has copies made, of what is next to go.
        copying: whether copies are being made now.
        counters: gets ``room_waits`` and ``room_waits_over``.
    """

    def __init__(
        self, kick: Callable[[], None], copying: Callable[[], bool], counters: Counter[str]
    ) -> None:
        self._kick = kick
        self._copying = copying
        self._counters = counters
        self._changed = asyncio.Event()
        self._readers, self._writers = _Queue(), _Queue()
        self._since_s = 0.0  # when something moved, or somebody began to wait
        self._still_s = 0.0  # for which somebody had waited before that, and nothing moved
        self._stalled_until_s = 0.0

    @property
    def _num_waiting(self) -> int:
        return len(self._readers) + len(self._writers)

    def now(self, want: Want) -> bool:
        """Try without waiting; False: ``wait`` is worth it. Who waits already comes first, unless
        it is a writer and this a reader."""
        if self._is_stalled or self._num_waiting >= WAITING_MAX:
            return want.attempt(False)
        before = self._readers.sizes if want.reads else self._readers.sizes + self._writers.sizes
        free = not before or (not before[want.page_nbytes] and want.fits())
        return free and want.attempt(True)

    async def wait(self, want: Want, wait_s: float) -> None:
        """Try until there is room; at the end of the patience, once with none.

        What an attempt raises ends the wait.
        """
        self._counters["room_waits"] += 1
        queue = self._readers if want.reads else self._writers
        if not self._num_waiting:
            self._since_s = now_s()
        queue.enter(want.page_nbytes)
        try:
            async with asyncio.timeout(wait_s), queue.turn:
                if await self._served(want):
                    return
        except TimeoutError:
            pass  # it has been long enough
        finally:
            queue.leave(want.page_nbytes)
            if not self._num_waiting:
                self._still_s += now_s() - self._since_s
            elif not self._readers:
                self._changed.set()  # it is a writer's turn
        self._counters["room_waits_over"] += 1
        want.attempt(False)

    async def _served(self, want: Want) -> bool:
        """Try whenever something has changed; False when nothing moves any more."""
        while not self._is_stalled:
            self._changed.clear()
            self._kick()
            if (want.reads or not self._readers) and want.attempt(True):
                return True
            await self._next()
        return False

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
        self._moved()

    def committed(self) -> None:
        """There are pages to copy: it is from now on that the disk owes one, if it had none."""
        if self._copying():
            self._changed.set()
        else:
            self._moved()

    def _moved(self) -> None:
        self._since_s, self._still_s = now_s(), 0.0
        self._changed.set()

    def look(self) -> None:
        """There may be room, an SSD that takes no pages any more, or a node that takes none."""
        self._changed.set()
