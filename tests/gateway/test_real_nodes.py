"""The gateway over real prefill and decode nodes, the fake model and real ZeroMQ channels.

Every token of the fake model depends on every KV byte before it, so equal tokens mean that routing,
news and failover moved nothing wrong. Pages go through one in-process store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from engine.fake import FakeRunner, fake_generate
from engine.request import SamplingParams
from gateway.app import create_app
from gateway.config import DispatcherConfig, GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.tokenizer import ByteTokenizer
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from tests.gateway.fakes import wait_for
from tests.kvstore.memory import MemoryStore
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.identity import NodeId, Role, new_identity
from transfer.membership import NodeInfo, NodeStatus
from transfer.registry import Registry
from transfer.registry_client import LocalMembership
from transfer.zmq_network import ZmqNetwork

BASE_URL = "http://gateway"


class RealCluster:
    """Nodes of both roles around one registry, and a client of the app."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.store: MemoryStore | None = None
        self.network = ZmqNetwork()
        self.nodes: dict[str, Any] = {}
        self._closers: list[Any] = []
        self.membership = LocalMembership(self.registry)
        self.store_seat = LocalMembership(self.registry)  # the memory store is no member itself
        self.dispatcher = Dispatcher(
            DispatcherConfig(),
            identity=new_identity(Role.GATEWAY, "gateway"),
            network=self.network,
            membership=self.membership,
            rng=random.Random(1),
        )
        app = create_app(
            GatewayConfig(model="fake"), self.dispatcher, ByteTokenizer(), self.membership
        )
        transport = httpx.ASGITransport(app=app)
        self.client = httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=30)

    async def add(self, role: Role, name: str, **runner_options: Any) -> Any:
        runner = FakeRunner(num_pages=256, **runner_options)
        self.store = self.store or MemoryStore(runner.info.spec)
        transfer = TransferEngine(TransferConfig(transport="loopback"))
        await transfer.start()
        network = ZmqNetwork()
        common: dict[str, Any] = {
            "identity": new_identity(role, name),
            "network": network,
            "transfer": transfer,
            "store": self.store,
            "membership": LocalMembership(self.registry),
            "runner": runner,
        }
        node: Any
        if role is Role.PREFILL:
            node = PrefillNode(PrefillConfig(chunk_size=64, token_budget=64), **common)
        else:
            node = DecodeNode(DecodeConfig(), **common)
        self.nodes[name] = node
        self._closers += [network, transfer]
        await node.start()
        return node

    async def seat_store(self) -> None:
        identity = new_identity(Role.STORE, "s0")
        await self.store_seat.join(NodeInfo(identity=identity, address="memory"), NodeStatus)

    async def close(self) -> None:
        await self.client.aclose()
        await self.dispatcher.close()
        await self.store_seat.leave()
        for node in self.nodes.values():
            await node.close()
        for part in [*self._closers, self.network]:
            await part.close()

    def usable(self, role: Role) -> int:
        return len(self.dispatcher.placement.links.usable(role))

    async def complete(self, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
        body = {
            "model": "fake",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        response = await self.client.post(
            "/v1/completions", json=body, headers={"x-kvferry-trace": "1"}
        )
        assert response.status_code == 200, response.text
        return response.json()


@asynccontextmanager
async def real_cluster(prefill: int = 1, decode: int = 1) -> AsyncIterator[RealCluster]:
    cluster = RealCluster()
    try:
        await cluster.seat_store()
        for at in range(prefill):
            await cluster.add(Role.PREFILL, f"p{at}")
        for at in range(decode):
            await cluster.add(Role.DECODE, f"d{at}")
        await cluster.dispatcher.start()
        await wait_for(
            lambda: (
                cluster.usable(Role.PREFILL) == prefill and cluster.usable(Role.DECODE) == decode
            ),
            10.0,
        )
        yield cluster
    finally:
        await cluster.close()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def reference(prompt: list[int], max_tokens: int, **params: Any) -> list[int]:
    sampling = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    )
    return [output.token for output in fake_generate(prompt, sampling)]


def ids(body: Any) -> list[int]:
    tokens: list[int] = body["choices"][0]["token_ids"]
    return tokens


async def test_tokens_equal_the_reference_around_page_and_chunk_borders() -> None:
    async with real_cluster() as cluster:
        for length in (1, 15, 16, 17, 63, 64, 65, 200):
            prompt = prompt_of(length, length)
            body = await cluster.complete(prompt, 20)
            assert ids(body) == reference(prompt, 20), length
            trace = body["kvferry"]
            assert trace["computed_tokens"] == length
            assert trace["pages_pulled"] == -(-length // 16)
            assert (trace["prefill_node"], trace["decode_node"]) == ("p0", "d0")


async def test_one_token_and_sampling_and_n_equal_the_reference() -> None:
    async with real_cluster() as cluster:
        prompt = prompt_of(40, 3)
        assert ids(await cluster.complete(prompt, 1)) == reference(prompt, 1)
        body = await cluster.complete(prompt, 12, temperature=0.8, seed=5, n=3)
        for at, choice in enumerate(body["choices"]):
            expected = reference(prompt, 12, temperature=0.8, seed=5 + at)
            assert choice["token_ids"] == expected


async def test_cached_tokens_are_exact_and_events_are_followed() -> None:
    async with real_cluster() as cluster:
        prompt = prompt_of(100, 4)
        first = await cluster.complete(prompt, 4)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        index = cluster.dispatcher.placement.index
        await wait_for(lambda: index.num_pages(NodeId("p0")) >= 6)
        again = await cluster.complete(prompt, 4)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 100 - again["kvferry"]["computed_tokens"] >= 96
        assert ids(again) == ids(first)


async def test_concurrent_requests_over_two_of_each_never_mix() -> None:
    async with real_cluster(2, 2) as cluster:
        prompts = [prompt_of(5 + 9 * at, 100 + at) for at in range(16)]
        bodies = await asyncio.gather(*(cluster.complete(p, 16) for p in prompts))
        assert [ids(body) for body in bodies] == [reference(p, 16) for p in prompts]
        used = {body["kvferry"]["decode_node"] for body in bodies}
        assert used == {"d0", "d1"}
    for name, node in cluster.nodes.items():
        node.check()
        assert name


@pytest.mark.parametrize(("prefill", "victim"), [(0, None), (1, "p0"), (2, "p0")])
async def test_decode_serves_when_prefill_is_away(prefill: int, victim: str | None) -> None:
    async with real_cluster(prefill) as cluster:
        if victim is not None:
            cluster.nodes[victim].abort()
        prompt = prompt_of(90, 8)
        body = await cluster.complete(prompt, 10)
        assert ids(body) == reference(prompt, 10)


async def test_draining_a_decode_node_mid_stream_changes_no_token() -> None:
    async with real_cluster(1, 2) as cluster:
        prompt = prompt_of(50, 9)
        task = asyncio.create_task(cluster.complete(prompt, 300))
        stats = cluster.dispatcher.stats
        await wait_for(lambda: stats.output_tokens > 10 or task.done(), 20.0)
        busy = [
            n
            for n in ("d0", "d1")
            if cluster.dispatcher.placement.routers[Role.DECODE].num_requests(NodeId(n))
        ]
        assert busy, "the request ended before it could be moved"
        await cluster.nodes[busy[0]].drain(0.0)
        body = await task
        assert ids(body) == reference(prompt, 300)
        assert stats.decode_failovers >= 1
        assert body["kvferry"]["decode_node"] != busy[0]


@pytest.mark.parametrize("prefill", [0, 1])
async def test_cached_tokens_are_exact_when_a_stop_string_ends_the_text(prefill: int) -> None:
    """The first turn is cut by a stop string; the second finds all full pages of it."""
    async with real_cluster(prefill) as cluster:
        prompt = [ord("a") + at % 26 for at in range(40)]
        output = reference(prompt, 80)
        text = bytes(token for token in output if token < 128).decode()
        fields = {"max_tokens": 80, "stop": text[30:36]}
        body = await cluster.complete(prompt, **fields)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert body["kvferry"]["computed_tokens"] == len(prompt)
        num_tokens = body["usage"]["completion_tokens"]
        store = cluster.store
        assert store is not None
        num_full = (len(prompt) + num_tokens - 1) // 16
        await wait_for(lambda: len(store.pages) >= num_full, 5.0)
        again = prompt + output[:num_tokens]
        body = await cluster.complete(again, 4)
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(again) - body["kvferry"]["computed_tokens"]
        assert cached >= num_full * 16
