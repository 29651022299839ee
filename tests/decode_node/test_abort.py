"""Aborts in every state leave nothing behind and disturb nobody."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import msgspec
import pytest

from engine.request import FinishReason, SamplingParams
from tests.decode_node.harness import GREEDY, Answer, Rig, S, keys_of, prompt_of, reference, rig

LONG = msgspec.structs.replace(GREEDY, max_tokens=200)


async def cancel(task: asyncio.Task[Answer]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def after_abort(r: Rig) -> None:
    """Baseline: nothing held, and a fresh request is served."""
    await r.settled()
    await r.answer(r.request(prompt_of(37, seed=77)))


async def test_abort_while_pulling() -> None:
    async with rig() as r:
        task = r.start(r.request(prompt_of(40)))
        await r.until(lambda: r.gauge("num_pulling") == 1)
        await cancel(task)
        await after_abort(r)
        assert r.counter("num_aborted") == 1


async def test_abort_while_waiting_for_pages() -> None:
    async with rig(num_pages=8, head_room_tokens=0) as r:
        holder = r.start(r.request(prompt_of(6 * S)))
        await r.until(lambda: r.gauge("num_pulling") == 1)
        task = r.start(r.request(prompt_of(5 * S, seed=1)))
        await r.until(lambda: r.gauge("num_waiting") == 1)
        await cancel(task)
        await cancel(holder)
        await after_abort(r)


async def test_abort_while_ready_without_a_first_token() -> None:
    async with rig() as r:
        request = r.request(prompt_of(40))
        await r.prefill_of(request).publish()
        task = r.start(request)
        await r.until(lambda: r.gauge("num_running") == 1 and r.gauge("num_pulling") == 0)
        await cancel(task)
        await after_abort(r)


@pytest.mark.parametrize("length", [3, 5 * S])
async def test_abort_in_a_running_step_releases_pages_only_after_it(length: int) -> None:
    async with rig(step_tokens=2 * S) as r:
        r.runner.gate.clear()
        task = r.start(r.request(prompt_of(length), sampling=LONG), expect_prefill=False)
        await r.until(r.runner.entered.is_set)
        await cancel(task)
        assert r.gauge("num_running") == 1
        r.node.check()
        assert r.gauge("num_free_pages") < r.gauge("num_pages")
        r.runner.gate.set()
        await after_abort(r)


async def test_abort_exactly_in_the_step_in_which_it_finishes() -> None:
    async with rig() as r:
        r.runner.gate.clear()
        last = msgspec.structs.replace(GREEDY, max_tokens=1)
        task = r.start(r.request(prompt_of(20), sampling=last), expect_prefill=False)
        await r.until(r.runner.entered.is_set)
        await cancel(task)
        r.runner.gate.set()
        await after_abort(r)


async def test_abort_while_the_last_pages_are_stored() -> None:
    async with rig(final_write_back_s=5.0) as r:
        r.store.faults.put_delay_s = 0.05
        task = r.start(r.request(prompt_of(20)), expect_prefill=False)
        await r.until(lambda: r.gauge("num_pages_in_transfer") > 0 and r.gauge("num_running") == 0)
        await cancel(task)
        r.store.faults.put_delay_s = 0.0
        await after_abort(r)


async def test_closing_a_finished_stream_again_changes_nothing() -> None:
    async with rig() as r:
        stream = r.events(r.request(prompt_of(5)))
        async for _ in stream:
            pass
        await stream.aclose()  # type: ignore[attr-defined]
        assert r.counter("num_aborted") == 0
        await after_abort(r)


async def test_abort_of_one_id_does_not_touch_a_longer_one() -> None:
    async with rig() as r:
        tasks = {
            name: r.start(
                r.request(prompt_of(30), request_id=name, sampling=LONG), expect_prefill=False
            )
            for name in ("a", "ab")
        }
        await r.until(lambda: r.counter("num_tokens") > 4)
        await cancel(tasks["a"])
        assert len((await tasks["ab"]).outputs) == 200


async def test_a_request_sent_again_replaces_the_older_leg() -> None:
    async with rig() as r:
        older = asyncio.ensure_future(
            collect_failure(r, r.request(prompt_of(30), request_id="same", sampling=LONG))
        )
        await r.until(lambda: r.counter("num_tokens") > 2)
        newer = await r.answer(r.request(prompt_of(30), request_id="same", sampling=LONG))
        assert len(newer.outputs) == 200
        assert await older == "superseded"


@pytest.mark.parametrize("generated", [2 * S, 5])
async def test_a_cancelled_leg_leaves_its_full_pages_in_the_store(generated: int) -> None:
    """The next turn finds prompt and output, whoever ended the stream."""
    async with rig() as r:
        request = r.request(prompt_of(2 * S + 3), sampling=LONG)
        task = r.start(request, expect_prefill=False)
        await r.until(lambda: r.counter("num_tokens") > generated)
        await cancel(task)
        await r.settled()
        tokens = [*prompt_of(2 * S + 3), *(o.token for o in reference(request))]
        full = keys_of(r.store.spec, tokens[: (2 * S + 3 + generated) // S * S])
        assert all(key in r.store.pages for key in full)
        assert all(len(page.record.tokens) == 4 * S for page in r.store.pages.values())
        store = r.store
    async with rig(store=store) as other:
        answer = await other.answer(other.request(tokens[: len(full) * S]))
        assert answer.finished.cached_store_tokens == len(full) * S


async def test_a_leg_cancelled_in_a_recompute_leaves_what_it_computed() -> None:
    async with rig(step_tokens=S) as r:
        r.runner.gate.clear()
        task = r.start(r.request(prompt_of(4 * S)), expect_prefill=False)
        await r.until(r.runner.entered.is_set)
        await cancel(task)
        r.runner.gate.set()
        await r.settled()
        assert set(r.store.pages) == set(keys_of(r.store.spec, prompt_of(4 * S)[:S]))


async def test_what_a_cancelled_leg_leaves_is_bounded_and_delays_nobody() -> None:
    """The store hangs: pages beyond the queue are dropped, and new work is served at once."""
    async with rig(num_pages=40, write_back_pages=3) as r:
        r.store.faults.put_delay_s = 0.5
        for i in range(3):
            task = r.start(r.request(prompt_of(6 * S, seed=i), sampling=LONG), expect_prefill=False)
            await r.until(lambda: r.gauge("num_running") == 1 and r.counter("num_tokens") > 0)
            await cancel(task)
            await r.until(lambda: r.gauge("num_running") == 0)
        assert r.gauge("num_pages_in_transfer") <= 3
        assert r.counter("num_write_back_dropped") > 0
        assert r.gauge("num_free_pages") >= r.gauge("num_pages") - 3
        r.store.faults.put_delay_s = 0.0
        await after_abort(r)


async def test_a_step_that_broke_leaves_nothing_in_the_store() -> None:
    async with rig() as r:
        r.runner.gate.clear()
        r.runner.failures.append(RuntimeError("broken"))
        failing = asyncio.ensure_future(collect_failure(r, r.request(prompt_of(3 * S))))
        await r.until(r.runner.entered.is_set)
        r.runner.gate.set()
        assert await failing == "engine_failed"
        await r.settled()
        assert r.store.pages == {}


async def collect_failure(r: Rig, request: object) -> str:
    from tests.decode_node.harness import failure_of

    return (await failure_of(r.events(request))).code  # type: ignore[arg-type]


async def test_500_requests_with_random_aborts_on_a_tiny_pool_equal_the_reference() -> None:
    """Pages are reused all the time; a stale or foreign byte would change some output."""
    rng = random.Random(11)
    async with rig(num_pages=24, head_room_tokens=8, max_waiting=2000, pull_timeout_s=0.2) as r:
        r.store.faults.page_delay_s = 0.0001
        gate = asyncio.Semaphore(24)
        num_whole = 0

        async def one(i: int) -> None:
            nonlocal num_whole
            length = rng.choice([1, S - 1, S, S + 1, rng.randint(1, 80)])
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.randint(1, 40)
            )
            request = r.request(prompt_of(length, seed=rng.randint(0, 30)), sampling=sampling)
            with_prefill = rng.random() < 0.5
            quits_s = rng.random() * 0.05 if rng.random() < 0.4 else None
            async with gate:
                task = r.start(request, expect_prefill=with_prefill)
                if with_prefill:
                    await play_prefill(r, request, rng)
                if quits_s is not None:
                    await asyncio.wait({task}, timeout=quits_s)
                    await cancel(task)
                    return
                answer = await task
                assert answer.finished.reason is not FinishReason.ABORT
                num_whole += 1

        await asyncio.gather(*(one(i) for i in range(500)))
        assert num_whole > 250
        assert r.counter("num_pages_evicted") > 0
        await after_abort(r)


async def play_prefill(r: Rig, request: object, rng: random.Random) -> None:
    """A prefill leg that publishes all, some or nothing, and says so in any order."""
    prefill = r.prefill_of(request)  # type: ignore[arg-type]
    kind = rng.randrange(4)
    if kind == 0:
        await r.tell(prefill.says(failed=True))
        return
    num_pages = len(prefill.identities)
    steps: list[Callable[[], object]] = [lambda: r.tell(prefill.says_first())]
    pages = range(num_pages) if kind > 1 else range(rng.randrange(num_pages + 1))
    steps.append(lambda: prefill.publish(pages))
    rng.shuffle(steps)
    for step in steps:
        await step()  # type: ignore[misc]
    await r.tell(prefill.says(published=len(pages) == num_pages))
