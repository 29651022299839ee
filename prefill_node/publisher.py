"""Pushing finished pages into the store while the next chunk computes.

Owns ``push_concurrency`` worker tasks over a ``PublishQueue``. Knows no scheduling: it is handed
pages that are final (nobody writes them any more) and holds its own references on them. A push
that fails is a result (``Publication.ok``), never an exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from engine.page_allocator import PageAllocator
from engine.page_pool import PagePool
from kvstore.page import PageId
from kvstore.store import PageStore, PutOutcome, PutPage, PutResult
from prefill_node.config import STORE_GRACE_S, PrefillConfig
from prefill_node.publish_queue import Batch, Publication, PublishQueue, QueuedPage
from prefill_node.request_state import PrefillJob
from prefill_node.stats import PrefillStats
from transfer.errors import TransferError
from transfer.interface import Region

logger = logging.getLogger(__name__)


class Publisher:
    """Pushes pages of one pool; bounded in concurrency, in time, and by the pool in memory.

    Args:
        on_release: called after pages were given back, so that the scheduler may admit.
    """

    def __init__(
        self,
        config: PrefillConfig,
        *,
        store: PageStore,
        pool: PagePool,
        region: Region,
        allocator: PageAllocator,
        stats: PrefillStats,
        on_release: Callable[[], None],
    ) -> None:
        self._store = store
        self._pool = pool
        self._region = region
        self._counters = stats.counters
        self._on_release = on_release
        self._num_workers = config.push_concurrency
        self._queue = PublishQueue(
            allocator, batch_pages=config.push_batch_pages, timeout_s=config.push_timeout_s
        )
        self._wake = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._workers = [
            loop.create_task(self._work(), name=f"prefill-push-{i}")
            for i in range(self._num_workers)
        ]

    @property
    def alive(self) -> bool:
        return bool(self._workers) and not any(worker.done() for worker in self._workers)

    def add(self, publication: Publication, job: PrefillJob, first_page: int, end: int) -> None:
        """Queue pages ``first_page..end-1`` of the job; all of them are final."""
        pages = [
            QueuedPage(identity, page_id)
            for identity, page_id in zip(
                job.identities(first_page, end), job.page_ids[first_page:end], strict=True
            )
        ]
        self._queue.add(publication, pages)
        self._wake.set()

    def close_publication(self, publication: Publication) -> None:
        """No more pages will come. The publication ends when the last put has ended."""
        self._queue.close(publication, asyncio.get_running_loop().time())

    def cancel(self, publication: Publication) -> None:
        """Push no more of it; a put in flight ends first, and holds its pages until then."""
        self._queue.cancel(publication)
        self._on_release()

    def blank_tail(self, page_id: PageId, num_tokens: int) -> None:
        """Zero the slots behind the prompt's last token: what an earlier owner of the page left
        there is nobody's business. The page must be private and written by nobody."""
        spec = self._pool.spec
        offset = self._pool.offset_of(page_id)
        runs = self._pool.storage[offset : offset + spec.page_nbytes].view(spec.num_runs, -1)
        runs[:, num_tokens * spec.slot_nbytes :] = 0

    def held(self) -> Iterator[PageId]:
        """Every page on which a reference is held here."""
        return self._queue.held()

    async def close(self) -> None:
        """Stop the workers and wait until the store touches no page any more; idempotent."""
        self.abort()
        await asyncio.gather(*self._workers, return_exceptions=True)

    def abort(self) -> None:
        """Cancel the workers; idempotent."""
        for worker in self._workers:
            worker.cancel()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = self._queue.take(loop.time())
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            result: PutResult | None = None
            try:
                result = await self._put(batch)
            finally:
                self._queue.complete(batch, result)
                self._on_release()

    async def _put(self, batch: Batch) -> PutResult | None:
        puts = [PutPage(page.identity, self._pool.offset_of(page.page_id)) for page in batch.pages]
        try:
            async with asyncio.timeout_at(batch.deadline_s + STORE_GRACE_S):
                result = await self._store.put(
                    puts,
                    source=self._region,
                    deadline_s=batch.deadline_s,
                    policy=batch.publication.policy,
                )
        except (TransferError, TimeoutError) as error:
            logger.warning("push of %s failed: %r", batch.publication.request_id, error)
            self._counters.pages_push_failed += len(puts)
            return None
        except Exception:  # a back end's bug must cost this push, not the worker
            logger.exception("push of %s broke", batch.publication.request_id)
            self._counters.pages_push_failed += len(puts)
            return None
        self._count(result.outcomes, result)
        return result

    def _count(self, outcomes: Sequence[PutOutcome], result: PutResult) -> None:
        self._counters.pages_pushed += result.moved.num_pages
        self._counters.bytes_pushed += result.moved.nbytes
        self._counters.pages_push_refused += sum(o is PutOutcome.REFUSED for o in outcomes)
        self._counters.pages_push_failed += sum(o is PutOutcome.FAILED for o in outcomes)
