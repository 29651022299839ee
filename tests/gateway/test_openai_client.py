"""The OpenAI Python client against the app on a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.gateway.fake_node import Fault, text_reply
from tests.gateway.fakes import FakeCluster, wait_for
from tests.gateway.http import served
from transfer.errors import RemoteFailed


@asynccontextmanager
async def client_of(cluster: FakeCluster, **config: object) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(cluster, **config) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_chat_and_completions_streamed_and_not() -> None:
    async with client_of(FakeCluster(reply=text_reply("hello 🎉"))) as client:
        chat = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            logprobs=True,
            top_logprobs=2,
        )
        assert chat.choices[0].message.content == "hello 🎉"
        assert chat.choices[0].logprobs is not None
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "hello 🎉"
        assert chunks[-1].usage is not None
        assert chunks[-2].choices[0].finish_reason == "stop"
        completion = await client.completions.create(model="fake", prompt="x", echo=True)
        assert completion.choices[0].text == "xhello 🎉"
        pieces = await client.completions.create(model="fake", prompt=[1, 2], stream=True)
        assert "".join([p.choices[0].text async for p in pieces]) == "hello 🎉"
        models = await client.models.list()
        assert [m.id for m in models.data] == ["fake"]
        assert (await client.models.retrieve("fake")).owned_by == "kvferry"


async def test_errors_are_the_clients_own_exceptions() -> None:
    async with client_of(FakeCluster(num_decode=0)) as client:
        with pytest.raises(openai.NotFoundError, match="fake"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="fake", prompt="x", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.completions.create(model="fake", prompt="x", max_tokens=5)
        assert unavailable.value.status_code == 503
        assert unavailable.value.response.headers["retry-after"]


async def test_an_error_in_a_stream_raises_in_the_client() -> None:
    cluster = FakeCluster()
    bug = RemoteFailed("internal", "bug")
    cluster.d().faults = [Fault(2, bug)] + [Fault(1, bug)] * 20
    async with client_of(cluster) as client:
        stream = await client.completions.create(model="fake", prompt="x", stream=True)
        seen: list[str] = []

        async def read() -> None:
            async for piece in stream:
                seen.append(piece.choices[0].text)

        with pytest.raises(openai.APIError, match="failed without giving a token"):
            await read()
        assert len("".join(seen)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_socket_stops_both_legs(stream: bool) -> None:
    cluster = FakeCluster()
    async with client_of(cluster) as client:
        cluster.p().push_gate.clear()
        cluster.d().token_gate = asyncio.Semaphore(2)
        task = asyncio.ensure_future(
            client.completions.create(model="fake", prompt="x", max_tokens=500, stream=stream)
        )
        await wait_for(lambda: cluster.dispatcher.stats.output_tokens == 3)
        if stream:
            answer: Any = await task
            await answer.response.aclose()
        else:
            task.cancel()
            await asyncio.wait([task])
        await wait_for(lambda: not (cluster.p().open_streams or cluster.d().open_streams), 1.0)


async def test_sixty_four_streams_at_once_are_each_complete() -> None:
    async with client_of(FakeCluster(reply=text_reply("0123456789" * 5))) as client:

        async def ask(at: int) -> str:
            stream = await client.completions.create(
                model="fake", prompt=f"p{at}", stream=True, max_tokens=200
            )
            return "".join([p.choices[0].text async for p in stream])

        answers = await asyncio.gather(*(ask(at) for at in range(64)))
        assert answers == ["0123456789" * 5] * 64


async def test_the_cost_of_a_streamed_token_is_small() -> None:
    """The gateway's own work per token (routing, rendering, encoding), without socket and node."""
    import json

    from tests.gateway.http import COMPLETIONS, RawCall, app_of

    count = 1500
    cluster = FakeCluster()
    async with cluster.running():
        body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": count}
        best = float("inf")
        for _ in range(3):
            call = RawCall(app_of(cluster), COMPLETIONS, json.dumps(body).encode())
            start = time.process_time()
            await call.run()
            best = min(best, (time.process_time() - start) / count)
            assert call.text.count("data: ") == count + 1
        assert best < 400e-6, f"{best * 1e6:.0f} µs per token, the fake node's share included"
