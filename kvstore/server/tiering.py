"""Moves pages between the segment and the tier below it.

Owns the tasks that copy pages down ahead of eviction and up on demand, bounded in number. What to
move is decided by ``Spilling``; how it is written is the ``Tier``'s business. Eviction never waits
for this: when the disk is slow or broken, pages are evicted without a copy.

Promotions of one key are shared by all who ask. A reader who gives up does not stop one: it ends by
itself, and the page is in memory for the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvstore.page import PageKey
from kvstore.server.directory import Directory
from kvstore.server.segment import Slot
from kvstore.server.spilling import Spill
from kvstore.server.tier import Tier
from kvstore.store import PageState

log = logging.getLogger(__name__)

SPILLS_MAX = 8  # pages on their way down
PROMOTIONS_MAX = 32  # pages on their way up
PROMOTIONS_WAITING_MAX = 4096  # pages that wait for that; more are reported absent
REMOVALS_AT_ONCE = 256  # forgotten pages that leave the tier between looks at the loop
ADOPT_BATCH = 256  # pages indexed at start between looks at the loop


class Tiering:
    """See the module's docstring.

    Args:
        directory: the core; its pages lie in ``view``.
        tier: opened; closed by ``close``.
        now_s: the loop's clock.
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
        self._spills: dict[PageKey, None] = {}
        self._promotions: dict[PageKey, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(PROMOTIONS_MAX)
        self._sweeping = False
        self._closed = False
        tier.displace(self._displaced)

    async def adopt(self) -> int:
        """Index what the tier holds from a life before; returns how many pages."""
        num_adopted = 0
        strange: list[PageKey] = []
        for num_seen, page in enumerate(self._tier.contents(), 1):
            if self._spilling.adopt(page):
                num_adopted += 1
            else:
                strange.append(page.record.key)
            if not num_seen % ADOPT_BATCH:
                await asyncio.sleep(0)
        self._tier.remove(strange)
        return num_adopted

    def numbers(self) -> dict[str, float]:
        """The tier's numbers, and what is on its way."""
        return {
            **self._tier.numbers(),
            "num_spilling": len(self._spills),
            "num_promoting": len(self._promotions),
        }

    # ---- down

    def kick(self) -> None:
        """Start copying what is next to go, and drop what was forgotten. Costs little if idle."""
        self._sweep()
        working = not self._closed and self._tier.degraded is None
        self._spilling.set_working(working=working)
        while working and len(self._spills) < SPILLS_MAX:
            spill = self._spilling.begin_spill(self._now_s())
            if spill is None:
                return
            key = spill.page.record.key
            if key in self._spills:  # the same page, put again while its copy is being made
                self._spilling.end_spill(spill, stored=False)
                continue
            self._spills[key] = None
            self._spawn(self._spill(key, spill), "spill")

    def _sweep(self) -> None:
        """Tell the tier what was forgotten, and how warm what it alone has is."""
        for key, heat in self._spilling.take_vacated():
            self._tier.touch(key, heat)
        if not self._sweeping and not self._closed:
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
            if self._spilling.take_removal(key):
                self._tier.remove([key])
            stored = await self._tier.store(spill.page, self._bytes_of(spill.slot))
        finally:
            del self._spills[key]
            if not self._spilling.end_spill(spill, stored=stored):
                self._tier.remove([key])
        self.kick()

    # ---- up

    async def promote(self, keys: Sequence[PageKey], deadline_s: float) -> None:
        """Bring those of ``keys`` that are only on the tier into memory, as far as there is time.

        When cancelled, promotions go on by themselves.
        """
        if not self._directory.num_spilled:
            return
        spilled = [k for k in dict.fromkeys(keys) if self._directory.state(k) is PageState.SPILLED]
        tasks = [task for key in spilled if (task := self._promotion(key)) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - self._now_s()))

    def _promotion(self, key: PageKey) -> asyncio.Task[None] | None:
        task = self._promotions.get(key)
        if task is None and not self._closed and len(self._promotions) < PROMOTIONS_WAITING_MAX:
            task = self._promotions[key] = self._spawn(self._promote(key), "promote")
        return task

    async def _promote(self, key: PageKey) -> None:
        try:
            async with self._gate:
                await self._load(key)
        finally:
            del self._promotions[key]
        self._sweep()

    async def _load(self, key: PageKey) -> None:
        promotion = self._spilling.begin_promote(key, self._now_s())
        if promotion is None:
            return
        loaded, done = False, False
        try:
            record = await self._tier.load(key, self._bytes_of(promotion.slot))
            loaded = record is not None and record.checksum == promotion.checksum
            done = True
        finally:
            self._spilling.end_promote(promotion, loaded=loaded)
        if done and not loaded and self._tier.degraded is None:
            self._spilling.lost(key)
            self._tier.remove([key])

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
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Stop, then close the tier. Idempotent."""
        self.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._tier.close()
