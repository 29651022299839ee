"""Claims about clients that leave: both legs stop, at any moment, streamed or not."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.gateway.fake_node import text_reply
from tests.gateway.fakes import FakeCluster, wait_for
from tests.gateway.http import COMPLETIONS, RawCall, app_of


def body_of(stream: bool, **fields: object) -> bytes:
    body = {"model": "fake", "prompt": "hello", "stream": stream, "max_tokens": 1000, **fields}
    return json.dumps(body).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "in the middle"])
async def test_leaving_stops_both_legs(stream: bool, when: str) -> None:
    cluster = FakeCluster()
    async with cluster.running():
        prefill, decode = cluster.p(), cluster.d()
        prefill.push_gate.clear()
        decode.token_gate = asyncio.Semaphore(3)
        if when == "before the first token":
            prefill.gate.clear()
        call = RawCall(app_of(cluster), COMPLETIONS, body_of(stream))
        task = asyncio.create_task(call.run())
        await wait_for(lambda: bool(prefill.open_streams and decode.open_streams))
        if when == "in the middle":
            await wait_for(lambda: cluster.dispatcher.stats.output_tokens == 4)
        call.gone.set()
        await wait_for(lambda: not prefill.open_streams and not decode.open_streams, 1.0)
        await task
        assert cluster.dispatcher.stats.cancelled == 1


async def test_leaving_stops_all_choices() -> None:
    cluster = FakeCluster()
    async with cluster.running():
        cluster.d().token_gate = asyncio.Semaphore(5)
        call = RawCall(app_of(cluster), COMPLETIONS, body_of(True, n=4))
        task = asyncio.create_task(call.run())
        await wait_for(lambda: len(cluster.d().open_streams) == 4)
        call.gone.set()
        await task
        await wait_for(lambda: not cluster.d().open_streams, 1.0)


async def test_leaving_at_200_random_moments_returns_to_baseline() -> None:
    rng = random.Random(3)
    cluster = FakeCluster(num_prefill=2, num_decode=2, reply=text_reply("hello world"))
    async with cluster.running():
        app = app_of(cluster)
        for _ in range(200):
            call = RawCall(app, COMPLETIONS, body_of(rng.random() < 0.5, n=rng.choice([1, 2])))
            task = asyncio.create_task(call.run())
            for _ in range(rng.randrange(120)):
                await asyncio.sleep(0)
            call.gone.set()
            await task
        nodes = cluster.nodes.values()
        await wait_for(lambda: not any(node.open_streams for node in nodes), 1.0)
        assert cluster.dispatcher.stats.num_in_flight == 0


async def test_an_abort_touches_no_other_request_whose_id_begins_alike() -> None:
    cluster = FakeCluster()
    async with cluster.running():
        app = app_of(cluster)
        gate = cluster.d().token_gate = asyncio.Semaphore(0)
        leaving = RawCall(app, COMPLETIONS, body_of(True, n=1))
        staying = RawCall(app, COMPLETIONS, body_of(True, n=12, max_tokens=3))
        tasks = [asyncio.create_task(call.run()) for call in (leaving, staying)]
        await wait_for(lambda: len(cluster.d().open_streams) == 13)
        leaving.gone.set()
        await tasks[0]
        assert len(cluster.d().open_streams) == 12, "ids ...-1 and ...-10, -11 are not alike"
        for _ in range(100):
            gate.release()
        await tasks[1]
        assert staying.text.count('"finish_reason":"length"') == 12


async def test_leaving_while_the_body_is_sent_ends_quietly() -> None:
    cluster = FakeCluster()
    async with cluster.running():
        call = RawCall(app_of(cluster), COMPLETIONS, body_of(True), chunk=10)
        task = asyncio.create_task(call.run())
        call._parts = []
        call.gone.set()
        await task
        assert cluster.p().requests == []
