"""Claims about the dispatcher: both legs, failover, cancellation, facts, refusal."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from engine.request import FinishReason
from gateway.errors import (
    GenerationFailed,
    InvalidRequest,
    NoCapacity,
    TimedOut,
    TooManyRequests,
)
from gateway.router import Query
from gateway.trace import GenerationTrace
from tests.gateway.fake_node import (
    EOS,
    Fault,
    alphabet_reply,
    keys_of,
    request_of,
    text_reply,
)
from tests.gateway.fakes import FAST, PROMPT, FakeCluster, collect, wait_for
from transfer.errors import RemoteFailed
from transfer.identity import Role
from transfer.interface import deadline_after


async def test_both_legs_start_at_once_and_the_tokens_are_the_references() -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().gate.clear()
        task = asyncio.create_task(collect(cluster))
        await wait_for(lambda: bool(cluster.d().requests and cluster.p().requests))
        cluster.p().gate.set()
        tokens, done = await task
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert done.reason is FinishReason.LENGTH
        assert [u.first_token is not None for u in cluster.d().updates][-1]
        assert cluster.d().decode_requests[0].expect_prefill


async def test_the_first_token_does_not_wait_for_the_push() -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().push_gate.clear()
        cluster.d().gate.clear()
        generation: Any = cluster.dispatcher.generate(
            request_of(PROMPT), deadline_s=deadline_after(5.0)
        )
        async with aclosing(generation) as items:
            first = await anext(items)
            assert first.token == alphabet_reply(PROMPT)[0]


async def test_facts_of_both_legs_are_merged() -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().cached_local, cluster.p().cached_store = 16, 16
        _, done = await collect(cluster, trace=GenerationTrace(wanted=True))
        trace = done.trace
        assert (trace.prefill_node, trace.decode_node) == ("p0", "d0")
        assert trace.transport == "fake"
        assert (trace.computed_tokens, trace.cached_local, trace.cached_store) == (8, 16, 16)
        assert (trace.pages_pushed, trace.bytes_pushed) == (3, 300)
        assert (trace.pages_pulled, trace.bytes_pulled) == (3, 300)
        assert trace.restored_or_recomputed == "restored"
        assert trace.ttft_s is not None


async def test_one_token_needs_no_decode_and_its_pages_are_still_pushed() -> None:
    async with FakeCluster(num_decode=0).running() as cluster:
        cluster.p().push_gate.clear()
        tokens, done = await collect(cluster, request_of(PROMPT, max_tokens=1))
        assert tokens == alphabet_reply(PROMPT)[:1]
        assert done.reason is FinishReason.LENGTH
        assert cluster.p().open_streams == ["r"], "the push goes on without the client"
        assert cluster.dispatcher.stats.num_lingering == 1
        cluster.p().push_gate.set()
        await wait_for(lambda: not cluster.p().open_streams)
        assert cluster.dispatcher.stats.num_lingering == 0


async def test_first_token_eos_ends_the_request_and_frees_decode() -> None:
    async with FakeCluster(reply=lambda prompt: [EOS]).running() as cluster:
        cluster.p().push_gate.clear()
        tokens, done = await collect(cluster)
        assert tokens == [EOS]
        assert done.reason is FinishReason.STOP
        assert cluster.d().open_streams == [], "decode has nothing to do"
        assert cluster.p().open_streams == ["r"]
        cluster.p().push_gate.set()


async def test_without_prefill_decode_serves_alone() -> None:
    async with FakeCluster(num_prefill=0).running() as cluster:
        cluster.d().cached_store = 16
        tokens, done = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert not cluster.d().decode_requests[0].expect_prefill
        assert done.trace.cached_tokens(len(PROMPT)) == 16, "counted by the leg that made token 0"
        assert cluster.dispatcher.stats.prefill_fallbacks == 1


async def test_without_a_store_decode_computes_the_prompt_and_prefill_does_not() -> None:
    async with FakeCluster(with_store=False).running() as cluster:
        tokens, _ = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert cluster.p().requests == []
        assert not cluster.d().decode_requests[0].expect_prefill


async def test_one_token_without_prefill_comes_from_decode() -> None:
    async with FakeCluster(num_prefill=0).running() as cluster:
        tokens, _ = await collect(cluster, request_of(PROMPT, max_tokens=1))
        assert tokens == alphabet_reply(PROMPT)[:1]


async def test_no_decode_node_is_no_capacity_and_nothing_is_started() -> None:
    async with FakeCluster(num_decode=0).running() as cluster:
        with pytest.raises(NoCapacity) as caught:
            await collect(cluster)
        assert caught.value.retry_after_s
        assert cluster.p().requests == []


async def test_an_unreachable_decode_node_is_no_capacity_after_a_bounded_wait() -> None:
    cluster = FakeCluster()
    cluster.d().kill()
    async with cluster.running():
        with pytest.raises(NoCapacity):
            await collect(cluster)
        assert cluster.p().requests == []


async def test_scale_to_zero_and_back_resumes() -> None:
    async with FakeCluster().running() as cluster:
        await collect(cluster)
        cluster.remove("d0")
        with pytest.raises(NoCapacity):
            await collect(cluster)
        cluster.add(Role.DECODE, "d0")
        cluster.show()
        tokens, _ = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]


async def test_draining_nodes_get_no_new_work() -> None:
    cluster = FakeCluster(num_prefill=2, num_decode=2)
    cluster.p(0).draining = cluster.d(0).draining = True
    async with cluster.running():
        for _ in range(4):
            await collect(cluster)
        assert not cluster.p(0).requests
        assert not cluster.d(0).requests


async def test_every_decode_node_overloaded_is_refused_with_retry_after() -> None:
    async with FakeCluster(num_decode=2).running() as cluster:
        for node in (cluster.d(0), cluster.d(1)):
            node.faults = [Fault(0, RemoteFailed("overloaded", "busy"))]
        cluster.p().gate.clear()
        with pytest.raises(TooManyRequests) as caught:
            await collect(cluster)
        assert caught.value.retry_after_s


async def test_decode_that_always_fails_gives_up_after_a_bounded_number_of_legs() -> None:
    async with FakeCluster(num_prefill=0).running() as cluster:
        cluster.d().faults = [Fault(0, RemoteFailed("internal", "bug")) for _ in range(50)]
        with pytest.raises(GenerationFailed):
            await collect(cluster)
        assert len(cluster.d().requests) == FAST.decode_attempts_max


async def test_a_status_that_an_earlier_view_had_is_no_report_of_load() -> None:
    async with FakeCluster().running() as cluster:
        placement, query = cluster.dispatcher.placement, Query([], 10, 16)
        seat = placement.take(Role.DECODE, query, [])
        assert seat is not None
        cluster.d().gauges = {"num_running": 1.0, "num_tokens_waiting": 10.0}
        cluster.show()  # the heartbeat counts our own leg
        placement.release(seat)
        cluster.membership.show(cluster.membership.view.members)  # another node's news
        assert placement.explain(Role.DECODE, query)[0].num_requests == 0


TOO_LONG = RemoteFailed("too_long", "too many tokens")


async def test_too_long_for_every_decode_node_is_the_clients_fault_and_ends_both_legs() -> None:
    async with FakeCluster(num_decode=2).running() as cluster:
        for node in (cluster.p(), cluster.d(0), cluster.d(1)):
            node.faults = [Fault(0, TOO_LONG)] * 8
        with pytest.raises(InvalidRequest, match="too many tokens"):
            await collect(cluster)
        assert len(cluster.d(0).requests) == len(cluster.d(1).requests) == 1
        assert not cluster.d(0).open_streams + cluster.d(1).open_streams + cluster.p().open_streams


async def test_what_a_small_node_refuses_a_larger_one_serves() -> None:
    async with FakeCluster(num_prefill=2, num_decode=2).running() as cluster:
        cluster.p(0).faults = [Fault(0, TOO_LONG)] * 8
        cluster.d(0).faults = [Fault(0, TOO_LONG)] * 8
        for _ in range(4):
            tokens, _ = await collect(cluster)
            assert tokens == alphabet_reply(PROMPT)[:8]


async def test_what_every_prefill_node_refuses_decode_computes() -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().faults = [Fault(0, TOO_LONG)] * 8
        tokens, _ = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]


async def test_the_concurrency_limit_refuses() -> None:
    config = FAST.model_copy(update={"requests_max": 1})
    async with FakeCluster(config=config).running() as cluster:
        cluster.p().gate.clear()
        task = asyncio.create_task(collect(cluster))
        await wait_for(lambda: bool(cluster.p().requests))
        with pytest.raises(TooManyRequests):
            await collect(cluster, request_of(PROMPT, request_id="s"))
        cluster.p().gate.set()
        await task


async def test_the_deadline_ends_a_request_that_hangs() -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().gate.clear()
        generation: Any = cluster.dispatcher.generate(
            request_of(PROMPT), deadline_s=deadline_after(0.05)
        )
        with pytest.raises(TimedOut):
            await anext(generation)
        assert not cluster.p().open_streams
        assert not cluster.d().open_streams


@pytest.mark.parametrize("num_taken", [0, 1, 3])
async def test_leaving_early_closes_both_legs(num_taken: int) -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().push_gate.clear()
        if not num_taken:
            cluster.p().gate.clear()
        generation: Any = cluster.dispatcher.generate(
            request_of(PROMPT), deadline_s=deadline_after(5.0)
        )
        for _ in range(num_taken):
            await anext(generation)
        if not num_taken:
            task = asyncio.ensure_future(anext(generation))
            await wait_for(lambda: bool(cluster.p().open_streams and cluster.d().open_streams))
            task.cancel()
            await asyncio.wait([task])
        await generation.aclose()
        assert not cluster.p().open_streams
        assert not cluster.d().open_streams
        assert cluster.dispatcher.stats.cancelled == 1


async def test_cancel_at_500_random_moments_leaves_nothing_behind() -> None:
    import random

    rng = random.Random(7)
    async with FakeCluster(num_prefill=2, num_decode=2, reply=text_reply("hello")).running() as c:
        for at in range(500):
            task = asyncio.create_task(collect(c, request_of(PROMPT, request_id=f"r{at}")))
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await wait_for(lambda: not any(node.open_streams for node in c.nodes.values()))
        assert c.dispatcher.stats.num_in_flight == 0
        assert c.dispatcher.placement.index.num_expected(c.p().name) == 0


async def test_closing_the_dispatcher_ends_running_requests_with_an_error() -> None:
    cluster = FakeCluster()
    async with cluster.running():
        cluster.p().gate.clear()
        task = asyncio.create_task(collect(cluster))
        await wait_for(lambda: bool(cluster.p().requests))
        await cluster.dispatcher.close()
        with pytest.raises(NoCapacity):
            await task
        with pytest.raises(NoCapacity):
            await collect(cluster)


async def test_channels_are_open_before_the_first_request() -> None:
    async with FakeCluster(num_prefill=2, num_decode=2).running() as cluster:
        connects = cluster.network.num_connects
        assert connects == 4
        await collect(cluster)
        assert cluster.network.num_connects == connects


async def test_a_node_that_refuses_at_first_is_connected_in_the_end() -> None:
    cluster = FakeCluster()
    cluster.d().refuse_connects = 3
    async with cluster.running():
        await wait_for(lambda: bool(cluster.dispatcher.placement.links.usable(Role.DECODE)))
        tokens, _ = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]


async def test_twenty_restarts_on_one_name_leave_no_old_state() -> None:
    async with FakeCluster().running() as cluster:
        for at in range(20):
            cluster.d().kill()
            cluster.add(Role.DECODE, "d0")
            cluster.show()
            tokens, _ = await collect(cluster, request_of(PROMPT, request_id=f"r{at}"))
            assert tokens == alphabet_reply(PROMPT)[:8]
        assert len(cluster.dispatcher.placement.links.of_role(Role.DECODE)) == 1
        assert cluster.dispatcher.healthy


async def test_a_node_that_leaves_or_restarts_leaves_nothing_in_the_index() -> None:
    async with FakeCluster(num_prefill=2).running() as cluster:
        index = cluster.dispatcher.placement.index
        cluster.p(0).publish(stored=keys_of(PROMPT))
        cluster.p(1).publish(stored=keys_of(PROMPT))
        await wait_for(lambda: index.num_entries == 6)
        cluster.remove("p1")
        assert (index.num_entries, index.num_nodes) == (3, 2)
        cluster.p(0).kill()
        cluster.add(Role.PREFILL, "p0")
        cluster.show()
        await wait_for(lambda: index.in_sync(cluster.p(0).name))
        assert index.num_entries == 0


async def test_a_gap_in_the_events_is_resynced_once() -> None:
    async with FakeCluster().running() as cluster:
        index, node = cluster.dispatcher.placement.index, cluster.p()
        node.publish(stored=keys_of(PROMPT)[:1])
        await wait_for(lambda: index.num_entries == 1)
        cluster.network.hub.drops = 1
        node.publish(stored=keys_of(PROMPT)[1:2])  # lost on the wire
        node.publish(stored=keys_of(PROMPT)[2:])
        await wait_for(lambda: index.num_entries == 3)
        counters = cluster.dispatcher.placement.links.event_counters
        assert (counters.num_gaps, counters.num_replayed) == (1, 2)
