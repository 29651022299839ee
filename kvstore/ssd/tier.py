"""The SSD tier: pages on a disk, behind the ``Tier`` interface of the store node.

Owns the parts and their life. What is decided is in ``catalogue``, the way in is ``page_writer``,
the way out ``page_reader``, what is listed ``journal`` and ``index``, what lies where ``header``,
``superblock`` and ``slabs``.

* Caller's memory is touched on the loop only, between awaits: not after a call has returned or was
  cancelled.
* What is on the disk is believed only when it verifies, on every load. A damaged page is forgotten
  and counted under the kind of damage.
* Nothing waits without bound: a store beyond ``STORES_MAX``, its memory or the budget is refused; a
  load beyond ``LOADS_MAX`` too.
* A disk that fails is left alone (``health``): no exception leaves ``store`` or ``load``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvstore.page import PageKey, PageSpec
from kvstore.server.tier import TierPage
from kvstore.ssd.config import BLOCK_NBYTES, SsdConfig
from kvstore.ssd.disk_state import DiskState
from kvstore.ssd.header import Specs, header_nbytes_of, key_in, parse_header, slot_nbytes_of
from kvstore.ssd.journal import Journal
from kvstore.ssd.lanes import Lane, Lanes, ThreadLanes
from kvstore.ssd.opening import Opened, open_tier
from kvstore.ssd.page_file import Disk, LocalDisk
from kvstore.ssd.page_reader import PageReader
from kvstore.ssd.page_writer import PageWriter
from kvstore.ssd.slot_io import SlotIO
from kvstore.store import PageRecord

log = logging.getLogger(__name__)

PAGE_SIZES_MAX = 1024  # whose slot sizes are remembered


class SsdTier:
    """A ``kvstore.server.tier.Tier``; made by ``open``.

    With ``on_evicted`` (or once ``displace`` was called) the tier decides what is worth its room: a
    page without room displaces colder ones (the coldest of its size; or a whole slab of another
    size), and ``on_evicted`` is told which, before ``store`` goes on. Without it, a page without
    room is refused and whoever decides makes room by ``remove``.
    """

    def __init__(
        self,
        config: SsdConfig,
        opened: Opened,
        lanes: Lanes,
        on_evicted: Callable[[Sequence[PageKey]], None] | None,
    ) -> None:
        """Use ``open``."""
        self._lanes, self._opened = lanes, opened
        self._counters: Counter[str] = Counter()
        self._disk = DiskState(config)
        self._pages = opened.pages
        self._found_headers = opened.headers
        self._journal = Journal(
            opened.database,
            opened.file,
            lanes,
            flush_s=config.flush_s,
            retry_s=config.retry_s,
            on_outcome=self._index_outcome,
        )
        slots = SlotIO(opened.file, opened.uuid, opened.slabs)
        self._writer = PageWriter(
            self._pages,
            slots,
            lanes,
            self._journal,
            self._disk,
            uuid=opened.uuid,
            nbytes_per_s=config.write_nbytes_per_s,
            on_evicted=on_evicted,
        )
        self._reader = PageReader(
            self._pages, slots, lanes, self._disk, remove=lambda key: self.remove([key])
        )
        self._slot_sizes: dict[int, int] = {}  # by page size, of pages stored or found
        self._closing: asyncio.Task[None] | None = None
        for offset in opened.bad_rows:
            self._journal.put(offset, None)
        self._counters["rows_dropped"] = len(opened.bad_rows)

    @classmethod
    async def open(
        cls,
        config: SsdConfig,
        *,
        on_evicted: Callable[[Sequence[PageKey]], None] | None = None,
        disk: Disk | None = None,
        lanes: Lanes | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> SsdTier:
        """Open or make the tier in ``config.path``; reads the index, no page.

        Raises:
            SsdRefused: with the value and the remedy.
        """
        lanes = lanes or ThreadLanes(config.num_writers, config.num_readers)
        evicts = on_evicted is not None
        opening = partial(open_tier, config, disk or LocalDisk(), random_bytes, evicts=evicts)
        job = lanes.submit(Lane.INDEX, opening)
        try:
            opened = await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(partial(_close_unused, lanes))
            raise
        except BaseException:
            lanes.close()
            raise
        tier = cls(config, opened, lanes, on_evicted)
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
        return self._pages.has_room(slot_nbytes or _slot_nbytes_for(page_nbytes))

    def contents(self) -> Iterator[TierPage]:
        specs: Specs = {}
        headers, self._found_headers = self._found_headers, []
        for raw in headers:
            header = parse_header(raw, specs)
            if header is None:
                self.remove([key_in(raw)])
            elif header.page.record.key in self._pages:
                yield header.page
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
        """See ``Tier``; replaces the ``on_evicted`` of ``open``."""
        self._pages.evicts = True
        self._writer.on_evicted = told

    def touch(self, key: PageKey, heat: float) -> None:
        """Say how warm a page is now, for ``on_evicted`` tiers; until the next start."""
        self._pages.touch(key, heat)

    def remove(self, keys: Sequence[PageKey]) -> None:
        for offset in self._pages.remove(keys):
            self._journal.put(offset, None)

    async def clear(self, namespace: bytes | None = None) -> int:
        """Forget all pages of a namespace, or all, durably; returns how many."""
        keys = self._pages.keys_of(namespace)
        self.remove(keys)
        await self.flush()
        return len(keys)

    # ---- the end

    async def flush(self) -> bool:
        """Have everything so far in the index, durably; False when the disk failed."""
        return self._closing is None and await self._journal.flush(durable=True)

    async def close(self) -> None:
        """Finish what is under way, make the index durable, release the files. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._writer.drain()
        await self._reader.drain()
        await self._journal.flush(durable=True)
        self._journal.stop()
        await self._lanes.submit(Lane.INDEX, self._opened.close)
        self._lanes.close()

    def _note_size(self, spec: PageSpec) -> None:
        if len(self._slot_sizes) < PAGE_SIZES_MAX:
            self._slot_sizes[spec.page_nbytes] = slot_nbytes_of(spec)

    def _index_outcome(self, problem: str | None) -> None:
        self._counters["index_errors"] += problem is not None
        self._disk.index_outcome(problem)


def _close_unused(lanes: Lanes, job: asyncio.Future[Opened]) -> None:
    """The caller gave up while the files were being opened."""
    if job.exception() is None:
        job.result().close()
    lanes.close()


def _slot_nbytes_for(page_nbytes: int) -> int:
    """Slot size of pages of the default page size."""
    spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=1)
    return -(-(header_nbytes_of(spec) + page_nbytes) // BLOCK_NBYTES) * BLOCK_NBYTES
