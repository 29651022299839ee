"""Pages on their way to the disk.

Owns a page from the caller's memory to its slot: what is refused at once, the wait for memory, the
copy, the write, and the row that names it. Part of the tier (``kvstore/ssd/tier.py``).

::

    caller ──copy──▶ bounce ──thread: verify, write──▶ slot ──▶ journal: row
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.page import PageKey
from kvstore.server.tier import TierPage
from kvstore.ssd.bounce import BouncePool, copy
from kvstore.ssd.catalogue import Catalogue, Displaced, Grant
from kvstore.ssd.config import BOUNCE_NBYTES, STORES_MAX
from kvstore.ssd.header import SlotHeader, fits_format, pack_header, slot_nbytes_of
from kvstore.ssd.health import DiskState
from kvstore.ssd.journal import Journal
from kvstore.ssd.slot_io import SlotIO
from transfer.blocking_calls import BlockingCalls

BURST_S = 1.0  # of the budget: what may be saved up


class WriteBudget:
    """A token bucket: ``nbytes_per_s`` on average; None: no limit. Pure: the time is passed in.

    An SSD wears out with what is written to it, and reads wait behind writes. A page larger than
    the burst goes when the bucket is full.
    """

    def __init__(self, nbytes_per_s: float | None, now_s: float) -> None:
        self._rate = nbytes_per_s
        self._left = (nbytes_per_s or 0.0) * BURST_S
        self._filled_s = now_s

    def spend(self, nbytes: int, now_s: float) -> bool:
        """Take ``nbytes`` if they are there."""
        if self._rate is None:
            return True
        burst = self._rate * BURST_S
        self._left = min(burst, self._left + (now_s - self._filled_s) * self._rate)
        self._filled_s = now_s
        if self._left < min(nbytes, burst):
            return False
        self._left -= nbytes
        return True


class _Write(NamedTuple):
    """One page that a thread has, or is about to have."""

    header: SlotHeader
    packed: bytes  # the header's bytes
    grant: Grant
    buffer: memoryview


class PageWriter:
    """Stores pages of one tier.

    Attributes:
        told: once set, a page without room displaces colder ones, and this is told which, before
            it takes their place. Until then a page without room is refused.
    """

    def __init__(
        self,
        pages: Catalogue,
        slots: SlotIO,
        calls: BlockingCalls,
        journal: Journal,
        disk: DiskState,
        *,
        uuid: bytes,
        nbytes_per_s: float | None,
    ) -> None:
        self.told: Callable[[Sequence[PageKey]], None] | None = None
        self.counters: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._pages, self._slots, self._calls = pages, slots, calls
        self._journal, self._disk, self._uuid = journal, disk, uuid
        self._budget = WriteBudget(nbytes_per_s, self._loop.time())
        self._memory = BouncePool(BOUNCE_NBYTES // 2)
        self._making_room = asyncio.Lock()
        self._stores: dict[PageKey, asyncio.Future[bool]] = {}

    def __len__(self) -> int:
        """Stores under way."""
        return len(self._stores)

    async def drain(self) -> None:
        """Return when no store is under way; none may begin meanwhile."""
        while self._stores:
            await asyncio.wait(self._stores.values())

    async def store(self, page: TierPage, data: memoryview) -> bool:
        """Write one page, or join the store of it that is under way. When cancelled, ``data`` is
        not touched any more; a write that has begun goes on from memory of ours."""
        key = page.record.key
        outcome = self._stores.get(key)
        if outcome is None:
            if key in self._pages:
                return True
            assert len(data) == page.record.page_nbytes, (len(data), page.record.page_nbytes)
            reason = self._refusal(page)
            if reason is not None:
                self.counters[reason] += 1
                return False
            outcome = self._stores[key] = self._loop.create_future()
            await self._hand_over(page, data)
        return await self._answer(key, outcome)

    def _refusal(self, page: TierPage) -> str | None:
        """Why a page is not even waited for."""
        if not fits_format(page):
            return "refused_format"
        if len(self._stores) >= STORES_MAX:
            return "refused_busy"
        if not self._budget.spend(slot_nbytes_of(page.spec), self._loop.time()):
            return "refused_budget"
        return None if self._disk.may_write() else "refused_degraded"

    async def _memory_for(self, slot_nbytes: int) -> memoryview | None:
        """Memory for a page once it is its turn and the index has caught up; None: the disk takes
        too long."""
        try:
            async with asyncio.timeout(self._disk.hung_s):
                if self._journal.is_full and not await self._journal.flush(durable=False):
                    return None
                return await self._memory.take(slot_nbytes)
        except TimeoutError:
            return None

    async def _hand_over(self, page: TierPage, data: memoryview) -> None:
        """Wait for memory, find a slot and copy the page; from then on a thread has it."""
        grant: Grant | None = None
        buffer: memoryview | None = None
        key, page_nbytes = page.record.key, page.record.page_nbytes
        slot_nbytes = slot_nbytes_of(page.spec)
        try:
            buffer = await self._memory_for(slot_nbytes)
            if buffer is None:
                self.counters["refused_busy"] += 1
                self._finish(key, None, stored=False)
                return
            await self._make_room(slot_nbytes, page.heat)
            grant = self._pages.admit(
                key, slot_nbytes=slot_nbytes, page_nbytes=page_nbytes, heat=page.heat
            )
            if grant is None:
                self._finish(key, buffer, stored=False)
                return
            header = SlotHeader(page, self._uuid, grant.offset, grant.generation)
            write = _Write(header, pack_header(header), grant, buffer)
            await _fill(buffer, write.packed, data)
        except BaseException:
            if grant is not None:
                self._pages.abandon(grant)
            self._finish(key, buffer, stored=False)
            raise
        job = self._calls.start(self._slots.write, header, buffer, len(write.packed))
        job.add_done_callback(partial(self._written, write))

    async def _make_room(self, slot_nbytes: int, heat: float) -> None:
        """Displace what is colder, as far as that is needed; others run meanwhile.

        One at a time: two pages that want the same room would give up a slab each.
        """
        if self.told is None:
            return
        has_room = self._pages.slabs.has_room
        async with self._making_room:
            if has_room(slot_nbytes):
                return
            with contextlib.closing(self._pages.make_room(slot_nbytes, heat)) as steps:
                for displaced in steps:
                    self._displaced(displaced, self.told)
                    if has_room(slot_nbytes):
                        return  # and nobody runs before it is taken
                    await asyncio.sleep(0)

    def _displaced(
        self, displaced: list[Displaced], told: Callable[[Sequence[PageKey]], None]
    ) -> None:
        for _, offset in displaced:
            self._journal.put(offset, None)
        if displaced:
            told([key for key, _ in displaced])

    async def _answer(self, key: PageKey, outcome: asyncio.Future[bool]) -> bool:
        """Whether the page was stored; one that hangs is given up, its slot when it is quiet."""
        done, _ = await asyncio.wait([outcome], timeout=self._disk.hung_s)
        if done:
            return outcome.result()
        self._disk.write_hung()
        self._pages.remove([key])
        return False

    def _written(self, write: _Write, job: asyncio.Future[bool]) -> None:
        error = job.exception()
        if isinstance(error, OSError):
            self.counters["write_errors"] += 1
            self._disk.write_failed(error)
        elif error is None and job.result():
            self._disk.wrote()
        elif error is None:
            self.counters["refused_corrupt"] += 1
        stored = False
        if error is not None or not job.result():
            self._pages.abandon(write.grant)
        elif stored := self._pages.commit(write.grant):
            self._journal.put(write.grant.offset, write.packed)
            self.counters["stored"] += 1
            self.counters["stored_nbytes"] += write.grant.page_nbytes
        self._finish(write.grant.key, write.buffer, stored=stored)
        if error is not None and not isinstance(error, OSError):
            raise error

    def _finish(self, key: PageKey, buffer: memoryview | None, *, stored: bool) -> None:
        if buffer is not None:
            self._memory.give(buffer)
        self._stores.pop(key).set_result(stored)


async def _fill(buffer: memoryview, header: bytes, data: memoryview) -> None:
    end = len(header) + len(data)
    buffer[: len(header)] = header
    buffer[end:] = bytes(len(buffer) - end)  # nothing of the page that was here before
    await copy(buffer[len(header) : end], data)
