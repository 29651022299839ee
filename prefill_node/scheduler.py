"""The prefill scheduler: who gets pages, and which tokens run in the next step.

Owns the requests of a node from arrival to their last page, their page tables and the keys in
flight. Sans-I/O: time is passed in, the shell performs. Knows no store, no engine, no futures.
The state machine is drawn in ``request_state.py``.

* **Order.** Lower ``priority`` first, each ``ageing_s`` of waiting counts as one level (nothing
  starves); within a level the longest cached prefix first (depth-first order of the prefix tree),
  then arrival.
* **Never twice.** ``in_flight`` holds the key of every full page that an active request is about
  to compute or restore. A waiting request whose first missing page is in flight is passed over;
  it finds the page in the radix cache when the other's chunk has ended.
* **Pages.** A request reserves all of its pages when it is admitted, so an active request never
  waits for memory and there is no deadlock. When the first in order does not fit, nobody behind it
  overtakes it.
* **Budget.** ``plan`` fills one step with chunks in admission order, at most ``token_budget``.

Pages are given back in one place, ``_settle``, and only when nobody writes into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.page_allocator import PageAllocator
from engine.request import ErrorCode, TokenOut
from engine.step import ModelInfo, SeqStep
from kvstore.page import PageKey
from prefill_node.config import PrefillConfig
from prefill_node.radix_cache import RadixCache
from prefill_node.request_state import PrefillJob, PrefillState
from transfer.errors import RemoteFailed


class StepPlan(NamedTuple):
    """One step: ``steps[i]`` is a chunk of ``jobs[i]``."""

    jobs: list[PrefillJob]
    steps: list[SeqStep]

    @property
    def num_tokens(self) -> int:
        return sum(len(step.tokens) for step in self.steps)


class ChunkDone(NamedTuple):
    """What a step did for one job: full pages ``first_page..end_page-1`` became final."""

    job: PrefillJob
    first_page: int
    end_page: int
    output: TokenOut | None


class PrefillScheduler:
    """Sans-I/O scheduler over one page pool and one radix cache."""

    def __init__(
        self,
        config: PrefillConfig,
        info: ModelInfo,
        allocator: PageAllocator,
        cache: RadixCache,
    ) -> None:
        self._config = config
        self._info = info
        self._allocator = allocator
        self._cache = cache
        self._jobs: dict[int, PrefillJob] = {}  # every job that is not settled, by serial
        self._waiting: dict[int, PrefillJob] = {}
        self._running: dict[int, PrefillJob] = {}  # in admission order
        self._in_flight: dict[PageKey, int] = {}  # key -> serial of the job that makes it

    # ── what the gauges read ────────────────────────────────────────────────────────────────────

    @property
    def num_live(self) -> int:
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Jobs that hold pages to fill: restoring or running."""
        return sum(
            job.state in (PrefillState.RESTORING, PrefillState.RUNNING)
            for job in self._jobs.values()
        )

    @property
    def num_tokens_waiting(self) -> int:
        """Tokens without KV, of all jobs before their first token."""
        return sum(job.num_missing for job in self._jobs.values() if not job.state.is_final)

    @property
    def jobs(self) -> list[PrefillJob]:
        return list(self._jobs.values())

    # ── arrival and departure ───────────────────────────────────────────────────────────────────

    def refuse_if_full(self) -> None:
        """Raise ``RemoteFailed("overloaded")`` when one more request would be too many."""
        limit = self._config.max_num_requests
        if len(self._jobs) >= limit:
            raise RemoteFailed(
                ErrorCode.OVERLOADED,
                f"{len(self._jobs)} requests are live and max_num_requests={limit}: "
                "try another prefill node, or later",
            )

    def refuse_if_unfit(self, num_tokens: int) -> None:
        """Raise ``RemoteFailed("too_long")`` when the node can never hold so many tokens."""
        if num_tokens > self._info.max_model_len:
            raise RemoteFailed(
                ErrorCode.TOO_LONG,
                f"{num_tokens} tokens exceed max_model_len={self._info.max_model_len} "
                f"of {self._info.name}: shorten the prompt",
            )
        need = self._info.spec.num_pages_for(num_tokens)
        usable = self._allocator.num_pages - 1
        if need > usable:
            raise RemoteFailed(
                ErrorCode.TOO_LONG,
                f"{num_tokens} tokens need {need} pages and the pool has {usable}: "
                "shorten the prompt or give the node more pages",
            )

    def submit(self, job: PrefillJob, now_s: float) -> None:
        """Take a new job in. Raises ``RemoteFailed``: overloaded, too_long."""
        self.refuse_if_full()
        self.refuse_if_unfit(job.num_tokens)
        assert job.serial not in self._jobs, job.serial
        assert job.num_tokens > 0
        job.arrival_s = now_s
        self._jobs[job.serial] = job
        self._waiting[job.serial] = job

    def abort(self, job: PrefillJob) -> None:
        """Give a job up, in whatever state; idempotent, a finished job stays finished.

        Pages that a step or a restore still writes are released when that has ended.
        """
        if not job.state.is_final:
            self._leave(job, PrefillState.ABORTED)

    def finish(self, job: PrefillJob) -> None:
        """Its pages are published, or never will be: PUBLISHING becomes DONE; else no effect."""
        if job.state is PrefillState.PUBLISHING:
            self._leave(job, PrefillState.DONE)

    # ── admission and restore ───────────────────────────────────────────────────────────────────

    def admit(self, now_s: float) -> list[PrefillJob]:
        """Give pages to waiting jobs, in order; return them, each RESTORING or RUNNING.

        Every job that is RESTORING owes a call of ``restored``, come what may.
        """
        admitted: list[PrefillJob] = []
        num_free_seats = self._config.max_num_active - self.num_active
        for job in self._in_order(now_s) if num_free_seats > 0 else ():
            if len(admitted) == num_free_seats:
                break
            if self._awaits_another(job):
                continue
            if not self._reserve(job):
                break
            self._admit(job, now_s)
            admitted.append(job)
        return admitted

    def restored(
        self, job: PrefillJob, num_pages: int, pages_pulled: int = 0, bytes_pulled: int = 0
    ) -> None:
        """A restore has ended: the first ``num_pages`` missing pages are there and verified."""
        assert job.num_writers == 1, job.num_writers
        job.num_writers -= 1
        if job.state is PrefillState.RESTORING:
            job.state = PrefillState.RUNNING
            self._running[job.serial] = job
        num_ready = job.num_valid_full_pages + num_pages
        num_valid = min(num_ready * job.page_size, job.num_tokens)
        job.num_store = num_valid - job.num_valid
        job.pages_pulled += pages_pulled
        job.bytes_pulled += bytes_pulled
        self._advance(job, num_valid)
        self._settle(job)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when nothing can run. Owes ``apply`` or ``fail``."""
        plan = StepPlan([], [])
        budget = self._config.token_budget
        for job in self._running.values():
            if budget == 0:
                break
            step = self._chunk(job, min(self._config.chunk_size, budget))
            plan.jobs.append(job)
            plan.steps.append(step)
            job.num_writers += 1
            budget -= len(step.tokens)
        return plan if plan.jobs else None

    def apply(self, plan: StepPlan, outputs: Sequence[TokenOut | None]) -> list[ChunkDone]:
        """A step has ended well: insert its full pages in the radix cache, and move jobs on.

        A job that was aborted meanwhile leaves its full pages to the cache and lets go of them.
        A job whose output was sampled is PUBLISHING and still holds its pages: the caller hands
        them to the publisher, then calls ``release``.
        """
        done: list[ChunkDone] = []
        for job, step, output in zip(plan.jobs, plan.steps, outputs, strict=True):
            assert (output is not None) == (step.sample is not None)
            job.num_writers -= 1
            first_page = job.num_valid_full_pages
            self._advance(job, max(job.num_valid, step.start + len(step.tokens)))
            if job.state is PrefillState.RUNNING and output is not None:
                job.state = PrefillState.PUBLISHING
                del self._running[job.serial]
            done.append(ChunkDone(job, first_page, job.num_valid_full_pages, output))
            self._settle(job)
        return done

    def fail(self, plan: StepPlan) -> None:
        """A step has raised: what it wrote is worth nothing; its jobs are aborted."""
        for job in plan.jobs:
            job.num_writers -= 1
            self.abort(job)
            self._settle(job)

    def release(self, job: PrefillJob) -> None:
        """Let go of a PUBLISHING job's pages: the publisher holds what it still needs."""
        assert job.state is PrefillState.PUBLISHING or job.state.is_final, job.state
        if job.num_writers == 0:
            self._release_pages(job)

    def check(self) -> None:
        """Assert the invariants that need no one else's books."""
        for job in self._jobs.values():
            assert not job.state.is_final or job.num_writers > 0, f"{job.serial} never settled"
            assert (job.state is PrefillState.WAITING) == (job.serial in self._waiting)
            assert (job.state is PrefillState.RUNNING) == (job.serial in self._running)
            assert job.state is not PrefillState.WAITING or not job.page_ids
            if job.state in (PrefillState.RESTORING, PrefillState.RUNNING):
                assert len(job.page_ids) == job.num_pages
        for key, serial in self._in_flight.items():
            assert key in self._jobs[serial].keys, "a key in flight that nobody makes"

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _in_order(self, now_s: float) -> list[PrefillJob]:
        def rank(job: PrefillJob) -> tuple[int, int, int]:
            age = int((now_s - job.arrival_s) / self._config.ageing_s)
            return (job.request.priority - age, -self._num_cached(job), job.serial)

        return sorted(self._waiting.values(), key=rank)

    def _num_cached(self, job: PrefillJob) -> int:
        """Leading pages of the job in the radix cache, remembered until the cache changes."""
        if job.cached_memo is None or job.cached_memo[0] != self._cache.version:
            num_pages = self._cache.count(job.namespace, job.packed)
            job.cached_memo = (self._cache.version, num_pages)
        return job.cached_memo[1]

    def _awaits_another(self, job: PrefillJob) -> bool:
        first_missing = self._num_cached(job)
        return first_missing < job.num_full_pages and job.keys[first_missing] in self._in_flight

    def _reserve(self, job: PrefillJob) -> bool:
        """Match the cache and allocate the rest, evicting when short; all or nothing."""
        matched = self._cache.match(job.namespace, job.packed)
        need = job.num_pages - len(matched)
        if need > self._allocator.num_free:
            self._cache.evict(need - self._allocator.num_free)
        fresh = self._allocator.allocate(need)
        if fresh is None:
            self._allocator.release(matched)
            return False
        job.page_ids = [*matched, *fresh]
        job.num_local = job.num_valid = len(matched) * job.page_size
        return True

    def _admit(self, job: PrefillJob, now_s: float) -> None:
        del self._waiting[job.serial]
        job.admitted_s = now_s
        for key in job.keys[job.num_valid_full_pages : job.num_full_pages]:
            self._in_flight.setdefault(key, job.serial)
        if job.num_missing:
            job.state = PrefillState.RESTORING
            job.num_writers += 1
        else:
            job.state = PrefillState.RUNNING
            self._running[job.serial] = job

    def _chunk(self, job: PrefillJob, limit: int) -> SeqStep:
        if job.num_missing == 0:  # all KV is there: run the last token for its logits only
            start, end, write_kv = job.num_tokens - 1, job.num_tokens, False
        else:
            start, write_kv = job.num_valid, True
            end = min(job.num_tokens, start + limit)
        return SeqStep(
            tokens=np.ascontiguousarray(job.tokens[start:end]),
            start=start,
            page_ids=tuple(job.page_ids[: self._info.spec.num_pages_for(end)]),
            write_kv=write_kv,
            sample=job.sample_input() if end == job.num_tokens else None,
        )

    def _advance(self, job: PrefillJob, num_valid: int) -> None:
        """KV is valid up to ``num_valid``: full pages enter the cache and leave the flight."""
        num_before = job.num_valid_full_pages
        job.num_valid = num_valid
        num_full = job.num_valid_full_pages
        if num_full == num_before:
            return
        canonical, _ = self._cache.insert(
            job.namespace,
            job.packed_pages(num_full),
            job.keys[:num_full],
            job.page_ids[:num_full],
        )
        job.page_ids[:num_full] = canonical
        self._land(job, num_before, num_full)

    def _land(self, job: PrefillJob, first_page: int, end_page: int) -> None:
        for key in job.keys[first_page:end_page]:
            if self._in_flight.get(key) == job.serial:
                del self._in_flight[key]

    def _leave(self, job: PrefillJob, state: PrefillState) -> None:
        job.state = state
        self._waiting.pop(job.serial, None)
        self._running.pop(job.serial, None)
        self._settle(job)

    def _settle(self, job: PrefillJob) -> None:
        """Forget a finished job once nobody writes into its pages. The only way out."""
        if job.state.is_final and job.num_writers == 0 and job.serial in self._jobs:
            del self._jobs[job.serial]
            self._land(job, 0, job.num_full_pages)
            self._release_pages(job)

    def _release_pages(self, job: PrefillJob) -> None:
        self._allocator.release(job.page_ids)
        job.page_ids = []
