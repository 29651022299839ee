"""A page store for pages in device memory: every page passes through host staging memory.

Owns the batches of one ``put`` or ``get``: staging pages are taken, used for one batch and given
back, so that any number of pages moves through as little as one staging page. The bytes are
verified by the inner store, in staging memory, before the device sees them. Knows no wire.

    put:  device ──copy_out──▶ staging ──inner.put──▶ store
    get:  store ──inner.get (verified)──▶ staging ──copy_in──▶ device ──▶ READ is reported

Two lanes per call keep copies and wire busy at the same time. A get that waits looks at which of
its pages are there (``match``), moves these, and waits for its first missing page only: it holds
one staging page at the most meanwhile, and notices pages that come out of order within
``WAIT_SLICE_S``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence

from kvstore.asking import check_keys, check_pages
from kvstore.device.staging import DevicePages, DeviceRegion, PageMove, Staging, StagingSlots
from kvstore.page import PageKey, PageSpec
from kvstore.store import (
    DEFAULT_POLICY,
    GetOutcome,
    GetPage,
    GetResult,
    PageState,
    PageStore,
    PutOutcome,
    PutPage,
    PutPolicy,
    PutResult,
    TransferCount,
)
from transfer.errors import TransferError
from transfer.interface import Region, Transfer

logger = logging.getLogger(__name__)

NUM_LANES = 2  # batches of one call under way at a time
CALLS_SERVED = 2  # calls that find a batch's worth of staging pages free at the same time
WAIT_SLICE_S = 0.5  # a waiting get looks again after this long
POLL_S = 0.05  # and not sooner than this, when nothing came

OnPage = Callable[[int, GetOutcome], None]


class StagedStore:
    """``PageStore`` over ``store`` for the pages of one device.

    ``source`` and ``into`` are ``region``, or another ``DeviceRegion`` of the same memory. Staging
    memory bounds what is under way; calls beyond it wait their turn, until their deadline.

    Args:
        store: where pages live; closed with this one.
        transfer: registers the staging memory.
        pages: the device's page memory.
        spec: geometry of the pages, as ``store`` has it.

    Attributes:
        region: the device's page memory as an address space.
        counters: failed device copies, and failed calls of the inner store.
    """

    def __init__(
        self, store: PageStore, *, transfer: Transfer, pages: DevicePages, spec: PageSpec
    ) -> None:
        self.spec = spec
        self.region = DeviceRegion(pages.nbytes)
        self.counters: Counter[str] = Counter()
        self.staging = Staging(pages, transfer=transfer, page_nbytes=spec.page_nbytes)
        self.inner = store

    async def match(self, keys: Sequence[PageKey], *, deadline_s: float) -> list[PageState]:
        check_keys(keys, deadline_s)
        return await self.inner.match(keys, deadline_s=deadline_s)

    async def put(
        self,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> PutResult:
        check_pages(pages, self.spec, source, deadline_s)
        return await _Put(self, pages, _device(source), deadline_s, policy).run()

    async def get(
        self,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        wait: bool = False,
        on_page: OnPage | None = None,
    ) -> GetResult:
        check_pages(pages, self.spec, into, deadline_s)
        return await _Get(self, pages, _device(into), deadline_s, on_page).run(wait=wait)

    async def close(self) -> None:
        """Withdraw the staging memory, close the inner store. Idempotent."""
        await asyncio.to_thread(self.region.revoke)  # may wait for a peer
        await asyncio.to_thread(self.staging.region.revoke)
        await self.inner.close()

    def broke(self, what: str, error: Exception) -> None:
        """Count and report what cost a batch its pages."""
        self.counters[what] += 1
        logger.warning("staged pages lost: %s: %r", what, error)


class _Batches:
    """What both kinds of call do: cut their pages into batches as staging pages are free."""

    def __init__(self, store: StagedStore, region: DeviceRegion, deadline_s: float) -> None:
        self.store = store
        self.staging = store.staging
        self.device = region
        self.deadline_s = deadline_s
        self.num_moved = 0
        self.moved_nbytes = 0

    @property
    def late(self) -> bool:
        return asyncio.get_running_loop().time() >= self.deadline_s

    async def in_batches(
        self,
        indexes: Sequence[int],
        work: Callable[[list[int], list[int]], Coroutine[None, None, None]],
    ) -> None:
        """Run ``work(indexes, staging_slots)`` until all are done or it is late."""
        todo = deque(indexes)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(NUM_LANES, len(todo))):
                tasks.create_task(self._lane(todo, work))

    async def _lane(
        self,
        todo: deque[int],
        work: Callable[[list[int], list[int]], Coroutine[None, None, None]],
    ) -> None:
        slots = self.staging.moving.pool
        batch_max = max(1, slots.num_slots // (NUM_LANES * CALLS_SERVED))
        while todo and not self.late:
            taken = await slots.take(min(batch_max, len(todo)), deadline_s=self.deadline_s)
            try:
                batch = [todo.popleft() for _ in taken[: len(todo)]]
                if batch:
                    await work(batch, taken)
            finally:
                slots.give_back(taken)

    def count(self, moved: TransferCount) -> None:
        self.num_moved += moved.num_pages
        self.moved_nbytes += moved.nbytes

    @property
    def moved(self) -> TransferCount:
        return TransferCount(self.num_moved, self.moved_nbytes)


class _Put(_Batches):
    """One call of ``put``. What has no outcome at the end has FAILED."""

    def __init__(
        self,
        store: StagedStore,
        pages: Sequence[PutPage],
        source: DeviceRegion,
        deadline_s: float,
        policy: PutPolicy,
    ) -> None:
        super().__init__(store, source, deadline_s)
        self._pages = pages
        self._policy = policy
        self._outcomes = [PutOutcome.FAILED] * len(pages)

    async def run(self) -> PutResult:
        await self.in_batches(range(len(self._pages)), self._push)
        return PutResult(self._outcomes, self.moved)

    async def _push(self, batch: list[int], slots: list[int]) -> None:
        offsets = [self.staging.moving.offset_of(slot) for slot in slots]
        moves, puts = [], []
        for i, offset in zip(batch, offsets, strict=False):  # slots may be left over
            moves.append(PageMove(self.device.first + self._pages[i].local_offset, offset))
            puts.append(self._pages[i]._replace(local_offset=offset))
        if self.device.revoked:
            return
        try:
            await self.staging.copy_out(moves)
            result = await self.store.inner.put(
                puts,
                source=self.staging.region,
                deadline_s=self.deadline_s,
                policy=self._policy,
            )
        except (RuntimeError, TransferError) as error:
            self.store.broke("broken_puts", error)
            return
        self.count(result.moved)
        for i, outcome in zip(batch, result.outcomes, strict=True):
            self._outcomes[i] = outcome


class _Get(_Batches):
    """One call of ``get``. What has no outcome at the end is ABSENT."""

    def __init__(
        self,
        store: StagedStore,
        pages: Sequence[GetPage],
        into: DeviceRegion,
        deadline_s: float,
        on_page: OnPage | None,
    ) -> None:
        super().__init__(store, into, deadline_s)
        self._pages = pages
        self._on_page = on_page
        self._outcomes: dict[int, GetOutcome] = {}

    async def run(self, *, wait: bool) -> GetResult:
        todo = list(range(len(self._pages)))
        if wait:
            await self._wait_for(todo)
        else:
            await self.in_batches(todo, self._pull)
        for i in self._missing(todo):
            self._finish(i, GetOutcome.ABSENT)
        return GetResult([self._outcomes[i] for i in todo], self.moved)

    async def _wait_for(self, todo: list[int]) -> None:
        """Pull pages as they come, until all have an outcome or it is late."""
        while todo and not self.late:
            await self.in_batches(await self._ready(todo), self._pull)
            left = self._missing(todo)
            if len(left) == len(todo):
                await self._wait_for_one(left[0])
                left = self._missing(left)
            todo = left

    async def _ready(self, todo: list[int]) -> list[int]:
        keys = [self._pages[i].identity.key for i in todo]
        states = await self.store.inner.match(keys, deadline_s=self.deadline_s)
        return [i for i, state in zip(todo, states, strict=True) if state.present]

    async def _wait_for_one(self, index: int) -> None:
        """Return when the page has come, after a while, or at the deadline."""
        loop = asyncio.get_running_loop()
        look_s = min(self.deadline_s, loop.time() + POLL_S)
        slots = self.staging.waiting.pool.take_free(1)
        try:
            if slots:
                until_s = min(self.deadline_s, loop.time() + WAIT_SLICE_S)
                await self._fetch([index], self.staging.waiting, slots, until_s, wait=True)
        finally:
            self.staging.waiting.pool.give_back(slots)
        if index not in self._outcomes:  # no slot, or an inner store that did not wait
            await asyncio.sleep(max(0.0, look_s - loop.time()))

    async def _pull(self, batch: list[int], slots: list[int]) -> None:
        await self._fetch(batch, self.staging.moving, slots, self.deadline_s, wait=False)

    async def _fetch(
        self,
        batch: list[int],
        area: StagingSlots,
        slots: list[int],
        until_s: float,
        *,
        wait: bool,
    ) -> None:
        """Bring a batch to the device; pages that are absent stay without an outcome."""
        offsets = [area.offset_of(slot) for slot in slots[: len(batch)]]
        gets = [
            self._pages[i]._replace(local_offset=offset)
            for i, offset in zip(batch, offsets, strict=True)
        ]
        try:
            result = await self.store.inner.get(
                gets, into=self.staging.region, deadline_s=until_s, wait=wait
            )
        except TransferError as error:
            self.store.broke("broken_gets", error)
            for i in batch:
                self._finish(i, GetOutcome.FAILED)
            return
        self.count(result.moved)
        read = []
        for i, offset, outcome in zip(batch, offsets, result.outcomes, strict=True):
            if outcome is GetOutcome.READ:
                read.append((i, offset))
            elif outcome is not GetOutcome.ABSENT:
                self._finish(i, outcome)
        if read:
            await self._land(read)

    async def _land(self, read: list[tuple[int, int]]) -> None:
        moves = [
            PageMove(self.device.first + self._pages[i].local_offset, offset) for i, offset in read
        ]
        outcome = GetOutcome.FAILED
        if not self.device.revoked:
            try:
                await self.staging.copy_in(moves)
                outcome = GetOutcome.READ
            except RuntimeError as error:
                self.store.broke("broken_copies", error)
        for i, _ in read:
            self._finish(i, outcome)

    def _missing(self, indexes: Sequence[int]) -> list[int]:
        return [i for i in indexes if i not in self._outcomes]

    def _finish(self, index: int, outcome: GetOutcome) -> None:
        assert index not in self._outcomes, f"page {index} has an outcome already"
        self._outcomes[index] = outcome
        if self._on_page is not None:
            self._on_page(index, outcome)


def _device(region: Region) -> DeviceRegion:
    assert isinstance(region, DeviceRegion), f"{region!r} is not device memory"
    return region
