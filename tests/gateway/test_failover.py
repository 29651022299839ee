"""Claims about failover: a leg may be lost at any point; the client's tokens stay exact."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.fake_node import Fault, alphabet_reply, unpacked
from tests.gateway.fakes import PROMPT, FakeCluster, collect, wait_for
from transfer.errors import PeerLost, RemoteFailed
from transfer.identity import Role

LOST = [
    PeerLost("gone"),
    RemoteFailed("overloaded", "busy"),
    RemoteFailed("draining", "leaving"),
    RemoteFailed("internal", "bug"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
async def test_a_lost_prefill_leg_is_tried_on_another_node(error: Exception) -> None:
    async with FakeCluster(num_prefill=2).running() as cluster:
        for at in range(2):
            cluster.p(at).faults = [Fault(0, error)] if at == 0 else []
        for _ in range(2):  # rotation: one of them meets the fault
            tokens, done = await collect(cluster)
            assert tokens == alphabet_reply(PROMPT)[:8]
        assert cluster.p(0).faults == []
        assert done.trace.prefill_node in ("p0", "p1")
        assert not any(update.failed for update in cluster.d().updates)


async def test_when_all_prefill_nodes_fail_decode_computes_the_prompt() -> None:
    async with FakeCluster(num_prefill=2).running() as cluster:
        for at in range(2):
            cluster.p(at).faults = [Fault(0, PeerLost("gone"))]
        tokens, done = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert [u for u in cluster.d().updates if u.failed]
        assert done.trace.prefill_node is None
        assert done.trace.num_prefill_legs == 2


async def test_prefill_lost_while_pushing_is_told_and_the_token_stays() -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().faults = [Fault(1, PeerLost("gone"))]
        cluster.d().gate.clear()
        task = asyncio.create_task(collect(cluster))
        await wait_for(lambda: any(u.published is False for u in cluster.d().updates))
        cluster.d().gate.set()
        tokens, _ = await task
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert cluster.d().updates[-1].first_token is not None


@pytest.mark.parametrize("at", range(6))
async def test_decode_lost_at_any_token_continues_elsewhere(at: int) -> None:
    async with FakeCluster(num_decode=2).running() as cluster:
        for node in (cluster.d(0), cluster.d(1)):
            node.faults = [Fault(at, PeerLost("gone"))]
        cluster.d(1).faults = []
        for _ in range(2):
            tokens, _ = await collect(cluster)
            assert tokens == alphabet_reply(PROMPT)[:8]
        assert cluster.d(0).faults == []
        assert cluster.dispatcher.stats.decode_failovers == 1
        last = cluster.d(1).decode_requests
        assert any(unpacked(r.request.emitted) or r.expect_prefill for r in last)


async def test_kill_the_decode_node_mid_stream_and_wait_for_another() -> None:
    async with FakeCluster().running() as cluster:
        cluster.d().token_gate = asyncio.Semaphore(3)
        task = asyncio.create_task(collect(cluster))
        await wait_for(lambda: cluster.dispatcher.stats.output_tokens == 4)
        cluster.remove("d0")
        await cluster.settle()
        assert not task.done(), "a running request waits for capacity"
        cluster.add(Role.DECODE, "d9")
        cluster.show()
        tokens, done = await task
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert unpacked(cluster.nodes["d9"].requests[0].emitted) == tokens[:4]
        assert done.trace.decode_node == "d9"


async def test_a_decode_restart_before_the_first_token_still_uses_prefill() -> None:
    async with FakeCluster().running() as cluster:
        cluster.p().gate.clear()
        task = asyncio.create_task(collect(cluster))
        await wait_for(lambda: bool(cluster.d().requests))
        cluster.d().kill()
        cluster.add(Role.DECODE, "d0")
        cluster.show()
        await wait_for(lambda: bool(cluster.d().requests))
        cluster.p().gate.set()
        tokens, _ = await task
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert cluster.d().decode_requests[0].expect_prefill


async def test_a_new_decode_leg_waits_for_pages_still_being_pushed() -> None:
    async with FakeCluster(num_decode=2).running() as cluster:
        cluster.p().push_gate.clear()
        for node in (cluster.d(0), cluster.d(1)):
            node.faults = [Fault(1, PeerLost("gone"))]
            node.gate.clear()
        task = asyncio.create_task(collect(cluster))
        await wait_for(lambda: bool(cluster.d(0).updates or cluster.d(1).updates))
        first = next(n for n in (cluster.d(0), cluster.d(1)) if n.updates)
        other = next(n for n in (cluster.d(0), cluster.d(1)) if n is not first)
        other.faults = []
        for node in (first, other):
            node.gate.set()
        tokens, _ = await task
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert other.decode_requests[0].expect_prefill
        assert not other.decode_requests[0].request.emitted


async def test_news_is_told_again_until_decode_knows_the_request() -> None:
    async with FakeCluster().running() as cluster:
        cluster.d().bad_acks = 3
        tokens, _ = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert cluster.d().bad_acks == 0


@pytest.mark.parametrize("at", [2, 3, 6])
async def test_cached_tokens_are_of_the_leg_that_made_the_first_token(at: int) -> None:
    """Decode alone, then another decode node that finds other things cached."""
    async with FakeCluster(num_prefill=0, num_decode=2).running() as cluster:
        found = {"d0": 16, "d1": 32}
        fault = [Fault(at, PeerLost("gone"))]  # of whichever comes first, once
        for node in (cluster.d(0), cluster.d(1)):
            node.cached_store = found[node.name]
            node.faults = fault
        tokens, done = await collect(cluster)
        first, other = sorted(
            (cluster.d(0), cluster.d(1)), key=lambda node: node.requests[0].num_emitted_tokens
        )
        assert tokens == alphabet_reply(PROMPT)[:8]
        assert other.requests[0].num_emitted_tokens == at - 1
        assert done.trace.cached_tokens(len(PROMPT)) == found[first.name]
        both = [len(PROMPT) - found[node.name] for node in (first, other)]
        assert done.trace.computed_tokens == sum(both)


async def test_decode_abort_moves_the_request() -> None:
    async with FakeCluster(num_decode=2).running() as cluster:
        for node in (cluster.d(0), cluster.d(1)):
            node.faults = [Fault(3, RemoteFailed("draining", "leaving"))]
        tokens, _ = await collect(cluster)
        assert tokens == alphabet_reply(PROMPT)[:8]
