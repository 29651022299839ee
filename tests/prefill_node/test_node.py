"""The whole prefill node, in one process: tokens, sharing, accounting, aborts, memory pressure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
import pytest

from engine.fake import fake_generate
from engine.request import FirstToken, PrefillDone, PrefillEvent, PrefillRequest, SamplingParams
from kvstore.events import ClearCache, GetStats, WatchKvEvents
from kvstore.keys import namespace_of, page_keys
from kvstore.store import DEFAULT_POLICY, PutPage, PutPolicy, PutResult
from tests.kvstore.memory import MemoryStore
from tests.prefill_node.harness import (
    GREEDY,
    PAGE_SIZE,
    Rig,
    caller,
    pack,
    prompt_of,
    rig,
    until,
)
from transfer.errors import RemoteFailed
from transfer.interface import Region

BORDERS = sorted(
    {n for base in (0, 16, 32, 40, 80) for n in (base - 1, base, base + 1, base + 2) if n > 0}
)


@pytest.mark.parametrize("chunk_size", [16, 40, 512])
async def test_tokens_equal_the_reference_around_page_and_chunk_borders(chunk_size: int) -> None:
    async with rig(chunk_size=chunk_size, restore=False) as r:
        for length in BORDERS:
            answer = await r.prefill(prompt_of(length, seed=length))
            assert answer.first.computed_tokens == length
            assert answer.done.published
            assert answer.done.pages_pushed == -(-length // PAGE_SIZE)


@pytest.mark.parametrize("chunk_size", [7, 24, 33])
async def test_chunks_that_no_page_divides_push_each_page_once_and_right(chunk_size: int) -> None:
    async with rig(chunk_size=chunk_size) as r:
        prompt = prompt_of(100)
        answer = await r.prefill(prompt)
        assert answer.done.pages_pushed == 7
        assert set(r.store.put_counts.values()) == {1}
        await _reads_right_on_a_cold_node(r, prompt)


async def _reads_right_on_a_cold_node(r: Rig, prompt: list[int]) -> None:
    """A node that must take every page from the store gives the reference's token."""
    async with rig(store=r.store, compute_tokens_per_s=1.0, restore_timeout_s=5) as cold:
        answer = await cold.prefill(prompt)
        assert answer.first.cached_store_tokens == len(prompt)
        assert cold.runner.num_tokens_run == 0


async def test_pages_are_stored_under_the_keys_of_the_prompt() -> None:
    async with rig() as r:
        prompt = prompt_of(40)
        await r.prefill(prompt)
        namespace = namespace_of("fake", r.runner.info.spec)
        assert list(r.store.pages) == page_keys(namespace, prompt, PAGE_SIZE)


async def test_the_tail_page_carries_nothing_of_its_earlier_owner() -> None:
    async with rig(num_pages=4, restore=False) as r:
        await r.prefill(prompt_of(48, seed=1))
        await r.node.clear_cache(ClearCache(), caller())
        prompt = prompt_of(37, seed=2)
        await r.prefill(prompt)
        tail = list(r.store.pages.values())[-1].data
        spec = r.runner.info.spec
        runs = np.frombuffer(tail, dtype=np.uint8).reshape(spec.num_runs, -1)
        assert runs[:, : 5 * spec.slot_nbytes].any()
        assert not runs[:, 5 * spec.slot_nbytes :].any()


async def test_emitted_tokens_continue_the_prompt() -> None:
    async with rig() as r:
        prompt = prompt_of(30)
        sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
        emitted = [token.token for token in fake_generate(prompt, sampling)[:4]]
        answer = await r.prefill(prompt, sampling=sampling, emitted=pack(emitted))
        assert answer.first.output.index == 4
        assert answer.first.computed_tokens == 34


async def test_two_equal_prompts_at_once_compute_their_full_pages_once() -> None:
    async with rig(chunk_size=16, restore=False) as r:
        prompt = prompt_of(70)
        answers = await asyncio.gather(r.prefill(prompt), r.prefill(prompt))
        assert sorted(a.first.computed_tokens for a in answers) == [6, 70]
        assert r.runner.num_tokens_run == 76
        assert r.store.put_counts.total() == 5


async def test_eight_prompts_with_one_prefix_compute_it_once() -> None:
    async with rig(num_pages=128, chunk_size=32, restore=False) as r:
        shared = prompt_of(64)
        prompts = [shared + prompt_of(16, seed=10 + i) for i in range(8)]
        answers = await asyncio.gather(*(r.prefill(prompt) for prompt in prompts))
        assert sum(a.first.computed_tokens for a in answers) == 64 + 8 * 16
        assert r.runner.num_tokens_run == 64 + 8 * 16


async def test_a_full_hit_on_a_page_border_runs_one_token_and_writes_none() -> None:
    async with rig(restore=False) as r:
        prompt = prompt_of(48)
        await r.prefill(prompt)
        before = r.runner.num_tokens_run
        answer = await r.prefill(prompt)
        assert (answer.first.computed_tokens, answer.first.cached_local_tokens) == (0, 48)
        assert r.runner.num_tokens_run == before
        assert [len(step.tokens) for step in r.runner.steps[-1]] == [1]
        assert answer.done == PrefillDone(
            published=True, pages_pushed=0, bytes_pushed=0, push_s=answer.done.push_s
        )


async def test_salts_share_nothing() -> None:
    async with rig(compute_tokens_per_s=1.0) as r:
        prompt = prompt_of(40)
        for salt in (None, "a", "b", ""):
            answer = await r.prefill(prompt, cache_salt=salt)
            assert answer.first.computed_tokens == 40
        assert (await r.prefill(prompt, cache_salt="a")).first.computed_tokens < 40
        assert len(r.store.pages) == 4 * 3


async def test_other_weights_share_nothing() -> None:
    prompt = prompt_of(40)
    async with rig(fingerprint="w1") as r:
        await r.prefill(prompt)
        async with rig(fingerprint="w2", store=r.store, compute_tokens_per_s=1.0) as other:
            answer = await other.prefill(prompt)
            assert answer.first.cached_store_tokens == 0


async def _leave_after_steps(r: Rig, prompt: list[int], num_steps: int) -> None:
    """Start a request and leave it while step ``num_steps`` runs."""
    target = len(r.runner.steps) + num_steps
    task = asyncio.create_task(_first_event(r, prompt))
    await until(lambda: len(r.runner.steps) >= target or task.done())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _first_event(r: Rig, prompt: list[int]) -> PrefillEvent:
    async with aclosing(r.stream(prompt)) as stream:  # type: ignore[type-var]
        return await anext(stream)  # type: ignore[no-any-return]


async def test_abort_in_chunk_2_of_4_then_resend_equals_cold() -> None:
    async with rig(num_pages=5, chunk_size=16, step_delay_s=0.005, restore=False) as r:
        prompt = prompt_of(64)
        await _leave_after_steps(r, prompt, 2)
        await r.settled()
        answer = await r.prefill(prompt)
        assert answer.first.cached_local_tokens in (16, 32)
        await r.prefill(prompt_of(64, seed=9))
        await r.prefill(prompt)


@pytest.mark.parametrize("num_steps", range(6))
async def test_pools_return_to_baseline_after_leaving_at_every_step(num_steps: int) -> None:
    async with rig(num_pages=8, chunk_size=16, step_delay_s=0.002) as r:
        await _leave_after_steps(r, prompt_of(64), num_steps)
        await r.settled()
        assert r.free_pages() == 7
        await r.prefill(prompt_of(64))


async def test_leaving_after_the_first_token_holds_pages_only_until_the_put_ends() -> None:
    async with rig(num_pages=8) as r:
        r.store.faults.put_delay_s = 0.05
        stream = r.stream(prompt_of(64))
        assert isinstance(await anext(stream), FirstToken)
        await stream.aclose()  # type: ignore[attr-defined]
        r.node.check()
        await r.settled()
        assert r.node.counters()["num_aborted"] == 1


async def test_500_requests_with_random_aborts_on_a_tiny_pool_equal_the_reference() -> None:
    rng = random.Random(5)
    async with rig(num_pages=12, chunk_size=24, token_budget=48, max_num_requests=600) as r:
        r.store.faults.put_delay_s = 0.0005

        async def one(i: int) -> int:
            prompt = prompt_of(rng.randint(1, 90), seed=rng.randint(0, 5))
            if rng.random() < 0.4:
                await _leave_after_steps(r, prompt, rng.randint(0, 3))
                return 0
            await r.prefill(prompt)
            return 1

        num_served = 0
        for _ in range(50):
            num_served += sum(await asyncio.gather(*(one(i) for i in range(10))))
            r.node.check()
        assert num_served > 200


async def test_a_pool_of_one_request_serves_eight() -> None:
    async with rig(num_pages=5, chunk_size=16) as r:
        answers = await asyncio.gather(*(r.prefill(prompt_of(64, seed=i)) for i in range(8)))
        assert all(answer.done.published for answer in answers)
        assert r.node.counters()["pages_evicted"] >= 28


async def test_refusals_name_their_code_and_allocate_nothing() -> None:
    async with rig(num_pages=5, max_num_requests=1, step_delay_s=0.02) as r:
        for prompt, code in [
            ([], "invalid_request"),
            ([300], "invalid_request"),
            ([65] * 65, "too_long"),
        ]:
            with pytest.raises(RemoteFailed) as caught:
                await r.prefill(prompt)
            assert caught.value.code == code
        first = asyncio.create_task(r.prefill(prompt_of(20)))
        await asyncio.sleep(0)
        with pytest.raises(RemoteFailed) as caught:
            await r.prefill(prompt_of(20, seed=1))
        assert caught.value.code == "overloaded"
        await first
        assert r.node.counters()["num_refused"] == 4
        with pytest.raises(RemoteFailed, match="bytes are not"):
            await r.prefill([65], emitted=b"\0\0\0\0\0")


async def test_max_tokens_1_stops_with_its_first_token() -> None:
    async with rig() as r:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        answer = await r.prefill(prompt_of(20), sampling=sampling)
        assert answer.first.output.stop == "length"


async def test_long_prompts_are_hashed_off_the_loop_and_served() -> None:
    async with rig(num_pages=400, chunk_size=512) as r:
        answer = await r.prefill(prompt_of(5000))
        assert answer.done.pages_pushed == 313


async def test_an_idle_node_takes_no_turn_of_the_loop() -> None:
    async with rig() as r:
        await r.prefill(prompt_of(20))
        num_steps = len(r.runner.steps)
        turns = 0
        scheduler = r.node._loop.scheduler
        real_admit = scheduler.admit

        def admit(now_s: float) -> object:
            nonlocal turns
            turns += 1
            return real_admit(now_s)

        scheduler.admit = admit  # type: ignore[method-assign,assignment]
        await asyncio.sleep(0.05)
        assert turns <= 1  # the last request's good-bye may still be on its way
        assert len(r.runner.steps) == num_steps


async def test_a_node_tells_its_contract_labels_gauges_and_stats() -> None:
    async with rig(num_pages=9) as r:
        info = r.membership.info
        assert info is not None
        assert r.network.hello is not None
        assert info.contract == r.network.hello.contract
        assert info.contract["fingerprint"] == "fake"
        assert info.contract["page_size"] == "16"
        assert info.labels["eos_token_ids"] == "257"
        assert info.labels["num_pages"] == "8"
        assert info.labels["device"] == "cpu"
        assert r.membership.status is not None
        await r.prefill(prompt_of(40))
        await r.settled()
        gauges = r.membership.status().gauges
        assert (gauges["num_running"], gauges["num_waiting"]) == (0, 0)
        assert (gauges["num_pages"], gauges["num_cached_pages"]) == (8, 2)
        assert gauges["num_free_pages"] == 8, "what the cache would give up counts as free"
        stats = await r.node.get_stats(GetStats(), caller())
        assert stats.healthy
        assert stats.counters["computed_tokens"] == 40
        service = r.network.service
        assert service is not None
        assert set(service.streams) == {PrefillRequest, WatchKvEvents}
        assert set(service.requests) == {ClearCache, GetStats}


async def test_priority_and_deadline_are_kept() -> None:
    async with rig(max_num_active=1, step_delay_s=0.01) as r:
        first = asyncio.create_task(r.prefill(prompt_of(20)))
        await asyncio.sleep(0.002)
        order: list[str] = []

        async def run(name: str, priority: int, seed: int) -> None:
            await r.prefill(prompt_of(20, seed=seed), priority=priority)
            order.append(name)

        await asyncio.gather(first, run("late", 1, 1), run("soon", -1, 2))
        assert order == ["soon", "late"]
        message = PrefillRequest(r.request(prompt_of(20, seed=3), sampling=GREEDY))
        with pytest.raises(RemoteFailed) as caught:
            async for _ in r.node.prefill(message, caller(timeout_s=0.001)):
                pass
        assert caught.value.code == "deadline_exceeded"


async def test_pages_are_stored_for_the_namespace_of_their_salt() -> None:
    namespaces: list[bytes] = []

    class Recording(MemoryStore):
        async def put(
            self,
            pages: Sequence[PutPage],
            *,
            source: Region,
            deadline_s: float,
            policy: PutPolicy = DEFAULT_POLICY,
        ) -> PutResult:
            namespaces.append(policy.namespace)
            return await super().put(pages, source=source, deadline_s=deadline_s, policy=policy)

    async with rig(wrap=lambda store: Recording(store.spec)) as r:
        await r.prefill(prompt_of(40), cache_salt="tenant")
        spec = r.runner.info.spec
    assert set(namespaces) == {namespace_of("fake", spec, salt="tenant")}


async def test_one_namespace_is_cleared_on_demand() -> None:
    async with rig() as r:
        await r.prefill(prompt_of(40), cache_salt="a")
        await r.prefill(prompt_of(40), cache_salt="b")
        namespace = namespace_of("fake", r.runner.info.spec, salt="a")
        cleared = await r.node.clear_cache(ClearCache(namespace), caller())
        assert cleared.num_pages == 2
        assert (await r.node.clear_cache(ClearCache(namespace), caller())).num_pages == 0
        assert (await r.node.clear_cache(ClearCache(), caller())).num_pages == 2
