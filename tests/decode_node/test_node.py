"""The node as a process: contract, health, engine failures, drain, close, events, streams."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from engine.request import DecodeRequest, Finished, FinishReason, PromptReady, TokensOut
from kvstore.events import ClearCache, GetStats, WatchKvEvents
from tests.decode_node.harness import (
    GREEDY,
    S,
    caller,
    failure_of,
    keys_of,
    pack,
    prompt_of,
    reference,
    rig,
)
from tests.kvstore.memory import MemoryStore
from tests.kvstore.vllm_events import VllmMirror

LONG = msgspec.structs.replace(GREEDY, max_tokens=300)


async def test_the_node_joins_with_its_contract_and_labels() -> None:
    async with rig(num_pages=33) as r:
        info = r.membership.info
        assert info is not None
        assert info.contract == {**r.store.spec.describe(), "fingerprint": "fake", "model": "fake"}
        assert r.network.hello is not None
        assert r.network.hello.contract == info.contract
        assert info.labels["num_pages"] == "32"
        assert info.labels["eos_token_ids"] == "257"
        assert {"max_model_len", "vocab_size", "device", "pid", "page_nbytes"} <= set(info.labels)
        assert r.membership.status is not None
        gauges = r.membership.status().gauges
        assert {"num_running", "num_waiting", "num_tokens_waiting", "num_pages"} <= set(gauges)
        assert gauges["num_free_pages"] == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": b""},
        {"prompt": b"\x01\x00\x00"},
        {"prompt": pack([1, 5000])},
        {"prompt": pack([-1])},
        {"emitted": pack([259])},
        {"sampling": msgspec.structs.replace(GREEDY, max_tokens=0)},
    ],
)
async def test_a_bad_request_is_refused_and_nothing_is_allocated(
    changes: dict[str, object],
) -> None:
    async with rig() as r:
        request = msgspec.structs.replace(r.request(prompt_of(5)), **changes)
        error = await failure_of(r.events(request))
        assert error.code == "invalid_request"
        assert r.counter("num_requests") == 0
        assert not r.runner.steps


async def test_a_step_that_fails_fails_its_requests_and_no_others() -> None:
    async with rig() as r:
        await r.answer(r.request(prompt_of(4 * S)))
        r.runner.failures.append(RuntimeError("out of memory"))
        error = await failure_of(r.events(r.request(prompt_of(4 * S + 9))))
        assert error.code == "engine_failed"
        assert "out of memory" in error.message
        assert r.node.healthy
        await r.settled()
        answer = await r.answer(r.request(prompt_of(4 * S + 9)))
        assert answer.finished.cached_local_tokens == 4 * S


async def test_an_engine_that_always_fails_makes_the_node_unhealthy_until_it_works() -> None:
    async with rig() as r:
        for _ in range(3):
            r.runner.failures.append(RuntimeError("broken"))
            await failure_of(r.events(r.request(prompt_of(5))))
        assert not r.node.healthy
        await r.answer(r.request(prompt_of(5)))
        assert r.node.healthy


async def test_a_consumer_that_sleeps_gets_all_its_tokens_in_one_item() -> None:
    async with rig() as r:
        stream = r.events(r.request(prompt_of(5), sampling=LONG))
        assert isinstance(await anext(stream), PromptReady)
        first = await anext(stream)
        assert isinstance(first, TokensOut)
        await r.answer(r.request(prompt_of(9), sampling=LONG))  # meanwhile others are served
        await r.until(lambda: r.gauge("num_running") == 0)
        rest = await anext(stream)
        assert isinstance(rest, TokensOut)
        assert len(first.outputs) + len(rest.outputs) == 300
        assert isinstance(await anext(stream), Finished)
        await stream.aclose()  # type: ignore[attr-defined]


async def test_finished_does_not_wait_for_a_slow_store() -> None:
    async with rig(final_write_back_s=0.02) as r:
        r.store.faults.put_delay_s = 1.0
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await r.answer(r.request(prompt_of(20)))
        assert loop.time() - began_s < 0.8
        assert answer.finished.pages_pushed == 0
        await r.settled()
        assert len(r.store.pages) == 2, "the put went on in the background"


async def test_a_store_that_takes_nothing_costs_only_counters() -> None:
    async with rig() as r:
        r.store.faults.refuse_puts = True
        answer = await r.answer(r.request(prompt_of(40)))
        assert answer.finished.pages_pushed == 0
        assert r.counter("num_write_back_refused") == 3


async def test_drain_lets_running_requests_end_and_refuses_new_ones() -> None:
    async with rig() as r:
        task = r.start(r.request(prompt_of(5), sampling=LONG), expect_prefill=False)
        await r.until(lambda: r.counter("num_tokens") > 1)
        drain = asyncio.create_task(r.node.drain(20.0))
        await asyncio.sleep(0)
        assert r.node.status().draining
        error = await failure_of(r.events(r.request(prompt_of(5))))
        assert error.code == "draining"
        assert (await task).finished.reason is FinishReason.LENGTH
        await drain


async def test_drain_hands_over_what_does_not_end_in_time() -> None:
    store = None
    async with rig() as r:
        store = r.store
        request = r.request(prompt_of(2 * S + 3), sampling=LONG)
        task = r.start(request, expect_prefill=False)
        waiting = r.request(prompt_of(30, seed=4))
        pulling = r.start(waiting)
        await r.until(lambda: r.counter("num_tokens") > 20)
        await r.node.drain(0.0)
        answer = await task
        assert answer.finished.reason is FinishReason.ABORT
        assert (await pulling).finished.reason is FinishReason.ABORT
    async with rig(store=store) as other:
        emitted = answer.tokens
        rest = await other.answer(
            other.request(prompt_of(2 * S + 3), sampling=LONG, emitted=pack(emitted))
        )
        assert emitted + rest.tokens == [o.token for o in reference(request)]
        assert rest.finished.computed_tokens <= 1, "all pages were in the store"


async def test_close_ends_open_streams_and_is_idempotent() -> None:
    async with rig() as r:
        task = r.start(r.request(prompt_of(5), sampling=LONG), expect_prefill=False)
        pulling = r.start(r.request(prompt_of(40)))
        await r.until(lambda: r.counter("num_tokens") > 1)
        await r.node.close()
        await r.node.close()
        assert (await task).finished.reason is FinishReason.ABORT
        assert (await pulling).finished.reason is FinishReason.ABORT
        assert not r.node.healthy


async def test_abort_stops_at_once_and_fails_open_streams() -> None:
    async with rig() as r:
        failing = asyncio.create_task(
            failure_of(r.events(r.request(prompt_of(40)), expect_prefill=True))
        )
        await r.until(lambda: r.gauge("num_pulling") == 1)
        r.node.abort()
        r.node.abort()
        assert (await failing).code == "closed"


async def test_a_dead_step_loop_turns_health_red() -> None:
    async with rig() as r:
        assert r.node.healthy
        r.node._loop.abort()
        await asyncio.sleep(0)
        assert not r.node.healthy


async def test_an_idle_node_runs_nothing() -> None:
    async with rig() as r:
        await r.answer(r.request(prompt_of(5)))
        await r.settled()
        await asyncio.sleep(0.01)  # the last wake-up of the last request
        loop = asyncio.get_running_loop()
        turns = 0

        def count_turn() -> None:
            nonlocal turns
            turns += 1

        r.node._loop._on_turn = count_turn
        await asyncio.sleep(0.05)
        assert turns == 0
        assert not [h for h in getattr(loop, "_scheduled", []) if not h.cancelled()]


async def test_events_follow_the_cache() -> None:
    async with rig() as r:
        await r.answer(r.request(prompt_of(2 * S)))
        stream = r.node.service().streams[WatchKvEvents](WatchKvEvents(), caller())
        async with contextlib.aclosing(stream) as parts:  # type: ignore[type-var]
            snapshot = await anext(parts)
            keys = keys_of(r.store.spec, prompt_of(2 * S))
            assert snapshot.unpacked() == keys
            assert snapshot.next_seq == len(r.network.publisher().sent)
            await r.answer(r.request(prompt_of(S, seed=5)))
        router = VllmMirror()
        for sent in r.network.publisher().sent:
            router.take(sent)
        more = keys_of(r.store.spec, prompt_of(S, seed=5))
        assert list(router.pages) == [*keys, *more]
        assert router.pages[keys[0]] == (None, tuple(prompt_of(2 * S)[:S]))
        assert router.pages[keys[1]] == (keys[0], tuple(prompt_of(2 * S)[S:]))


async def test_clear_cache_forgets_pages_and_running_requests_go_on() -> None:
    async with rig() as r:
        running = r.start(r.request(prompt_of(3 * S), sampling=LONG), expect_prefill=False)
        await r.until(lambda: r.counter("num_tokens") > 20)
        cleared = await r.node.clear_cache(ClearCache(), caller())
        assert cleared.num_pages >= 3
        r.node.check()
        assert len((await running).outputs) == 300
        reply = await r.node.get_stats(GetStats(), caller())
        assert reply.healthy
        assert reply.counters["num_tokens"] == 300


async def test_a_long_prompt_is_hashed_off_the_loop() -> None:
    async with rig(num_pages=600) as r:
        answer = await r.answer(r.request(prompt_of(5000)))
        assert answer.finished.computed_tokens == 5000
        again = await r.answer(r.request(prompt_of(5000)))
        assert again.finished.cached_local_tokens >= 5000 // S * S


async def test_two_nodes_share_by_the_store() -> None:
    async with rig() as first:
        await first.answer(first.request(prompt_of(6 * S)))
        async with rig(store=first.store) as second:
            answer = await second.answer(second.request(prompt_of(6 * S)))
            assert answer.finished.cached_store_tokens == 6 * S


async def test_the_decode_handler_matches_its_message() -> None:
    async with rig() as r:
        handlers = r.node.service().streams
        request = DecodeRequest(request=r.request(prompt_of(5)), expect_prefill=False)
        events = [event async for event in handlers[DecodeRequest](request, caller())]
        assert isinstance(events[-1], Finished)
        assert isinstance(r.store, MemoryStore)
