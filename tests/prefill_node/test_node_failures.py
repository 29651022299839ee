"""Engine failures, shutdown and events: what breaks, breaks alone."""

from __future__ import annotations

import asyncio

import pytest

from engine.request import FirstToken
from kvstore.events import (
    EVENTS_LABEL,
    REPLAY_LABEL,
    WATCHERS_MAX,
    ClearCache,
    EventCounters,
    KvEventConsumer,
    WatchKvEvents,
)
from kvstore.events.wire import decode_batch, epoch_of
from kvstore.keys import namespace_of, page_keys
from prefill_node.config import ENGINE_FAILURES_MAX
from tests.kvstore.event_sink import Held
from tests.kvstore.vllm_events import VllmMirror
from tests.prefill_node.harness import PAGE_SIZE, caller, prompt_of, rig
from transfer.errors import RemoteFailed


async def test_a_step_that_raises_fails_its_requests_and_nothing_else() -> None:
    async with rig(num_pages=12) as r:
        await r.prefill(prompt_of(40, seed=1))
        r.runner.failures = [RuntimeError("device lost")]
        with pytest.raises(RemoteFailed, match="device lost") as caught:
            await r.prefill(prompt_of(40, seed=2))
        assert caught.value.code == "engine_failed"
        assert r.node.healthy
        await r.settled()
        answer = await r.prefill(prompt_of(40, seed=2))
        assert answer.first.computed_tokens == 40
        assert r.node.counters()["num_step_failures"] == 1


async def test_steps_that_keep_failing_turn_health_red_and_one_success_turns_it_back() -> None:
    async with rig() as r:
        r.runner.failures = [RuntimeError("x")] * ENGINE_FAILURES_MAX
        for i in range(ENGINE_FAILURES_MAX):
            assert r.node.healthy
            with pytest.raises(RemoteFailed):
                await r.prefill(prompt_of(20, seed=i))
        assert not r.node.healthy
        await r.prefill(prompt_of(20))
        assert r.node.healthy


async def test_a_loop_that_dies_answers_everybody_and_turns_health_red() -> None:
    async with rig() as r:

        def broken_plan() -> None:
            raise AssertionError("broken")

        r.node._loop.scheduler.plan = broken_plan  # type: ignore[method-assign,assignment]
        with pytest.raises(RemoteFailed, match="loop died"):
            await r.prefill(prompt_of(20))
        assert not r.node.healthy
        with pytest.raises(RemoteFailed) as caught:
            await r.prefill(prompt_of(20))
        assert caught.value.code == "engine_failed"


async def test_drain_lets_running_requests_end_and_refuses_new_ones() -> None:
    async with rig(step_delay_s=0.01, chunk_size=16) as r:
        running = asyncio.create_task(r.prefill(prompt_of(64)))
        await asyncio.sleep(0.005)
        draining = asyncio.create_task(r.node.drain(timeout_s=5))
        await asyncio.sleep(0)
        assert r.node.status().draining
        with pytest.raises(RemoteFailed) as caught:
            await r.prefill(prompt_of(5))
        assert caught.value.code == "draining"
        assert (await running).done.published
        await draining


async def test_drain_fails_what_does_not_end_in_time() -> None:
    async with rig() as r:
        r.store.faults.put_delay_s = 1.0
        task = asyncio.create_task(r.prefill(prompt_of(64)))
        await asyncio.sleep(0.01)
        await r.node.drain(timeout_s=0.02)
        with pytest.raises(RemoteFailed, match="retry elsewhere"):
            await task
        r.store.faults.put_delay_s = 0.0


@pytest.mark.parametrize("moment_s", [0.0, 0.003, 0.012, 0.03])
async def test_close_at_any_moment_answers_and_leaves_the_books_right(moment_s: float) -> None:
    async with rig(step_delay_s=0.005, chunk_size=16) as r:
        r.store.faults.put_delay_s = 0.01
        tasks = [asyncio.create_task(r.prefill(prompt_of(64, seed=i))) for i in range(3)]
        await asyncio.sleep(moment_s)
        await r.node.close()
        await r.node.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(x, RemoteFailed) or hasattr(x, "first") for x in results)
        assert not r.node.healthy


async def test_abort_is_synchronous_and_idempotent() -> None:
    async with rig() as r:
        stream = r.stream(prompt_of(64))
        assert isinstance(await anext(stream), FirstToken)
        r.node.abort()
        r.node.abort()
        await stream.aclose()  # type: ignore[attr-defined]
        assert not r.node.healthy


# ── KV events ───────────────────────────────────────────────────────────────────────────────────


async def test_events_on_the_wire_mirror_the_cache_exactly() -> None:
    async with rig(num_pages=12) as r:
        publisher = r.network.publisher()
        router = VllmMirror()
        for seed in range(12):
            await r.prefill(prompt_of(64, seed=seed))
        for parts in publisher.sent:
            router.take(parts)
        assert len(router.pages) == r.node.gauges()["num_cached_pages"] > 0
        tokens = prompt_of(64, seed=11)
        keys = page_keys(namespace_of("fake", r.runner.info.spec), tokens, PAGE_SIZE)
        pages = [tuple(tokens[at : at + PAGE_SIZE]) for at in range(0, 64, PAGE_SIZE)]
        for key, parent, page in zip(keys, [None, *keys], pages, strict=False):
            assert router.pages[key] == (parent, page)
        await r.node.clear_cache(ClearCache(), caller())
        router.take(publisher.sent[-1])
        assert not router.pages


async def test_a_snapshot_and_what_follows_it_mirror_the_cache() -> None:
    async with rig(num_pages=12) as r:
        await r.prefill(prompt_of(48, seed=99))
        stream = r.node._loop.events.watch(WatchKvEvents(), caller())
        part, end = await anext(stream), await anext(stream)
        assert (part.last, end.last) == (False, True)
        sink, counters = Held(), EventCounters()
        consumer = KvEventConsumer(sink, counters)
        consumer.snapshot(part.epoch, part.next_seq, part.unpacked())
        for seed in range(12):
            await r.prefill(prompt_of(64, seed=seed))
        for topic, seq, payload in r.network.publisher().sent:
            consumer.live(epoch_of(topic), int.from_bytes(seq, "big"), decode_batch(payload))
        assert counters.num_gaps == counters.num_restarts == 0
        assert sink.keys == set(r.node._loop.log.held())
        await stream.aclose()  # type: ignore[attr-defined]
        assert r.node._loop.events.num_watchers == 0
        assert r.node.counters()["num_event_snapshots"] == 1


async def test_the_labels_say_where_events_are_published() -> None:
    async with rig() as r:
        publisher = r.network.publisher()
        assert r.membership.info is not None
        labels = r.membership.info.labels
        assert labels[EVENTS_LABEL] == publisher.address
        assert labels[REPLAY_LABEL] == publisher.replay_address


async def test_a_node_that_is_closed_publishes_nothing_more() -> None:
    async with rig() as r:
        assert r.network.hub.publishers
        await r.node.close()
        assert not r.network.hub.publishers


async def test_a_stalled_subscriber_does_not_hold_up_the_node() -> None:
    async with rig() as r:
        stream = r.node._loop.events.watch(WatchKvEvents(), caller())
        await anext(stream)  # and never again
        for seed in range(5):
            assert (await r.prefill(prompt_of(48, seed=seed))).done.published
        await stream.aclose()  # type: ignore[attr-defined]


async def test_subscribers_are_bounded() -> None:
    async with rig() as r:
        streams = [
            r.node._loop.events.watch(WatchKvEvents(), caller()) for _ in range(WATCHERS_MAX + 1)
        ]
        for stream in streams[:-1]:
            await anext(stream)
        with pytest.raises(RemoteFailed, match="subscribers"):
            await anext(streams[-1])
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
