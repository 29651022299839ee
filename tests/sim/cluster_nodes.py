"""Builds the real nodes on simulated ones, and keeps the list of those alive.

Owns how each role is put together in the simulator (as ``launch`` does for processes) and the
whole-cluster checkers. The code under test is the product's own, from the dispatcher down.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Protocol

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from engine.fake import FakeRunner
from engine.request import GenerateRequest, TokenOut
from gateway.config import DispatcherConfig
from gateway.dispatch import Dispatcher
from gateway.trace import GenerationDone
from kvstore.client.store_client import StoreClient
from kvstore.config import StoreConfig
from kvstore.server.node import StoreNode
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from tests.sim.harness import NodeCrashed, SimCluster, SimNode
from transfer.channel import Hello, Service
from transfer.identity import Role
from transfer.registry import Registry, RegistryService
from transfer.registry_client import LocalMembership, RegistryMembership

REGISTRY_BIND = "tcp://gateway:7000"
PAGE_SIZE = 16
CHUNK = 40  # not a multiple of the page size: chunks end inside of pages
NUM_PAGES = 48
CHECK_EVERY = 25  # deliveries
SEGMENT_NBYTES = 96 * FakeRunner(num_pages=2, page_size=PAGE_SIZE).pool.spec.page_nbytes


class Checkable(Protocol):
    def check(self) -> None: ...


class World:
    """The cluster of one scenario: which real node lives on which simulated one."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.nodes: dict[str, Checkable] = {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self.dispatcher: Dispatcher | None = None
        self._turn = 0
        cluster.checkers.append(self.check_next)
        cluster.fabric.check_every = CHECK_EVERY

    def check_next(self) -> None:
        """Conservation and lease safety on one live node, each in its turn.

        A broken invariant stays broken: it is found a few deliveries later, for a small part of the
        work.
        """
        self._turn += 1
        names = list(self.nodes)
        if names:
            self._check(names[self._turn % len(names)])

    def check_all(self) -> None:
        """Conservation and lease safety on every live node."""
        for name in self.nodes:
            self._check(name)

    def _check(self, name: str) -> None:
        if self.cluster.node(name).alive:
            self.nodes[name].check()

    async def start_gateway(self) -> None:
        sim = self.cluster.node("gateway")
        await sim.run(self._gateway(sim))

    async def start(self, name: str) -> None:
        """Start the node ``name`` (``store-1``, ``prefill-1`` ...) in its present life."""
        sim = self.cluster.node(name)
        role = Role(name.split("-")[0])
        try:
            await sim.run(self._node(sim, role))
        except NodeCrashed:
            return

    def crash(self, name: str) -> None:
        self.nodes.pop(name, None)
        self._stacks.pop(name, None)
        self.cluster.crash(name)

    async def restart(self, name: str) -> None:
        self.crash(name)
        self.cluster.restart(name)
        await self.start(name)

    async def close(self) -> None:
        """Close every live node in order, the gateway last."""
        for name in sorted(self._stacks, key=lambda n: n == "gateway"):
            sim = self.cluster.node(name)
            stack = self._stacks[name]
            if sim.alive:
                await sim.run(stack.aclose())

    async def _gateway(self, sim: SimNode) -> None:
        stack = AsyncExitStack()
        identity = sim.identity(Role.GATEWAY)
        registry = Registry()
        service = Service()
        seats = RegistryService(registry, service)
        stack.callback(seats.close)
        stack.push_async_callback(sim.network.close)
        listener = await sim.network.listen(service, Hello(identity=identity), REGISTRY_BIND)
        stack.push_async_callback(listener.close)
        membership = LocalMembership(registry)
        stack.callback(membership.abort)
        dispatcher = Dispatcher(
            DispatcherConfig(),
            identity=identity,
            network=sim.network,
            membership=membership,
            rng=random.Random(sim.rng.getrandbits(64)),
        )
        await dispatcher.start()
        stack.push_async_callback(dispatcher.close)
        self.dispatcher = dispatcher
        self._stacks["gateway"] = stack

    async def _node(self, sim: SimNode, role: Role) -> None:
        stack = AsyncExitStack()
        self._stacks[sim.name] = stack
        identity = sim.identity(role)
        stack.push_async_callback(sim.network.close)
        await sim.transfer.start()
        stack.push_async_callback(sim.transfer.close)
        membership = RegistryMembership(sim.network, REGISTRY_BIND, identity)
        stack.push_async_callback(membership.leave)
        parts = {
            "identity": identity,
            "network": sim.network,
            "transfer": sim.transfer,
            "membership": membership,
        }
        node: StoreNode | PrefillNode | DecodeNode
        if role is Role.STORE:
            node = StoreNode(StoreConfig(segment_nbytes=SEGMENT_NBYTES), **parts)
        else:
            runner = FakeRunner(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
            store = StoreClient(**parts, spec=runner.pool.spec)
            stack.push_async_callback(store.close)
            if role is Role.PREFILL:
                config = PrefillConfig(chunk_size=CHUNK, token_budget=2 * CHUNK)
                node = PrefillNode(config, store=store, runner=runner, **parts)
            else:
                node = DecodeNode(
                    DecodeConfig(step_tokens=CHUNK, head_room_tokens=PAGE_SIZE),
                    store=store,
                    runner=runner,
                    **parts,
                )
        stack.push_async_callback(node.close)
        self.nodes[sim.name] = node
        await node.start()

    def generate(
        self, request: GenerateRequest, timeout_s: float
    ) -> AsyncIterator[TokenOut | GenerationDone]:
        assert self.dispatcher is not None
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return self.dispatcher.generate(request, deadline_s=deadline_s)

    async def answer(self, request: GenerateRequest, timeout_s: float) -> list[int]:
        """The tokens of one request, collected on the gateway."""
        tokens: list[int] = []
        async with aclosing(self.generate(request, timeout_s)) as items:
            async for item in items:
                if isinstance(item, TokenOut):
                    assert item.index == len(tokens), "an output index came twice or not at all"
                    tokens.append(item.token)
        return tokens
