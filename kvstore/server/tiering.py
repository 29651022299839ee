"""Moves pages between the segment and the tier below it.

Owns the tasks that copy pages down ahead of eviction, bounded in number, and those that bring pages
up on demand (``promoting.py``). What to move is decided by ``Spilling``; how it is written is the
``Tier``'s business. Who needs a slot while the disk is behind waits for it in ``room``, for a
bounded time; when the disk is slower than that, or broken, pages are evicted without a copy. A
broken one is tried with a page now and then.

While all that is only in memory is being copied (``copy_all``), nothing else is: it has an order of
its own, the hottest first, where eviction would have the coldest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from kvstore.page import PageKey
from kvstore.server.adopting import Adoption
from kvstore.server.directory import Directory
from kvstore.server.promoting import Promoting
from kvstore.server.room import Room
from kvstore.server.segment import Slot
from kvstore.server.spilling import Spill
from kvstore.server.tier import Tier

log = logging.getLogger(__name__)

SPILLS_MAX = 8  # pages on their way down
COPIES_AT_ONCE = 256  # pages looked at for a copy between looks at the loop
REMOVALS_AT_ONCE = 256  # forgotten pages that leave the tier between looks at the loop
TRIAL_S = 1.0  # between pages that a tier which takes none is offered; it decides when it tries one


class Tiering:
    """See the module's docstring.

    Args:
        directory: the core; its pages lie in ``view``.
        tier: opened; closed by ``close``.
        now_s: the clock of its decisions and deadlines; the loop's, but for tests.

    Attributes:
        room: where those wait who need a slot.
    """

    def __init__(
        self, directory: Directory, tier: Tier, view: memoryview, *, now_s: Callable[[], float]
    ) -> None:
        self._spilling = directory.spilling
        self._directory = directory
        self._tier = tier
        self._view = view
        self._now_s = now_s
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._spills: dict[PageKey, asyncio.Task[None]] = {}
        self._num_copying_all = 0  # calls of ``copy_all`` under way
        self._adoption = Adoption(self._spilling, tier, self._spills)
        self._adopting: asyncio.Task[None] | None = None
        self._sweeping = False
        self._trial_s: float | None = None  # when a tier that takes no pages is offered one
        self._closed = False
        self.room = Room(self.kick, lambda: bool(self._spills), directory.counters)
        self._promoting = Promoting(
            directory,
            tier,
            self.room,
            bytes_of=self._bytes_of,
            spawn=self._spawn,
            kick=self.kick,
            clock_s=now_s,
        )
        tier.displace(self._displaced)
        self._spilling.set_working(working=tier.degraded is None)

    # ---- what the tier kept from a life before

    def start_adopting(self, then: Callable[[int], None]) -> None:
        """Index it in the background; ``then`` is told how many pages there were."""

        async def adopt() -> None:
            then(await self.adopt())

        self._adopting = self._spawn(adopt(), "adopt")

    async def adopt(self) -> int:
        """Index it now; returns how many pages."""
        return await self._adoption.run()

    async def adopted(self) -> bool:
        """Wait until every page of the tier is indexed; False: that has failed."""
        if self._adopting is not None:
            await asyncio.wait([self._adopting])
        return self._adoption.over

    @property
    def healthy(self) -> bool:
        """What the tier kept is indexed, or is being indexed."""
        return self._adopting is None or not self._adopting.done() or self._adoption.over

    def numbers(self) -> dict[str, float]:
        """The tier's numbers, and what is on its way."""
        return {
            **self._tier.numbers(),
            "num_spilling": len(self._spills),
            "num_promoting": len(self._promoting),
            "num_to_adopt": self._adoption.num_left,
        }

    # ---- down

    def kick(self) -> None:
        """Start copying what is next to go, and drop what was forgotten. Costs little if idle."""
        self._sweep()
        working = not self._closed and self._tier.degraded is None
        self._spilling.set_working(working=working)
        if self._num_copying_all:
            return  # which chooses the pages itself
        limit = SPILLS_MAX if working else self._num_trials()
        while len(self._spills) < limit:
            spill = self._spilling.begin_spill(self._now_s())
            if spill is None:
                return
            key = spill.page.record.key
            if key in self._spills:  # the same page, put again while its copy is being made
                self._spilling.end_spill(spill, stored=False)
                continue
            self._start(key, spill)

    def _start(self, key: PageKey, spill: Spill) -> None:
        task = self._spills[key] = self._spawn(self._spill(key, spill), "spill")
        task.add_done_callback(partial(self._spilled, key, spill))

    def tick(self) -> None:
        """``kick`` by timer: what has made room meanwhile is seen by those who wait for it."""
        self.kick()
        self.room.look()

    def _num_trials(self) -> int:
        """How many pages may be offered to a tier that takes none: one now and then."""
        now_s = self._now_s()
        due = self._trial_s is not None and now_s >= self._trial_s
        if self._trial_s is None or due:
            self._trial_s = now_s + TRIAL_S
        return int(due and not self._closed)

    async def copy_all(self) -> None:
        """Copy what is only in memory, the hottest first; others run meanwhile.

        When cancelled, it stays at what has been copied by then. Ends when this is aborted.
        """
        self._num_copying_all += 1
        try:
            unwritten = self._spilling.unwritten()
            for _ in unwritten.steps():
                await asyncio.sleep(0)
            await self._copy_each(unwritten.keys())
            if self._spills:
                await asyncio.wait(list(self._spills.values()))
        finally:
            self._num_copying_all -= 1
            self.kick()

    async def _copy_each(self, keys: Iterator[PageKey]) -> None:
        """Begin to copy them, in this order, while the tier takes pages."""
        for number, key in enumerate(keys, start=1):
            if number % COPIES_AT_ONCE == 0:
                await asyncio.sleep(0)
            while len(self._spills) >= SPILLS_MAX and not self._closed:
                await asyncio.wait(self._spills.values(), return_when=asyncio.FIRST_COMPLETED)
            if self._closed or self._tier.degraded is not None:
                return
            if key in self._spills:
                continue
            spill = self._spilling.begin_copy(key, self._now_s())
            if spill is not None:
                self._start(key, spill)

    def _sweep(self) -> None:
        """Tell the tier what was forgotten, and how warm what it alone has is."""
        if self._closed:
            return
        for key, heat in self._spilling.take_vacated():
            self._tier.touch(key, heat)
        if not self._sweeping:
            removals = self._spilling.take_removals(REMOVALS_AT_ONCE)
            self._tier.remove(removals)
            if len(removals) == REMOVALS_AT_ONCE:
                self._sweeping = True
                self._spawn(self._sweep_on(), "sweep")

    async def _sweep_on(self) -> None:
        """A million pages may be forgotten at once: others run meanwhile."""
        try:
            while removals := self._spilling.take_removals(REMOVALS_AT_ONCE):
                self._tier.remove(removals)
                await asyncio.sleep(0)
        finally:
            self._sweeping = False

    def _displaced(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._spilling.displaced(key)

    async def _spill(self, key: PageKey, spill: Spill) -> None:
        stored = False
        try:
            if self._spilling.take_removal(key) or not self._adoption.over:
                self._tier.remove([key])  # what it holds of the key is older
            stored = await self._tier.store(spill.page, self._bytes_of(spill.slot))
        finally:
            failed = self._end(key, spill, stored=stored)
        if not failed:
            self._trial_s = None
            self.room.copied()
        self.kick()

    def _end(self, key: PageKey, spill: Spill, *, stored: bool) -> bool:
        """Before anything else happens on the tier; True when the disk failed."""
        del self._spills[key]
        failed = not stored and self._tier.degraded is not None
        if not self._spilling.end_spill(spill, stored=stored, failed=failed):
            self._tier.remove([key])
        return failed

    def _spilled(self, key: PageKey, spill: Spill, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before it began has ended nothing itself."""
        if self._spills.get(key) is task:
            self._end(key, spill, stored=False)

    async def flush(self) -> bool:
        """Have what was forgotten so far leave the tier for good: it does not come back, however
        this process ends. False: the disk failed."""
        while removals := self._spilling.take_removals(REMOVALS_AT_ONCE):
            self._tier.remove(removals)
            await asyncio.sleep(0)
        if self._spills:  # copies of what was forgotten: they go when they have been made
            await asyncio.wait(list(self._spills.values()))
        return await self._tier.flush()

    # ---- up

    async def promote(self, keys: Sequence[PageKey], deadline_s: float) -> None:
        """Bring those of ``keys`` that are only on the tier into memory, as far as there is time
        (``promoting.py``)."""
        await self._promoting.promote(keys, deadline_s)

    # ---- life

    def _bytes_of(self, slot: Slot) -> memoryview:
        return self._view[slot.offset : slot.offset + slot.nbytes]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("moving a page to or from the SSD: %r", error, exc_info=error)

    async def idle(self) -> None:
        """Return when nothing is on its way."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def abort(self) -> None:
        """Stop at once: what is on its way is given up. Idempotent."""
        self._closed = True
        self._promoting.abort()
        self.room.look()
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Stop, then close the tier. Idempotent."""
        self.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._tier.close()
