"""Brings pages that are only on the tier back into memory, for those who read them.

Owns the promotions under way, bounded in number: one task for each key, shared by all who ask. A
reader who gives up does not stop one: it ends by itself, and the page is in memory for the next.

A page that finds no room waits for it in ``room``, before all who write, and holds up no load
meanwhile. All pages of one call share one wait of ``PROMOTION_WAIT_S``: after it pages without a
copy go, as a reader is worth no more of the time that recomputing would take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from kvstore.page import PageKey
from kvstore.server.directory import Directory
from kvstore.server.polls import now_s
from kvstore.server.room import Room, Want
from kvstore.server.segment import Slot
from kvstore.server.spilling import Promotion
from kvstore.server.tier import Tier
from kvstore.store import PageState

PROMOTIONS_MAX = 32  # pages on their way up
PROMOTIONS_WAITING_MAX = 4096  # pages that wait for that; more are reported absent
PROMOTION_WAIT_S = 1.0  # of the pages of one call, together, for room
PROMOTED_AT_ONCE = 0.5  # of the memory: more would push out what was just brought in


class Spawn(Protocol):
    """Starts a task that its owner ends."""

    def __call__(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...


class Patience:
    """The one wait for room of a call: it begins when a page of it needs room for the first time,
    and ends for all of them at once."""

    def __init__(self) -> None:
        self._end_s: float | None = None

    def left_s(self) -> float:
        if self._end_s is None:
            self._end_s = now_s() + PROMOTION_WAIT_S
        return self._end_s - now_s()

    @property
    def over(self) -> bool:
        return self._end_s is not None and now_s() >= self._end_s


class Promoting:
    """See the module's docstring.

    Args:
        bytes_of: the bytes of a slot.
        kick: has copies made; called whenever a promotion has ended.
        clock_s: that of the directory's decisions and the callers' deadlines.
    """

    def __init__(
        self,
        directory: Directory,
        tier: Tier,
        room: Room,
        *,
        bytes_of: Callable[[Slot], memoryview],
        spawn: Spawn,
        kick: Callable[[], None],
        clock_s: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._spilling = directory.spilling
        self._tier = tier
        self._room = room
        self._bytes_of = bytes_of
        self._spawn = spawn
        self._kick = kick
        self._clock_s = clock_s
        self._under_way: dict[PageKey, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(PROMOTIONS_MAX)  # never held by one who waits for room
        self._closed = False

    def __len__(self) -> int:
        """Promotions under way, or waiting for it."""
        return len(self._under_way)

    def abort(self) -> None:
        """Begin none any more; who spawned those under way ends them."""
        self._closed = True

    async def promote(self, keys: Sequence[PageKey], deadline_s: float) -> None:
        """Bring those of ``keys`` that are only on the tier into memory, as far as there is time.

        At most ``PROMOTED_AT_ONCE`` of the memory, the first ones: who asked comes back for the
        others. When cancelled, promotions go on by themselves.
        """
        if not self._directory.num_spilled:
            return
        spilled = [k for k in dict.fromkeys(keys) if self._directory.state(k) is PageState.SPILLED]
        patience = Patience()
        asked = [self._ask(key, patience) for key in self._first_of(spilled)]
        tasks = [task for task in asked if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - self._clock_s()))

    def _first_of(self, keys: Sequence[PageKey]) -> Sequence[PageKey]:
        """As many as may come at once, at least one."""
        nbytes_left = PROMOTED_AT_ONCE * self._directory.segment.nbytes
        for number, key in enumerate(keys):
            nbytes_left -= self._directory.page_nbytes(key)
            if nbytes_left < 0:
                return keys[: max(1, number)]
        return keys

    def _ask(self, key: PageKey, patience: Patience) -> asyncio.Task[None] | None:
        task = self._under_way.get(key)
        if task is None and not self._closed and len(self._under_way) < PROMOTIONS_WAITING_MAX:
            task = self._under_way[key] = self._spawn(self._promote(key, patience), "promote")
            task.add_done_callback(lambda _: self._ended(key))
        return task

    def _ended(self, key: PageKey) -> None:
        """However it ended, also before it began."""
        del self._under_way[key]
        self._kick()

    async def _promote(self, key: PageKey, patience: Patience) -> None:
        begun: list[Promotion] = []
        want = self._want(key, begun)
        async with self._gate:
            if not self._spilling.may_promote(key) or self._try_now(want, patience):
                await self._load(begun, contextlib.nullcontext())
                return
        await self._room.wait(want, patience.left_s())
        await self._load(begun, self._gate)

    def _want(self, key: PageKey, begun: list[Promotion]) -> Want:
        """A slot for ``key``; the promotion is in ``begun`` then."""

        def attempt(patient: bool) -> bool:
            spilling = self._spilling
            promotion = spilling.begin_promote(key, self._clock_s(), patient=patient)
            if promotion is not None:
                begun.append(promotion)
            return bool(begun) or not spilling.sparing or not spilling.may_promote(key)

        nbytes, segment = self._directory.page_nbytes(key), self._directory.segment
        return Want(attempt, nbytes, lambda: segment.can_allocate(nbytes), reads=True)

    def _try_now(self, want: Want, patience: Patience) -> bool:
        """True: there is no waiting, whatever came of it."""
        if patience.over:
            want.attempt(False)
            return True
        return self._room.now(want)

    async def _load(
        self, begun: list[Promotion], turn: contextlib.AbstractAsyncContextManager[None]
    ) -> None:
        """Read the page into its slot when it is its ``turn``, if it was granted one."""
        if not begun:
            return
        promotion, loaded, record = begun[0], False, None
        key = promotion.key
        try:
            async with turn:
                record = await self._tier.load(key, self._bytes_of(promotion.slot))
            loaded = record is not None and record.checksum == promotion.checksum
        finally:
            self._spilling.end_promote(promotion, loaded=loaded)
        if record is not None and not loaded:
            self._tier.remove([key])  # it is no copy of the page that this node knows
        if not loaded and key not in self._tier:
            self._spilling.lost(key)
