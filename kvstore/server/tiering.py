"""Moves pages between the segment and the tier below it.

Owns the tasks that copy pages down ahead of eviction and up on demand, bounded in number. What to
move is decided by ``Spilling``; how it is written is the ``Tier``'s business. Who needs a slot
while the disk is behind waits for it in ``room``, for a bounded time; when the disk is slower than
that, or broken, pages are evicted without a copy. A broken one is tried with a page now and then.

Promotions of one key are shared by all who ask. A reader who gives up does not stop one: it ends by
itself, and the page is in memory for the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvstore.page import PageKey
from kvstore.server.adopting import Adoption
from kvstore.server.directory import Directory
from kvstore.server.room import Room, Want
from kvstore.server.segment import Slot
from kvstore.server.spilling import Promotion, Spill
from kvstore.server.tier import Tier
from kvstore.store import PageState

log = logging.getLogger(__name__)

SPILLS_MAX = 8  # pages on their way down
PROMOTIONS_MAX = 32  # pages on their way up
PROMOTIONS_WAITING_MAX = 4096  # pages that wait for that; more are reported absent
PROMOTION_WAIT_S = 1.0  # of a page on its way up, for room
COPIES_AT_ONCE = 256  # pages looked at for a copy between looks at the loop
REMOVALS_AT_ONCE = 256  # forgotten pages that leave the tier between looks at the loop
TRIAL_S = 1.0  # between pages that a tier which takes none is offered; it decides when it tries one
PROMOTED_AT_ONCE = 0.5  # of the memory: more would push out what was just brought in


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
        self._promotions: dict[PageKey, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(PROMOTIONS_MAX)
        self._adoption = Adoption(self._spilling, tier, self._spills)
        self._adopting: asyncio.Task[None] | None = None
        self._sweeping = False
        self._trial_s: float | None = None  # when a tier that takes no pages is offered one
        self._closed = False
        self.room = Room(self.kick, directory.counters)
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
            "num_promoting": len(self._promotions),
            "num_to_adopt": self._adoption.num_left,
        }

    # ---- down

    def kick(self) -> None:
        """Start copying what is next to go, and drop what was forgotten. Costs little if idle."""
        self._sweep()
        working = not self._closed and self._tier.degraded is None
        self._spilling.set_working(working=working)
        limit = SPILLS_MAX if working else self._num_trials()
        while len(self._spills) < limit:
            spill = self._spilling.begin_spill(self._now_s())
            if spill is None:
                return
            key = spill.page.record.key
            if key in self._spills:  # the same page, put again while its copy is being made
                self._spilling.end_spill(spill, stored=False)
                continue
            self._spills[key] = self._spawn(self._spill(key, spill), "spill")

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

        When cancelled, it stays at what has been copied by then.
        """
        unwritten = self._spilling.unwritten()
        for _ in unwritten.steps():
            await asyncio.sleep(0)
        for number, key in enumerate(unwritten.keys(), start=1):
            if number % COPIES_AT_ONCE == 0:
                await asyncio.sleep(0)
            while len(self._spills) >= SPILLS_MAX:
                await asyncio.wait(self._spills.values(), return_when=asyncio.FIRST_COMPLETED)
            if self._closed or self._tier.degraded is not None:
                break
            if key in self._spills:
                continue
            spill = self._spilling.begin_copy(key, self._now_s())
            if spill is not None:
                self._spills[key] = self._spawn(self._spill(key, spill), "copy")
        if self._spills:
            await asyncio.wait(list(self._spills.values()))

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
            del self._spills[key]
            failed = not stored and self._tier.degraded is not None
            if not self._spilling.end_spill(spill, stored=stored, failed=failed):
                self._tier.remove([key])
        if not failed:
            self._trial_s = None
            self.room.copied()
        self.kick()

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
        """Bring those of ``keys`` that are only on the tier into memory, as far as there is time.

        At most ``PROMOTED_AT_ONCE`` of the memory, the first ones: who asked comes back for the
        others. When cancelled, promotions go on by themselves.
        """
        if not self._directory.num_spilled:
            return
        spilled = [k for k in dict.fromkeys(keys) if self._directory.state(k) is PageState.SPILLED]
        first = self._first_of(spilled)
        tasks = [task for key in first if (task := self._promotion(key)) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - self._now_s()))

    def _first_of(self, keys: Sequence[PageKey]) -> Sequence[PageKey]:
        """As many as may come at once, at least one."""
        nbytes_left = PROMOTED_AT_ONCE * len(self._view)
        for number, key in enumerate(keys):
            nbytes_left -= self._directory.page_nbytes(key)
            if nbytes_left < 0:
                return keys[: max(1, number)]
        return keys

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
        self.kick()

    async def _load(self, key: PageKey) -> None:
        promotion = await self._begin_promote(key)
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

    async def _begin_promote(self, key: PageKey) -> Promotion | None:
        """Once there is room; None: the page is not to be brought up, or there is none."""
        begun: list[Promotion] = []
        if not self._spilling.may_promote(key):
            return None

        def attempt(patient: bool) -> bool:
            spilling = self._spilling
            promotion = spilling.begin_promote(key, self._now_s(), patient=patient)
            if promotion is not None:
                begun.append(promotion)
            return bool(begun) or not spilling.sparing or not spilling.may_promote(key)

        nbytes, segment = self._directory.page_nbytes(key), self._directory.segment
        want = Want(attempt, nbytes, lambda: segment.can_allocate(nbytes))
        if not self.room.now(want):
            await self.room.wait(want, PROMOTION_WAIT_S)
        return begun[0] if begun else None

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
        self.room.look()
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Stop, then close the tier. Idempotent."""
        self.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._tier.close()
