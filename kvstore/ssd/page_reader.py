"""Pages on their way from the disk.

Owns a page from its slot to the caller's memory: the pin, the read, the verdict, the copy. Part of
the tier (``kvstore/ssd/tier.py``).

::

    slot ──READ lane: read, verify──▶ bounce ──copy──▶ caller
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvstore.page import PageKey
from kvstore.ssd.bounce import BouncePool, copy
from kvstore.ssd.catalogue import Catalogue, Grant
from kvstore.ssd.config import BOUNCE_NBYTES, LOADS_MAX
from kvstore.ssd.disk_state import DiskState
from kvstore.ssd.lanes import Lane, Lanes
from kvstore.ssd.slot_io import Damage, Found, SlotIO
from kvstore.store import PageRecord

log = logging.getLogger(__name__)


class PageReader:
    """Loads pages of one tier.

    Args:
        remove: forgets a page that is damaged.
    """

    def __init__(
        self,
        pages: Catalogue,
        slots: SlotIO,
        lanes: Lanes,
        disk: DiskState,
        *,
        remove: Callable[[PageKey], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._pages, self._slots, self._lanes, self._disk = pages, slots, lanes, disk
        self._remove = remove
        self._memory = BouncePool(BOUNCE_NBYTES // 2)
        self._num_loads = 0
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        """Loads under way."""
        return self._num_loads

    async def drain(self) -> None:
        """Return when no load and no read is under way; none may begin meanwhile."""
        while self._memory.num_out or self._num_loads:
            await self._idle.wait()
            await asyncio.sleep(0)

    async def load(self, key: PageKey, into: memoryview) -> PageRecord | None:
        if self._num_loads >= LOADS_MAX:
            self.counters["loads_refused"] += 1
            return None
        grant = self._pages.pin(key)
        if grant is None:
            self.counters["misses"] += 1
            return None
        self._num_loads += 1
        self._idle.clear()
        try:
            return await self._load(key, grant, into)
        finally:
            self._num_loads -= 1

    async def _load(self, key: PageKey, grant: Grant, into: memoryview) -> PageRecord | None:
        """Read, copy, let go. The slot is pinned and the buffer held until the thread is done."""
        assert len(into) == grant.page_nbytes, (len(into), grant.page_nbytes)
        try:
            buffer = await self._memory.take(grant.slot_nbytes)
        except asyncio.CancelledError:
            self._pages.unpin(grant)
            raise
        if not self._disk.may_read():
            self._let_go(grant, buffer)
            return None
        job = self._lanes.submit(Lane.READ, partial(self._slots.read, key, grant, buffer))
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            job.add_done_callback(partial(self._abandoned, key, grant, buffer))
            raise
        try:
            found = self._judge(key, grant, job)
            if found is None:
                return None
            await copy(into, buffer[found.page_at : found.page_at + grant.page_nbytes])
        finally:
            self._let_go(grant, buffer)
        self.counters["promoted"] += 1
        self.counters["loaded_nbytes"] += grant.page_nbytes
        return found.header.page.record

    def _judge(
        self, key: PageKey, grant: Grant, job: asyncio.Future[Found | Damage]
    ) -> Found | None:
        """What was read, if it is the page; forgets it if not."""
        error = job.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        if not self._pages.is_held(grant):
            return None  # removed while it was read
        if isinstance(error, OSError):
            self.counters["read_errors"] += 1
            self._disk.read_failed(error)
            self._drop(key, "error")
            return None
        self._disk.read()
        result = job.result()
        if isinstance(result, Damage):
            self._drop(key, result)
            return None
        return result

    def _drop(self, key: PageKey, why: str) -> None:
        self.counters[f"dropped_{why}"] += 1
        log.warning("page %s dropped from the SSD tier: %s", key.hex()[:16], why)
        self._remove(key)

    def _abandoned(
        self,
        key: PageKey,
        grant: Grant,
        buffer: memoryview,
        job: asyncio.Future[Found | Damage],
    ) -> None:
        self._judge(key, grant, job)
        self._let_go(grant, buffer)

    def _let_go(self, grant: Grant, buffer: memoryview) -> None:
        self._memory.give(buffer)
        self._pages.unpin(grant)
        if not self._memory.num_out:
            self._idle.set()
