"""Pages on their way to the disk.

Owns a page from the caller's memory to its slot: what is refused at once, the copy, the write, and
the row that names it. Part of the tier (``kvstore/ssd/tier.py``).

::

    caller ──copy──▶ bounce ──WRITE lane: verify, write──▶ slot ──▶ journal: row
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.page import PageKey
from kvstore.server.tier import TierPage
from kvstore.ssd.bounce import BouncePool, copy
from kvstore.ssd.budget import WriteBudget
from kvstore.ssd.catalogue import Catalogue, Evicted, Grant
from kvstore.ssd.config import BOUNCE_NBYTES, STORES_MAX
from kvstore.ssd.disk_state import DiskState
from kvstore.ssd.header import SlotHeader, fits_format, pack_header, slot_nbytes_of
from kvstore.ssd.journal import Journal
from kvstore.ssd.lanes import Lane, Lanes
from kvstore.ssd.slot_io import SlotIO


class PageWriter:
    """Stores pages of one tier."""

    def __init__(
        self,
        pages: Catalogue,
        slots: SlotIO,
        lanes: Lanes,
        journal: Journal,
        disk: DiskState,
        *,
        uuid: bytes,
        nbytes_per_s: float | None,
        on_evicted: Callable[[Sequence[PageKey]], None] | None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._pages, self._slots, self._lanes = pages, slots, lanes
        self._journal, self._disk, self._uuid = journal, disk, uuid
        self.on_evicted = on_evicted
        self._budget = WriteBudget(nbytes_per_s, self._loop.time())
        self._memory = BouncePool(BOUNCE_NBYTES // 2)
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
        under_way = self._stores.get(key)
        if under_way is not None:
            return await asyncio.shield(under_way)
        if key in self._pages:
            return True
        assert len(data) == page.record.page_nbytes, (len(data), page.record.page_nbytes)
        taken = self._take(page)
        if taken is None:
            return False
        grant, buffer = taken
        outcome = self._stores[key] = self._loop.create_future()
        header = SlotHeader(page, self._uuid, grant.offset, grant.generation)
        packed = pack_header(header)
        try:
            await _fill(buffer, packed, data)
        except asyncio.CancelledError:
            self._finish_store(header, grant, buffer, packed, stored=False)
            raise
        job = self._lanes.submit(
            Lane.WRITE, partial(self._slots.write, header, buffer, len(packed))
        )
        job.add_done_callback(partial(self._written, header, grant, buffer, packed))
        return await asyncio.shield(outcome)

    def _take(self, page: TierPage) -> tuple[Grant, memoryview] | None:
        """A slot and memory for a page, or the reason why not is counted."""
        spec, record = page.spec, page.record
        slot_nbytes = slot_nbytes_of(spec)
        now_s = self._loop.time()
        reason: str | None = None
        if not fits_format(page):
            reason = "refused_format"
        elif len(self._stores) >= STORES_MAX or self._journal.is_full:
            reason = "refused_busy"
        elif not self._disk.may_write():
            reason = "refused_degraded"
        elif not self._budget.spend(slot_nbytes, now_s):
            reason = "refused_budget"
        if reason is not None:
            self.counters[reason] += 1
            return None
        buffer = self._memory.take_now(slot_nbytes)
        if buffer is None:
            self.counters["refused_busy"] += 1
            return None
        sizes = (slot_nbytes, record.page_nbytes)
        grant, evicted = self._pages.admit(record.key, page.namespace, sizes, page.heat)
        self._tell_evicted(evicted)
        if grant is None:
            self._memory.give(buffer)
            return None
        return grant, buffer

    def _tell_evicted(self, evicted: list[Evicted]) -> None:
        for _, offset in evicted:
            self._journal.put(offset, None)
        if evicted and self.on_evicted is not None:
            self.on_evicted([key for key, _ in evicted])

    def _written(
        self,
        header: SlotHeader,
        grant: Grant,
        buffer: memoryview,
        packed: bytes,
        job: asyncio.Future[bool],
    ) -> None:
        error = job.exception()
        if isinstance(error, OSError):
            self.counters["write_errors"] += 1
            self._disk.write_failed(error)
        elif error is None and job.result():
            self._disk.wrote()
        elif error is None:
            self.counters["refused_corrupt"] += 1
        stored = error is None and job.result()
        self._finish_store(header, grant, buffer, packed, stored=stored)
        if error is not None and not isinstance(error, OSError):
            raise error

    def _finish_store(
        self, header: SlotHeader, grant: Grant, buffer: memoryview, packed: bytes, *, stored: bool
    ) -> None:
        self._memory.give(buffer)
        if not stored:
            self._pages.abandon(grant)
        elif stored := self._pages.commit(grant):
            self._journal.put(grant.offset, packed)
            self.counters["stored"] += 1
            self.counters["stored_nbytes"] += grant.page_nbytes
        self._stores.pop(header.page.record.key).set_result(stored)


async def _fill(buffer: memoryview, header: bytes, data: memoryview) -> None:
    end = len(header) + len(data)
    buffer[: len(header)] = header
    buffer[end:] = bytes(len(buffer) - end)  # nothing of the page that was here before
    await copy(buffer[len(header) : end], data)
