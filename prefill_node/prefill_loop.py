"""The work of a prefill node: performs what scheduler, restorer and publisher decide.

Owns the page pool's books, the step loop (one task), the engine thread, the restore tasks and the
live legs. Knows no channels, no membership, no HTTP.

    open ──submit──▶ scheduler ──admit──▶ restore task (or none) ──restored──┐
                         ▲                                                   ▼
    leg ◀─FirstToken── apply ◀── runner.step on the engine thread ◀──────── plan
     ▲                   └──final pages──▶ publisher ──put──▶ store
     └────PrefillDone────────────────────────┘

One rule keeps pages safe: every holder (page table, radix cache, queued or running put) has its
own reference, and a job keeps its references while a step or a restore writes into its pages.
A step in which the engine raises fails the requests of that step and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engine.page_allocator import PageAllocator
from engine.request import ErrorCode, FirstToken, TokenOut
from engine.step import Runner
from kvstore.events import KvEventLog, KvEventPublisher
from kvstore.keys import Namespace
from kvstore.page import PageId
from kvstore.store import PageStore
from prefill_node.config import ENGINE_FAILURES_MAX, PrefillConfig
from prefill_node.leg import Leg
from prefill_node.publisher import Publisher
from prefill_node.radix_cache import RadixCache
from prefill_node.request_state import PrefillJob, PrefillState
from prefill_node.restore import Restored, Restorer
from prefill_node.restore_model import RestoreModel
from prefill_node.scheduler import ChunkDone, PrefillScheduler, StepPlan
from prefill_node.stats import PrefillStats
from transfer.errors import RemoteFailed
from transfer.interface import Region

logger = logging.getLogger(__name__)


class PrefillLoop:
    """Everything between a submitted job and its last event."""

    def __init__(
        self, config: PrefillConfig, *, runner: Runner, store: PageStore, region: Region
    ) -> None:
        self.stats = PrefillStats()
        self.log = KvEventLog()
        self.events = KvEventPublisher(self.log)
        self.allocator = PageAllocator(runner.pool.num_pages)
        self.cache = RadixCache(self.allocator, runner.info.spec.page_size, self.log)
        self.scheduler = PrefillScheduler(config, runner.info, self.allocator, self.cache)
        self.model = RestoreModel(
            latency_s=config.restore_latency_s,
            restore_bytes_per_s=config.restore_bytes_per_s,
            compute_tokens_per_s=config.compute_tokens_per_s,
        )
        self.no_legs = asyncio.Event()
        self.no_legs.set()
        self._config = config
        self._runner = runner
        self._wake = asyncio.Event()
        self._restorer = Restorer(
            config,
            store=store,
            pool=runner.pool,
            region=region,
            model=self.model,
            stats=self.stats,
        )
        self._publisher = Publisher(
            config,
            store=store,
            pool=runner.pool,
            region=region,
            allocator=self.allocator,
            stats=self.stats,
            on_release=self._wake.set,
        )
        self._legs: dict[int, Leg] = {}
        self._restores: dict[int, asyncio.Task[Restored]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._num_failures_in_row = 0
        self._closing = False

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefill-engine")
        self._publisher.start()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="prefill-loop")
        self._task.add_done_callback(self._run_ended)

    @property
    def alive(self) -> bool:
        """The loop and the publishers run: new work makes sense."""
        running = self._task is not None and not self._task.done() and not self._closing
        return running and self._publisher.alive

    @property
    def healthy(self) -> bool:
        """Alive, and the engine's last steps did not all fail."""
        return self.alive and self._num_failures_in_row < ENGINE_FAILURES_MAX

    async def close(self) -> None:
        """Fail what is live and stop; returns when no page is touched any more. Idempotent."""
        self._closing = True
        self.fail_all(RemoteFailed(ErrorCode.CLOSED, "the node has closed: retry elsewhere"))
        tasks = [*self._restores.values(), *([self._task] if self._task else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._publisher.close()
        if self._executor is not None:
            self._executor.shutdown()

    def abort(self) -> None:
        """Stop at once, as a crash would; idempotent. A step in the engine thread runs out."""
        self._closing = True
        for task in (*self._restores.values(), *([self._task] if self._task else [])):
            task.cancel()
        self._publisher.abort()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Assert that every reference on every page is accounted for."""
        self.allocator.check()
        self.cache.check()
        self.scheduler.check()
        expected = Counter(self.cache.held())
        expected.update(self._publisher.held())
        for job in self.scheduler.jobs:
            expected.update(job.page_ids)
        for page_id in map(PageId, range(1, self.allocator.num_pages)):
            refs = self.allocator.refs(page_id)
            assert refs == expected[page_id], (page_id, refs, expected[page_id])

    # ── legs ────────────────────────────────────────────────────────────────────────────────────

    def open_leg(self, job: PrefillJob) -> Leg:
        """Take a job in. Raises ``RemoteFailed``: overloaded, too_long."""
        self.scheduler.submit(job, asyncio.get_running_loop().time())
        self.stats.counters.num_requests += 1
        leg = self._legs[job.serial] = Leg(job, self._published)
        self.no_legs.clear()
        self._wake.set()
        return leg

    def close_leg(self, leg: Leg) -> None:
        """The one way out of a leg, whatever happened; idempotent."""
        if self._legs.pop(leg.job.serial, None) is None:
            return
        if not leg.exhausted and leg.error is None:
            self.stats.counters.num_aborted += 1
        self._give_up(leg)
        if not self._legs:
            self.no_legs.set()

    def clear_cache(self, namespace: Namespace | None = None) -> int:
        """Empty the radix cache, or one namespace of it; return the pages dropped."""
        if namespace is None:
            num_dropped = self.cache.clear()
        else:
            num_dropped = self.cache.clear_namespace(namespace)
        self.events.flush()
        self._wake.set()
        return num_dropped

    def fail_all(self, error: RemoteFailed) -> None:
        """End every live leg with ``error``."""
        for leg in list(self._legs.values()):
            self._fail(leg, error)
        self._wake.set()

    def _fail(self, leg: Leg, error: RemoteFailed) -> None:
        leg.fail(error)
        self._give_up(leg)

    def _give_up(self, leg: Leg) -> None:
        """Abort the job, unless it is done; what writes into its pages is told to stop."""
        self.scheduler.abort(leg.job)
        restore = self._restores.get(leg.job.serial)
        if restore is not None:
            restore.cancel()
        self._publisher.cancel(leg.publication)
        self._wake.set()

    def _published(self, leg: Leg) -> None:
        """A publication has ended, well or not."""
        if leg.job.state is not PrefillState.PUBLISHING:
            return
        self.scheduler.finish(leg.job)
        if leg.publication.ok:
            self.stats.counters.num_published += 1
        else:
            self.stats.counters.num_unpublished += 1
        leg.finish(asyncio.get_running_loop().time())
        self._wake.set()

    # ── the step loop ───────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        """Admit, step, apply, until closed; sleeps on an event while there is nothing to do."""
        loop = asyncio.get_running_loop()
        while not self._closing:
            self._wake.clear()
            for job in self.scheduler.admit(loop.time()):
                self._begin(job)
            self.events.flush()  # admission may have evicted
            plan = self.scheduler.plan()
            if plan is None:
                await self._wake.wait()
            else:
                await self._step(plan)
                self.events.flush()
                await asyncio.sleep(0)  # a simulated engine is instant: let others in

    def _begin(self, job: PrefillJob) -> None:
        """Push what the radix cache had (the store may lack it); start the restore of the rest."""
        leg = self._legs[job.serial]
        self._publisher.add(leg.publication, job, 0, job.num_valid_full_pages)
        if job.state is not PrefillState.RESTORING:
            return
        if not self._config.restore:
            self.scheduler.restored(job, 0)
            return
        task = asyncio.get_running_loop().create_task(
            self._restorer.restore(job), name=f"prefill-restore-{job.serial}"
        )
        self._restores[job.serial] = task
        task.add_done_callback(partial(self._restore_ended, job))

    def _restore_ended(self, job: PrefillJob, task: asyncio.Task[Restored]) -> None:
        del self._restores[job.serial]
        restored = Restored()
        if not task.cancelled():
            error = task.exception()
            if error is None:
                restored = task.result()
            else:
                logger.error("restore of %s broke", job.request.request_id, exc_info=error)
        self.scheduler.restored(job, *restored)
        self._wake.set()

    async def _step(self, plan: StepPlan) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            outputs = await loop.run_in_executor(self._executor, self._runner.step, plan.steps)
        except Exception as error:  # noqa: BLE001 - the engine may raise whatever its libraries do
            self._step_failed(plan, error)
            return
        now_s = loop.time()
        self._num_failures_in_row = 0
        self.stats.counters.num_steps += 1
        self.stats.counters.step_s += now_s - started_s
        self.model.observe_compute(plan.num_tokens, now_s - started_s)
        self._apply(plan, outputs, now_s)

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        logger.error("a step of %d requests failed", len(plan.jobs), exc_info=error)
        self._num_failures_in_row += 1
        self.stats.counters.num_step_failures += 1
        self.scheduler.fail(plan)
        for job in plan.jobs:
            leg = self._legs.get(job.serial)
            if leg is not None:
                self.stats.counters.num_failed += 1
                self._fail(
                    leg, RemoteFailed(ErrorCode.ENGINE_FAILED, f"the engine raised {error!r}")
                )

    def _apply(self, plan: StepPlan, outputs: Sequence[TokenOut | None], now_s: float) -> None:
        for done in self.scheduler.apply(plan, outputs):
            leg = self._legs.get(done.job.serial)
            if leg is None or done.job.state.is_final:
                continue
            self._publisher.add(leg.publication, done.job, done.first_page, done.end_page)
            if done.output is not None:
                self._first_token(leg, done, done.output, now_s)

    def _first_token(self, leg: Leg, done: ChunkDone, output: TokenOut, now_s: float) -> None:
        """Tell the client at once, then hand the tail page over and let the page table go."""
        job = done.job
        first = FirstToken(
            output=output,
            computed_tokens=job.num_computed,
            cached_local_tokens=job.num_local,
            cached_store_tokens=job.num_store,
            pages_pulled=job.pages_pulled,
            bytes_pulled=job.bytes_pulled,
            queue_s=job.admitted_s - job.arrival_s,
            prefill_s=now_s - job.admitted_s,
        )
        leg.first_token(first, now_s)
        self._count_first_token(first, job)
        if job.num_full_pages < job.num_pages and job.num_computed:
            self._publisher.blank_tail(job.page_ids[-1], job.num_tokens % job.page_size)
            self._publisher.add(leg.publication, job, job.num_full_pages, job.num_pages)
        self.scheduler.release(job)
        self._publisher.close_publication(leg.publication)

    def _count_first_token(self, first: FirstToken, job: PrefillJob) -> None:
        counters = self.stats.counters
        counters.num_first_tokens += 1
        counters.prompt_tokens += job.num_tokens
        counters.computed_tokens += first.computed_tokens
        counters.cached_local_tokens += first.cached_local_tokens
        counters.cached_store_tokens += first.cached_store_tokens
        counters.pages_pulled += first.pages_pulled
        counters.bytes_pulled += first.bytes_pulled

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        """The loop dies only of our own bugs: say so, fail everybody, be unhealthy."""
        if task.cancelled() or task.exception() is None:
            return
        logger.critical("the prefill loop died", exc_info=task.exception())
        self.fail_all(
            RemoteFailed(ErrorCode.ENGINE_FAILED, "the prefill loop died: retry elsewhere")
        )
