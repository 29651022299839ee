"""Pages on their way from the disk.

Owns a page from its slot to the caller's memory: the pin, the read, the verdict, the copy. Part of
the tier (``kvstore/ssd/tier.py``).

::

    slot ──thread: read, verify──▶ bounce ──copy──▶ caller

A caller who gives up, and one for whom the disk takes too long, leaves the read to itself: the slot
stays pinned and the memory out until the thread is done with both.
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
from kvstore.ssd.health import DiskState
from kvstore.ssd.slot_io import Damage, Found, SlotIO
from kvstore.store import PageRecord
from transfer.blocking_calls import BlockingCalls

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
        calls: BlockingCalls,
        disk: DiskState,
        *,
        remove: Callable[[PageKey], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._pages, self._slots, self._calls, self._disk = pages, slots, calls, disk
        self._remove = remove
        self._memory = BouncePool(BOUNCE_NBYTES // 2)
        self._num_pinned = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Loads under way, those included that nobody waits for any more."""
        return self._num_pinned

    async def drain(self) -> None:
        """Return when no load and no read is under way; none may begin meanwhile."""
        await self._idle.wait()

    async def load(self, key: PageKey, into: memoryview) -> PageRecord | None:
        if len(self) >= LOADS_MAX:
            self.counters["loads_refused"] += 1
            return None
        if not self._disk.may_read():
            return None
        grant = self._pages.pin(key)
        if grant is None:
            self.counters["misses"] += 1
            return None
        self._num_pinned += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(self._disk.hung_s):
                return await self._load(grant, into)
        except TimeoutError:
            self._disk.read_hung()
            return None

    async def _load(self, grant: Grant, into: memoryview) -> PageRecord | None:
        """Read, copy, let go; ``into`` is not touched any more when this ends, however it ends."""
        assert len(into) == grant.page_nbytes, (len(into), grant.page_nbytes)
        try:
            buffer = await self._memory.take(grant.slot_nbytes)
        except BaseException:
            self._unpin(grant)
            raise
        job = self._calls.start(self._slots.read, grant, buffer)
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            job.add_done_callback(partial(self._abandoned, grant, buffer))
            raise
        try:
            found = self._judge(grant, job)
            if found is None:
                return None
            await copy(into, buffer[found.page_at : found.page_at + grant.page_nbytes])
        finally:
            self._let_go(grant, buffer)
        self.counters["promoted"] += 1
        self.counters["loaded_nbytes"] += grant.page_nbytes
        return found.header.page.record

    def _judge(self, grant: Grant, job: asyncio.Future[Found | Damage]) -> Found | None:
        """What was read, if it is the page; forgets it if not."""
        error = job.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        if isinstance(error, OSError):
            self.counters["read_errors"] += 1
            self._disk.read_failed(error)
        else:
            self._disk.read()
        if not self._pages.is_held(grant):
            return None  # removed while it was read
        if error is not None:
            self._drop(grant.key, "error")
            return None
        result = job.result()
        if isinstance(result, Damage):
            self._drop(grant.key, result)
            return None
        return result

    def _drop(self, key: PageKey, why: str) -> None:
        self.counters[f"dropped_{why}"] += 1
        log.warning("page %s dropped from the SSD tier: %s", key.hex()[:16], why)
        self._remove(key)

    def _abandoned(
        self, grant: Grant, buffer: memoryview, job: asyncio.Future[Found | Damage]
    ) -> None:
        try:
            self._judge(grant, job)
        finally:
            self._let_go(grant, buffer)

    def _let_go(self, grant: Grant, buffer: memoryview) -> None:
        self._memory.give(buffer)
        self._unpin(grant)

    def _unpin(self, grant: Grant) -> None:
        self._pages.unpin(grant)
        self._num_pinned -= 1
        if not self._num_pinned:
            self._idle.set()
