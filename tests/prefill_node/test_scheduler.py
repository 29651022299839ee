"""The prefill scheduler alone: order, sharing, pages, budget, and aborts in every state."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from engine.page_allocator import PageAllocator
from engine.request import GenerateRequest, RequestId, SamplingParams, TokenOut
from engine.step import ModelInfo
from kvstore.events import KvEventLog
from kvstore.keys import Namespace
from kvstore.page import PageId, PageSpec
from prefill_node.config import PrefillConfig
from prefill_node.radix_cache import RadixCache
from prefill_node.request_state import PrefillJob, PrefillState
from prefill_node.scheduler import ChunkDone, PrefillScheduler, StepPlan
from transfer.errors import RemoteFailed

SIZE = 4
NS = Namespace(b"n" * 32)


class Bench:
    """A scheduler with its pool and cache, driven by hand."""

    def __init__(self, num_pages: int = 33, max_model_len: int = 256, **config: Any) -> None:
        spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=8, page_size=SIZE, dtype="uint8")
        info = ModelInfo("fake", "fake", spec, 259, max_model_len, frozenset((257,)))
        settings: dict[str, Any] = {"chunk_size": 8, "token_budget": 8, **config}
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, SIZE, KvEventLog())
        self.scheduler = PrefillScheduler(
            PrefillConfig(**settings), info, self.allocator, self.cache
        )
        self.serial = 0

    def job(self, tokens: list[int], priority: int = 0) -> PrefillJob:
        request = GenerateRequest(
            request_id=RequestId(f"r{self.serial}"),
            prompt=np.asarray(tokens, dtype="<i4").tobytes(),
            sampling=SamplingParams(),
            priority=priority,
        )
        self.serial += 1
        return PrefillJob(self.serial, request, NS, SIZE)

    def submit(self, tokens: list[int], now_s: float = 0.0, priority: int = 0) -> PrefillJob:
        job = self.job(tokens, priority)
        self.scheduler.submit(job, now_s)
        return job

    def admit(self, now_s: float = 0.0) -> list[PrefillJob]:
        """Admit, with nothing to restore."""
        admitted = self.scheduler.admit(now_s)
        for job in admitted:
            if job.state is PrefillState.RESTORING:
                self.scheduler.restored(job, 0)
        return admitted

    def end(self, plan: StepPlan) -> list[ChunkDone]:
        """End a step, and publish at once what it finished."""
        outputs = [TokenOut(index=0, token=65) if step.sample else None for step in plan.steps]
        done = self.scheduler.apply(plan, outputs)
        for item in done:
            if item.output is not None and not item.job.state.is_final:
                self.scheduler.release(item.job)
                self.scheduler.finish(item.job)
        return done

    def run_all(self, now_s: float = 0.0) -> list[PrefillJob]:
        """Run until nothing is left; return the jobs in the order of their first token."""
        finished: list[PrefillJob] = []
        while True:
            self.admit(now_s)
            plan = self.scheduler.plan()
            if plan is None:
                return finished
            finished += [item.job for item in self.end(plan) if item.output is not None]

    def check(self) -> None:
        self.allocator.check()
        self.cache.check()
        self.scheduler.check()
        held = Counter(self.cache.held())
        for job in self.scheduler.jobs:
            held.update(job.page_ids)
        for page_id in map(PageId, range(1, self.allocator.num_pages)):
            assert self.allocator.refs(page_id) == held[page_id]


def test_a_prompt_runs_in_chunks_and_samples_on_its_last_token() -> None:
    bench = Bench()
    job = bench.submit(list(range(19)))
    bench.admit()
    spans = []
    while plan := bench.scheduler.plan():
        (step,) = plan.steps
        spans.append((step.start, len(step.tokens), step.sample is not None))
        bench.end(plan)
    assert spans == [(0, 8, False), (8, 8, False), (16, 3, True)]
    assert job.state is PrefillState.DONE
    bench.check()


def test_one_step_holds_chunks_of_several_requests_within_the_budget() -> None:
    bench = Bench(chunk_size=6, token_budget=10)
    bench.submit([1] * 8)
    bench.submit([2] * 8)
    bench.admit()
    plan = bench.scheduler.plan()
    assert plan is not None
    assert [len(step.tokens) for step in plan.steps] == [6, 4]
    assert plan.num_tokens == 10


def test_the_chunk_that_does_not_end_on_a_page_border_leaves_the_partial_page_out() -> None:
    bench = Bench(chunk_size=6, token_budget=6)
    bench.submit(list(range(14)))
    bench.admit()
    finished = []
    while plan := bench.scheduler.plan():
        finished += [(item.first_page, item.end_page) for item in bench.end(plan)]
    assert finished == [(0, 1), (1, 3), (3, 3)]


def test_longest_cached_prefix_runs_first() -> None:
    bench = Bench()
    bench.submit([1] * 16)
    bench.run_all()
    cold = bench.submit([2] * 16)
    warm = bench.submit([1] * 16 + [3] * 4)
    assert bench.run_all() == [warm, cold]


def test_a_batch_that_branches_runs_depth_first() -> None:
    bench = Bench(num_pages=64)
    branches = [[1] * 8, [2] * 8]
    jobs = [bench.submit(branches[i % 2] + [10 + i] * 4) for i in range(6)]
    order = [jobs.index(job) for job in bench.run_all()]
    assert order in ([0, 2, 4, 1, 3, 5], [0, 1, 2, 4, 3, 5])
    assert bench.cache.num_pages == 2 + 2 + 6


def test_lower_priority_numbers_run_first() -> None:
    bench = Bench()
    late = bench.submit([1] * 8, priority=1)
    soon = bench.submit([2] * 8, priority=-1)
    assert bench.run_all() == [soon, late]


def test_ageing_lets_nothing_starve() -> None:
    bench = Bench(max_num_active=1, ageing_s=1.0)
    bench.submit([1] * 8)
    bench.run_all()
    old = bench.submit([2] * 8, now_s=0.0)
    for now_s in range(1, 10):
        bench.submit([1] * 8 + [now_s] * 4, now_s=float(now_s))
        (admitted,) = bench.admit(now_s=float(now_s))
        if admitted is old:
            break
        while plan := bench.scheduler.plan():
            bench.end(plan)
    assert old.state is PrefillState.RUNNING


def test_equal_prompts_compute_their_full_pages_once() -> None:
    bench = Bench()
    first, second = bench.submit(list(range(18))), bench.submit(list(range(18)))
    assert bench.admit() == [first]
    assert bench.run_all() == [first, second]
    assert first.num_computed == 18
    assert second.num_computed == 2
    bench.check()


def test_who_shares_a_prefix_in_flight_waits_only_for_the_shared_part() -> None:
    bench = Bench(token_budget=16)
    long = bench.submit([1] * 8 + [2] * 24)
    short = bench.submit([1] * 8 + [3] * 4)
    assert bench.admit() == [long]
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.end(plan)  # the shared 8 tokens are there
    assert bench.admit() == [short]
    assert short.num_local == 8


def test_who_waits_for_an_aborted_request_takes_over() -> None:
    bench = Bench()
    first, second = bench.submit(list(range(20))), bench.submit(list(range(20)))
    bench.admit()
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.scheduler.abort(first)
    assert bench.admit() == [], "the pages of the running step are still in flight"
    bench.end(plan)
    assert bench.admit() == [second]
    assert second.num_local == 8, "the aborted step's pages are not computed twice"
    bench.run_all()
    bench.check()


def test_full_hit_runs_one_token_without_writing() -> None:
    bench = Bench()
    bench.submit([1] * 16)
    bench.run_all()
    again = bench.submit([1] * 16)
    bench.admit()
    plan = bench.scheduler.plan()
    assert plan is not None
    (step,) = plan.steps
    assert (step.start, len(step.tokens), step.write_kv) == (15, 1, False)
    assert again.num_computed == 0
    bench.end(plan)
    bench.check()


def test_a_restored_tail_page_leaves_one_token_without_writing() -> None:
    bench = Bench()
    job = bench.submit([1] * 10)
    (restoring,) = bench.scheduler.admit(0.0)
    assert restoring.state is PrefillState.RESTORING
    bench.scheduler.restored(job, 3)
    plan = bench.scheduler.plan()
    assert plan is not None
    assert (plan.steps[0].start, plan.steps[0].write_kv) == (9, False)
    assert (job.num_store, job.num_computed) == (10, 0)
    bench.end(plan)
    bench.check()


def test_a_request_that_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    bench = Bench(num_pages=9)
    running = bench.submit([1] * 20)
    big = bench.submit([2] * 16)
    small = bench.submit([3] * 4)
    assert bench.admit() == [running]
    assert (big.state, small.state) == (PrefillState.WAITING, PrefillState.WAITING)
    assert bench.run_all() == [running, big, small]
    bench.check()


def test_pages_are_evicted_when_a_request_needs_them() -> None:
    bench = Bench(num_pages=9)
    for value in range(5):
        bench.submit([value] * 32)
        bench.run_all()
        bench.check()
    assert bench.cache.num_pages == 8


def test_too_long_and_overloaded_are_refused_with_their_values() -> None:
    bench = Bench(num_pages=9, max_model_len=40, max_num_requests=1)
    with pytest.raises(RemoteFailed, match="33 tokens need 9 pages and the pool has 8") as caught:
        bench.submit([1] * 33)
    assert caught.value.code == "too_long"
    with pytest.raises(RemoteFailed, match="41 tokens exceed max_model_len=40"):
        bench.submit([1] * 41)
    bench.submit([1] * 32)
    with pytest.raises(RemoteFailed, match="max_num_requests=1") as caught:
        bench.submit([1])
    assert caught.value.code == "overloaded"


@pytest.mark.parametrize("state", list(PrefillState))
def test_abort_is_idempotent_in_every_state(state: PrefillState) -> None:
    bench = Bench()
    job = bench.submit(list(range(20)))
    if state is not PrefillState.WAITING:
        bench.scheduler.admit(0.0)
    if state not in (PrefillState.WAITING, PrefillState.RESTORING):
        bench.scheduler.restored(job, 0)
    if state in (PrefillState.PUBLISHING, PrefillState.DONE):
        while (plan := bench.scheduler.plan()) is not None:
            token = TokenOut(index=0, token=65)
            bench.scheduler.apply(plan, [token if step.sample else None for step in plan.steps])
    if state is PrefillState.DONE:
        bench.scheduler.finish(job)
    if state is not PrefillState.ABORTED:
        assert job.state is state
    bench.scheduler.abort(job)
    bench.scheduler.abort(job)
    if state is PrefillState.RESTORING:
        assert bench.allocator.num_free < 32 - 1, "the restore still writes into its pages"
        bench.scheduler.restored(job, 1)
    bench.scheduler.abort(job)
    expected = PrefillState.DONE if state is PrefillState.DONE else PrefillState.ABORTED
    assert job.state is expected
    assert bench.scheduler.num_live == 0
    assert bench.allocator.num_held == bench.cache.num_pages
    bench.check()


def test_abort_during_a_step_releases_pages_only_when_the_step_has_ended() -> None:
    bench = Bench()
    job = bench.submit(list(range(20)))
    bench.admit()
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.scheduler.abort(job)
    assert bench.allocator.num_held == 5
    bench.end(plan)
    assert bench.allocator.num_held == bench.cache.num_pages == 2
    bench.check()


def test_a_failed_step_leaves_nothing_in_the_cache() -> None:
    bench = Bench()
    job = bench.submit(list(range(20)))
    bench.admit()
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.scheduler.fail(plan)
    assert job.state is PrefillState.ABORTED
    assert bench.allocator.num_held == bench.cache.num_pages == 0
    bench.check()


def test_two_requests_that_computed_the_same_pages_end_on_one_copy() -> None:
    bench = Bench(token_budget=16)
    first = bench.submit([1] * 20)
    bench.admit()
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.end(plan)
    bench.cache.clear()  # the first two pages are nobody's secret any more
    second = bench.submit([1] * 20)
    assert bench.admit() == [second]
    for _ in range(2):
        plan = bench.scheduler.plan()
        assert plan is not None
        assert len(plan.jobs) == 2
        bench.end(plan)
        bench.check()
        assert not first.page_ids or second.page_ids[:2] == first.page_ids[:2]
    bench.run_all()
    assert bench.cache.num_pages == bench.allocator.num_held == 5
    assert (first.state, second.state) == (PrefillState.DONE, PrefillState.DONE)
    bench.check()


@pytest.mark.parametrize("seed", range(8))
def test_fuzz_every_request_ends_and_pages_are_conserved(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(num_pages=17, chunk_size=rng.randint(1, 8), token_budget=8, max_num_active=4)
    live: list[PrefillJob] = []
    restoring: list[PrefillJob] = []
    plan: StepPlan | None = None
    for tick in range(600):
        action = rng.random()
        if action < 0.25:
            tokens = [rng.choice([1, 2])] * rng.randint(1, 30) + [rng.choice([3, 4])] * 6
            live.append(bench.submit(tokens, now_s=float(tick), priority=rng.randint(-1, 1)))
        elif action < 0.4:
            restoring += [
                job
                for job in bench.scheduler.admit(float(tick))
                if job.state is PrefillState.RESTORING
            ]
        elif action < 0.6 and restoring:
            job = restoring.pop(rng.randrange(len(restoring)))
            bench.scheduler.restored(job, rng.randint(0, 1))
        elif action < 0.9:
            if plan is None:
                plan = bench.scheduler.plan()
            elif rng.random() < 0.1:
                bench.scheduler.fail(plan)
                plan = None
            else:
                bench.end(plan)
                plan = None
        elif action < 0.97 and live:
            bench.scheduler.abort(rng.choice(live))
        else:
            bench.cache.clear()
        bench.check()
    _run_out(bench, restoring, plan)
    assert all(job.state.is_final for job in live)
    assert bench.allocator.num_held == bench.cache.num_pages
    bench.check()


def _run_out(bench: Bench, restoring: list[PrefillJob], plan: StepPlan | None) -> None:
    if plan is not None:
        bench.end(plan)
    for job in restoring:
        bench.scheduler.restored(job, 0)
    bench.run_all(now_s=1000.0)
    assert bench.scheduler.num_live == 0
