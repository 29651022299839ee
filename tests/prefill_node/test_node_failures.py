"""Engine failures, shutdown and events: what breaks, breaks alone."""

from __future__ import annotations

import asyncio

import pytest

from engine.request import FirstToken
from kvstore.event_feed import WATCHERS_MAX
from kvstore.events import (
    BATCHES_MAX,
    AllPagesCleared,
    ClearCache,
    KvEventBatch,
    PagesRemoved,
    PagesStored,
    WatchKvEvents,
)
from kvstore.keys import namespace_of, page_keys
from kvstore.page import PageKey
from prefill_node.config import ENGINE_FAILURES_MAX
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


class Mirror:
    """What a router knows of the node, from its events alone."""

    def __init__(self) -> None:
        self.keys: dict[PageKey, None] = {}
        self.seq = -1

    def take(self, batch: KvEventBatch) -> None:
        if batch.snapshot:
            self.keys.clear()
        else:
            assert batch.seq == self.seq + 1, "a gap"
        self.seq = batch.seq
        for event in batch.events:
            match event:
                case PagesStored(keys):
                    self.keys.update(dict.fromkeys(keys))
                case PagesRemoved(keys):
                    for key in keys:
                        del self.keys[key]
                case AllPagesCleared():
                    self.keys.clear()


async def test_events_mirror_the_cache_exactly() -> None:
    async with rig(num_pages=12) as r:
        await r.prefill(prompt_of(48, seed=99))
        mirror = Mirror()
        stream = r.node._loop.feed.watch(WatchKvEvents(), caller())

        async def follow() -> None:
            async for batch in stream:
                mirror.take(batch)

        task = asyncio.create_task(follow())
        for seed in range(12):
            await r.prefill(prompt_of(64, seed=seed))
            await asyncio.sleep(0.001)
        cached = r.node.gauges()["num_cached_pages"]
        assert len(mirror.keys) == cached
        spec = r.runner.info.spec
        last = page_keys(namespace_of("fake", spec), prompt_of(64, seed=11), PAGE_SIZE)
        assert all(key in mirror.keys for key in last)
        await r.node.clear_cache(ClearCache(), caller())
        await asyncio.sleep(0.001)
        assert not mirror.keys
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert r.node._loop.feed.num_watchers == 0


async def test_a_subscriber_that_stalled_too_long_gets_a_snapshot_and_the_drop_is_counted() -> None:
    async with rig(num_pages=12) as r:
        stream = r.node._loop.feed.watch(WatchKvEvents(), caller())
        mirror = Mirror()
        mirror.take(await anext(stream))
        log = r.node._loop.log
        for i in range(BATCHES_MAX + 5):
            log.record(stored=[PageKey(i.to_bytes(32, "little"))])
        batch = await anext(stream)
        assert batch.snapshot
        mirror.take(batch)
        assert len(mirror.keys) == BATCHES_MAX + 5
        assert r.node.counters()["num_event_resyncs"] == 1
        log.clear()
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_stalled_subscriber_does_not_hold_up_the_node() -> None:
    async with rig() as r:
        stream = r.node._loop.feed.watch(WatchKvEvents(), caller())
        await anext(stream)  # and never again
        for seed in range(5):
            assert (await r.prefill(prompt_of(48, seed=seed))).done.published
        await stream.aclose()  # type: ignore[attr-defined]


async def test_subscribers_are_bounded() -> None:
    async with rig() as r:
        streams = [
            r.node._loop.feed.watch(WatchKvEvents(), caller()) for _ in range(WATCHERS_MAX + 1)
        ]
        for stream in streams[:-1]:
            await anext(stream)
        with pytest.raises(RemoteFailed, match="subscribers"):
            await anext(streams[-1])
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
