"""Restoring prefixes from the store: what is verified is used, the rest is recomputed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.kvstore.memory import MemoryFaults, MemoryStore
from tests.prefill_node.harness import PAGE_SIZE, Rig, prompt_of, rig, until, virtual
from transfer.errors import PeerLost

# Until the first step has been measured, restoring looks cheaper and may take its time.
EAGER: dict[str, Any] = {"compute_tokens_per_s": 1.0, "restore_latency_s": 0.5}
PROMPT = prompt_of(100)  # six full pages and a tail of four tokens
NUM_PAGES = 7


@asynccontextmanager
async def warm_store() -> AsyncIterator[MemoryStore]:
    """A store that holds all pages of ``PROMPT``."""
    async with rig() as r:
        await r.prefill(PROMPT)
        yield r.store


def restored_tokens(num_pages: int) -> int:
    return min(num_pages * PAGE_SIZE, len(PROMPT))


async def test_a_cold_node_restores_the_whole_prompt_tail_included() -> None:
    async with warm_store() as store, rig(store=store, **EAGER) as r:
        answer = await r.prefill(PROMPT)
        assert answer.first.cached_store_tokens == 100
        assert answer.first.pages_pulled == NUM_PAGES
        assert answer.first.bytes_pulled == NUM_PAGES * r.runner.info.spec.page_nbytes
        assert r.runner.num_tokens_run == 0
        assert answer.done.published
        assert answer.done.pages_pushed == 0
        assert store.put_counts.total() == NUM_PAGES


async def test_restored_full_pages_serve_the_next_request_from_the_radix_cache() -> None:
    async with warm_store() as store, rig(store=store, **EAGER) as r:
        await r.prefill(PROMPT)
        answer = await r.prefill(PROMPT[:96] + prompt_of(8, seed=3))
        assert answer.first.cached_local_tokens == 96
        assert answer.first.computed_tokens == 8


FAULTS: dict[str, Callable[[MemoryFaults, int], Any]] = {
    "absent": lambda faults, page: faults.absent_depths.add(page),
    "failed": lambda faults, page: faults.fail_depths.add(page),
    "corrupt": lambda faults, page: faults.corrupt_depths.add(page),
}


@pytest.mark.parametrize("page", range(NUM_PAGES))
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_bad_page_k_keeps_the_k_pages_before_it(fault: str, page: int) -> None:
    async with warm_store() as store, rig(store=store, **EAGER) as r:
        FAULTS[fault](store.faults, page)
        answer = await r.prefill(PROMPT)
        assert answer.first.cached_store_tokens == restored_tokens(page)
        assert answer.first.computed_tokens == len(PROMPT) - restored_tokens(page)
        counters = r.node.counters()
        assert counters["pages_pulled_corrupt"] == (fault == "corrupt")
        assert counters["pages_pulled_failed"] == (fault == "failed")
        store.faults = MemoryFaults()
        again = await r.prefill(PROMPT)
        assert again.first.computed_tokens <= 4


async def test_an_unreachable_store_costs_nothing_but_the_computing() -> None:
    async with rig(**EAGER) as r:
        r.store.faults.unreachable = True
        answer = await r.prefill(PROMPT)
        assert answer.first.computed_tokens == 100
        assert not answer.done.published


@virtual(step_s=0.05)
async def test_a_slow_tier_costs_one_bounded_try_and_is_then_avoided() -> None:
    async with warm_store() as store, rig(store=store) as r:
        store.faults.page_delay_s = 0.05  # 0.35 s for the prompt, seven times a step
        loop = asyncio.get_running_loop()
        took_s: list[float] = []
        for _ in range(12):
            started_s = loop.time()
            await r.prefill(PROMPT)
            took_s.append(loop.time() - started_s)
            r.node._loop.clear_cache()
        decisions = [record.decision for record in r.node._loop.stats.decisions]
        assert [d.restore for d in decisions] == [True] + [False] * 11
        assert r.node.counters()["restore_s"] <= decisions[0].timeout_s + 0.001
        assert r.node.counters()["pages_pulled"] <= 1


@virtual()
async def test_pages_that_another_node_is_writing_are_waited_for() -> None:
    store = MemoryStore(_spec())
    store.faults.put_delay_s = 0.05
    async with rig(store=store) as writer, rig(store=store, **EAGER) as reader:
        stream = writer.stream(PROMPT)
        await anext(stream)  # its pages are being put now
        answer = await reader.prefill(PROMPT)
        assert answer.first.cached_store_tokens == 100
        assert reader.runner.num_tokens_run == 0
        async for _ in stream:
            pass


@virtual()
async def test_waiting_for_a_writer_is_bounded() -> None:
    store = MemoryStore(_spec())
    store.faults.put_delay_s = 0.4
    async with rig(store=store) as writer, rig(store=store, restore_wait_s=0.05, **EAGER) as r:
        stream = writer.stream(PROMPT)
        await anext(stream)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        answer = r.stream(PROMPT)
        first = await anext(answer)
        assert loop.time() - started_s < 0.3
        assert first.computed_tokens == 100  # type: ignore[union-attr]
        async for _ in answer:
            pass
        async for _ in stream:
            pass


@virtual()
async def test_leaving_during_a_restore_keeps_the_pages_until_it_is_quiet() -> None:
    async with warm_store() as store, rig(store=store, num_pages=8, **EAGER) as r:
        store.faults.page_delay_s = 0.02
        task = asyncio.create_task(r.prefill(PROMPT))
        await until(lambda: bool(r.node._loop._restores))
        await asyncio.sleep(0.03)
        assert r.node._loop._restores
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not r.node._loop._restores, "told to stop, not waited for"
        r.node.check()
        store.faults.page_delay_s = 0.0
        answer = await r.prefill(prompt_of(100, seed=8))
        assert answer.first.computed_tokens == 100


@virtual()
async def test_two_requests_share_one_restore() -> None:
    async with warm_store() as store, rig(store=store, **EAGER) as r:
        store.faults.get_delay_s = 0.02
        answers = await asyncio.gather(
            r.prefill(PROMPT), r.prefill(PROMPT[:96] + prompt_of(16, seed=4))
        )
        assert sum(answer.first.pages_pulled for answer in answers) == NUM_PAGES
        assert r.runner.num_tokens_run == 16


class BrokenStore:
    """Raises where the contract promises results."""

    def __init__(self, inner: MemoryStore, error: Exception) -> None:
        self._inner = inner
        self._error = error

    async def match(self, keys: Any, *, deadline_s: float) -> Any:
        return await self._inner.match(keys, deadline_s=deadline_s)

    async def put(self, pages: Any, **_: Any) -> Any:
        raise self._error

    async def get(self, pages: Any, **_: Any) -> Any:
        raise self._error

    async def close(self) -> None: ...


@pytest.mark.parametrize("error", [PeerLost("gone"), ValueError("a bug")])
async def test_a_store_that_raises_fails_no_request(error: Exception) -> None:
    async with (
        warm_store() as store,
        rig(store=store, wrap=lambda inner: BrokenStore(inner, error), **EAGER) as r,
    ):
        for seed in range(6):
            answer = await r.prefill(PROMPT[:48] + prompt_of(10, seed=seed))
            assert not answer.done.published
        assert r.node.healthy


@pytest.mark.parametrize("fault", ["refuse_puts", "fail_puts"])
async def test_pages_that_the_store_does_not_take_are_unpublished(fault: str) -> None:
    async with rig() as r:
        setattr(r.store.faults, fault, True)
        answer = await r.prefill(PROMPT)
        assert not answer.done.published
        assert answer.done.pages_pushed == 0


@virtual()
async def test_a_store_that_hangs_delays_done_by_the_push_timeout_only() -> None:
    async with rig(push_timeout_s=0.05, num_pages=9) as r:
        r.store.faults.put_delay_s = 30.0
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        answer = await r.prefill(PROMPT)
        assert not answer.done.published
        assert loop.time() - started_s < 0.2
        await r.settled()
        await r.prefill(prompt_of(100, seed=5))


async def test_a_local_hit_is_pushed_again_when_the_store_has_lost_it() -> None:
    async with rig() as r:
        await r.prefill(PROMPT)
        r.store.clear()
        answer = await r.prefill(PROMPT)
        assert answer.done.published
        assert answer.done.pages_pushed == NUM_PAGES
        _all_published(r)


def _all_published(r: Rig) -> None:
    assert len(r.store.pages) == NUM_PAGES


def _spec() -> Any:
    from engine.fake import FakeRunner

    return FakeRunner(num_pages=2, page_size=PAGE_SIZE).info.spec
