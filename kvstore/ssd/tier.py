"""The SSD tier: pages on a disk, behind the ``Tier`` interface of the store node.

Owns the parts and their life. Which pages are there is in ``catalogue``, the way in is
``page_writer``, the way out ``page_reader``, what is listed ``journal`` and ``index``, what lies
where ``header``, ``superblock`` and ``slabs``.

* Caller's memory is touched on the loop only, between awaits: not after a call has returned or was
  cancelled.
* What is on the disk is believed only when it verifies, on every load. A damaged page is forgotten
  and counted under the kind of damage.
* Nothing waits without bound: a store beyond ``STORES_MAX`` or the budget is refused, one without
  memory after ``hung_s``; a load beyond ``LOADS_MAX`` too; a disk that does not answer for
  ``hung_s`` counts as failed.
* A disk that fails is left alone (``health``): no exception leaves ``store`` or ``load``.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.page import PageKey, PageSpec
from kvstore.server.tier import TierPage
from kvstore.ssd.config import BLOCK_NBYTES, SsdConfig
from kvstore.ssd.header import Specs, header_nbytes_of, key_in, parse_page, slot_nbytes_of
from kvstore.ssd.health import DiskState
from kvstore.ssd.journal import Journal
from kvstore.ssd.opening import Opened, open_tier
from kvstore.ssd.page_file import Disk, LocalDisk
from kvstore.ssd.page_reader import PageReader
from kvstore.ssd.page_writer import PageWriter
from kvstore.ssd.slot_io import SlotIO
from kvstore.store import PageRecord
from transfer.blocking_calls import BlockingCalls

log = logging.getLogger(__name__)

PAGE_SIZES_MAX = 1024  # whose slot sizes are remembered


class SsdTier:
    """A ``kvstore.server.tier.Tier``; made by ``open``.

    From ``displace`` on the tier decides what is worth its room: a page without room displaces
    colder ones: the coldest of its size, or a whole slab of another size. Until then it is refused.
    """

    def __init__(self, config: SsdConfig, opened: Opened, index_calls: BlockingCalls) -> None:
        """Use ``open``."""
        self._config, self._opened = config, opened
        self._index_calls = index_calls
        self._write_calls = BlockingCalls("ssd-write", config.num_writers)
        self._read_calls = BlockingCalls("ssd-read", config.num_readers)
        self._counters: Counter[str] = Counter()
        self._disk = DiskState(config)
        self._pages = opened.pages
        self._found_headers = opened.headers
        self._slot_sizes: dict[int, int] = {}  # by page size, of pages stored or found
        self._closing: asyncio.Task[None] | None = None
        self._make_parts()
        for offset in opened.bad_rows:
            self._journal.put(offset, None)
        self._counters["rows_dropped"] = len(opened.bad_rows)

    def _make_parts(self) -> None:
        config, opened = self._config, self._opened
        self._journal = Journal(
            opened.database,
            opened.file,
            self._index_calls,
            flush_s=config.flush_s,
            retry_s=config.retry_s,
            hung_s=config.hung_s,
            on_outcome=self._index_outcome,
        )
        slots = SlotIO(opened.file, opened.uuid, opened.slabs)
        self._writer = PageWriter(
            self._pages,
            slots,
            self._write_calls,
            self._journal,
            self._disk,
            uuid=opened.uuid,
            nbytes_per_s=config.write_nbytes_per_s,
        )
        self._reader = PageReader(
            self._pages,
            slots,
            self._read_calls,
            self._disk,
            remove=lambda key: self.remove([key]),
        )

    @classmethod
    async def open(cls, config: SsdConfig, *, disk: Disk | None = None) -> SsdTier:
        """Open or make the tier in ``config.path``; reads the index, no page.

        Raises:
            SsdRefused: with the value and the remedy.
        """
        calls = BlockingCalls("ssd-index", 1)  # one: SQLite is used by one thread at a time
        job = calls.start(open_tier, config, disk or LocalDisk())
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            job.add_done_callback(_close_unused)
            calls.close()
            raise
        if job.exception() is not None:
            calls.close()
        tier = cls(config, job.result(), calls)
        log.info("SSD tier %s: %d pages found", config.path, tier.num_pages)
        return tier

    # ---- looking

    @property
    def degraded(self) -> str | None:
        return self._disk.degraded

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def used_nbytes(self) -> int:
        return self._pages.used_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; headers and what does not fill a slab come out of them."""
        return self._opened.slabs.num_slabs * self._opened.slabs.slab_nbytes

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def has_room(self, page_nbytes: int) -> bool:
        slot_nbytes = self._slot_sizes.get(page_nbytes)
        return self._pages.slabs.has_room(slot_nbytes or _slot_nbytes_for(page_nbytes))

    def contents(self) -> Iterator[TierPage]:
        """Every page found at start, the hottest first; made one by one, as they are asked for."""
        specs: Specs = {}
        headers, self._found_headers = self._found_headers, []
        for raw in headers:
            page = parse_page(raw, specs)
            if page is None:
                self.remove([key_in(raw)])
            elif page.record.key in self._pages:
                yield page
        for spec in specs.values():
            self._note_size(spec)

    def numbers(self) -> dict[str, float]:
        numbers: dict[str, float] = {
            "ssd_pages": self.num_pages,
            "ssd_used_nbytes": self.used_nbytes,
            "ssd_nbytes": self.nbytes,
            "ssd_degraded": float(self.degraded is not None),
            "ssd_direct": float(self._opened.file.is_direct),
            "ssd_stores_under_way": len(self._writer),
            "ssd_loads_under_way": len(self._reader),
            "ssd_index_backlog": len(self._journal),
        }
        counted = Counter(self._counters)
        for part in (self._pages, self._writer, self._reader):
            counted.update(part.counters)
        return numbers | {f"ssd_{name}": count for name, count in sorted(counted.items())}

    def check(self) -> None:
        """Assert the invariants; O(pages)."""
        self._pages.check()

    # ---- moving pages

    async def store(self, page: TierPage, data: memoryview) -> bool:
        if self._closing is not None:
            return False
        self._note_size(page.spec)
        return await self._writer.store(page, data)

    async def load(self, key: PageKey, into: memoryview) -> PageRecord | None:
        if self._closing is not None:
            return None
        return await self._reader.load(key, into)

    def displace(self, told: Callable[[Sequence[PageKey]], None]) -> None:
        self._writer.told = told

    def touch(self, key: PageKey, heat: float) -> None:
        """See ``Tier``; until the next start, when heats count as they were stored."""
        self._pages.touch(key, heat)

    def remove(self, keys: Sequence[PageKey]) -> None:
        for offset in self._pages.remove(keys):
            self._journal.put(offset, None)

    # ---- the end

    async def flush(self) -> bool:
        """Have everything so far in the index, durably; False when the disk failed."""
        return self._closing is None and await self._journal.flush(durable=True)

    async def close(self) -> None:
        """Finish what is under way, make the index durable, release the files. Idempotent.

        A disk that does not answer for ``hung_s`` is left behind: its files stay open, and the
        directory in use, until the process ends; what was not in the index is lost.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(self._config.hung_s):
                await self._writer.drain()
                await self._reader.drain()
                await self._journal.flush(durable=True)
                self._journal.stop()
                await self._release()
        except TimeoutError:
            self._journal.stop()
            log.error(
                "SSD tier %s: the disk did not answer for %g s: its files stay open until this"
                " process ends, and the last pages may be missing at the next start",
                *(self._config.path, self._config.hung_s),
            )
        for calls in (self._write_calls, self._read_calls, self._index_calls):
            calls.close()

    async def _release(self) -> None:
        job = self._index_calls.start(self._opened.close)
        await asyncio.wait([job])
        error = job.exception()
        if isinstance(error, OSError | sqlite3.Error):
            log.error("SSD tier %s: closing its files: %s", self._config.path, error)
        elif error is not None:
            raise error

    def _note_size(self, spec: PageSpec) -> None:
        if len(self._slot_sizes) < PAGE_SIZES_MAX:
            self._slot_sizes[spec.page_nbytes] = slot_nbytes_of(spec)

    def _index_outcome(self, problem: str | None) -> None:
        self._counters["index_errors"] += problem is not None
        self._disk.index_outcome(problem)


def _close_unused(job: asyncio.Future[Opened]) -> None:
    """The caller gave up while the files were being opened."""
    if job.exception() is None:
        job.result().close()


def _slot_nbytes_for(page_nbytes: int) -> int:
    """Slot size of pages of the default page size."""
    spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=1)
    return -(-(header_nbytes_of(spec) + page_nbytes) // BLOCK_NBYTES) * BLOCK_NBYTES
