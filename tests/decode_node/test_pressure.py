"""Too little memory costs time: retraction, waiting, refusal; never a deadlock or other tokens."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.decode_node.harness import GREEDY, S, failure_of, prompt_of, rig

LONG = msgspec.structs.replace(GREEDY, max_tokens=6 * S)


@pytest.mark.parametrize("num_pages", [10, 14, 25])
@pytest.mark.parametrize("store_works", [True, False])
async def test_retracted_requests_give_the_same_tokens(num_pages: int, store_works: bool) -> None:
    async with rig(num_pages=num_pages, head_room_tokens=0) as r:
        r.store.faults.unreachable = not store_works
        requests = [r.request(prompt_of(5 + i, seed=i), sampling=LONG) for i in range(6)]
        answers = await asyncio.gather(*(r.answer(request) for request in requests))
        assert sum(a.finished.num_preemptions for a in answers) > 0
        assert answers[0].finished.num_preemptions == 0, "the earliest is never retracted"


async def test_a_retracted_request_resumes_by_pulling() -> None:
    async with rig(num_pages=10, head_room_tokens=0) as r:
        requests = [r.request(prompt_of(5, seed=i), sampling=LONG) for i in range(2)]
        answers = await asyncio.gather(*(r.answer(request) for request in requests))
        retracted = answers[1].finished
        assert retracted.num_preemptions >= 1
        # each position of both requests was computed once: retraction lost nothing
        assert r.runner.num_tokens_run == 2 * (5 + 6 * S - 1)


async def test_eight_requests_for_a_pool_of_one_are_all_served() -> None:
    async with rig(num_pages=6) as r:
        tasks = []
        for i in range(8):
            request = r.request(prompt_of(4 * S, seed=i))
            prefill = r.prefill_of(request)
            tasks.append(r.start(request))
            await prefill.publish()
            await r.tell(prefill.says_first())
            await r.tell(prefill.says(published=True))
        answers = await asyncio.gather(*tasks)
        assert all(len(a.outputs) == GREEDY.max_tokens - 1 for a in answers)


async def test_the_earliest_goes_on_while_a_later_one_waits_for_its_prefill() -> None:
    async with rig(num_pages=10, head_room_tokens=0) as r:
        request = r.request(prompt_of(3), sampling=LONG)
        running = r.start(request, expect_prefill=False)
        await r.until(lambda: r.counter("num_tokens") > 2)
        late = r.request(prompt_of(5 * S, seed=1))
        prefill = r.prefill_of(late)
        pulling = r.start(late)
        await running
        await prefill.publish()
        await r.tell(prefill.says_first())
        answer = await pulling
        assert answer.finished.num_preemptions >= 1
        assert answer.finished.cached_store_tokens == 5 * S


async def test_memory_held_by_a_slow_store_is_waited_for() -> None:
    async with rig(num_pages=9, head_room_tokens=0, write_back_pages=4) as r:
        r.store.faults.put_delay_s = 0.02
        requests = [r.request(prompt_of(4 + i, seed=i), sampling=LONG) for i in range(4)]
        await asyncio.gather(*(r.answer(request) for request in requests))


async def test_what_can_never_fit_is_refused() -> None:
    async with rig(num_pages=5, max_model_len=1000) as r:
        fits = msgspec.structs.replace(GREEDY, max_tokens=4 * S - 10 + 1)
        await r.answer(r.request(prompt_of(10), sampling=fits))
        more = msgspec.structs.replace(GREEDY, max_tokens=4 * S - 10 + 2)
        error = await failure_of(r.events(r.request(prompt_of(10), sampling=more)))
        assert error.code == "too_long"
        assert "5 pages" in error.message
        error = await failure_of(r.events(r.request(prompt_of(1000))))
        assert error.code == "too_long"


async def test_a_full_queue_refuses_and_recovers() -> None:
    async with rig(max_running=1, max_waiting=2) as r:
        r.runner.gate.clear()
        tasks = [r.start(r.request(prompt_of(5)), expect_prefill=False)]
        await r.until(lambda: r.gauge("num_running") == 1)
        tasks += [r.start(r.request(prompt_of(5)), expect_prefill=False) for _ in range(2)]
        await r.until(lambda: r.gauge("num_waiting") == 2)
        error = await failure_of(r.events(r.request(prompt_of(5))))
        assert error.code == "overloaded"
        r.runner.gate.set()
        await asyncio.gather(*tasks)
        await r.answer(r.request(prompt_of(5)))


async def test_a_lower_priority_number_is_served_first() -> None:
    async with rig(max_running=1) as r:
        r.runner.gate.clear()
        done: list[int] = []
        tasks = []
        for i, priority in enumerate([0, 5, 1]):
            request = r.request(prompt_of(5, seed=i), priority=priority)
            task = r.start(request, expect_prefill=False)
            task.add_done_callback(lambda _, p=priority: done.append(p))
            tasks.append(task)
            await r.until(lambda n=i + 1: r.gauge("num_running") + r.gauge("num_waiting") == n)
        r.runner.gate.set()
        await asyncio.gather(*tasks)
        assert done == [0, 1, 5]


async def test_running_streams_go_on_while_a_long_prompt_is_recomputed() -> None:
    async with rig(num_pages=200, step_tokens=32) as r:
        running = r.start(r.request(prompt_of(5), sampling=LONG), expect_prefill=False)
        await r.until(lambda: r.counter("num_tokens") > 3)
        await r.answer(r.request(prompt_of(60 * S, seed=1)))
        await running
        mixed = [steps for steps in r.runner.steps if any(len(s.tokens) > 1 for s in steps)][1:]
        with_token = [steps for steps in mixed if any(len(s.tokens) == 1 for s in steps)]
        assert len(with_token) >= min(len(mixed), LONG.max_tokens) - 8
        assert all(sum(len(s.tokens) for s in steps) <= 32 for steps in mixed)
