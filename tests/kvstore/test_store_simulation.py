"""The distributed store under seeded faults: whole pages or none, and nothing is left behind.

Real store nodes, clients, registry and protocol core on a virtual clock. Frames are lost, late,
doubled and corrupted; bulk bytes are flipped, break off and arrive after their writer gave up;
nodes crash, restart on their address and are stopped. After every delivery: the invariants of all
live directories. After healing: everything works again, and all leases, reservations and waits end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.server.node import StoreNode
from kvstore.store import GetOutcome, PutOutcome
from tests.kvstore.pages import SPEC, empty, filled, holds, sequence
from tests.sim.faults import FaultPlan
from tests.sim.harness import NodeCrashed, SimCluster, SimNode, run_sim, seeds
from transfer.channel import Hello, Service
from transfer.identity import Role
from transfer.interface import deadline_after
from transfer.registry import Registry, RegistryService
from transfer.registry_client import RegistryMembership

REGISTRY = "tcp://registry:7000"
STORES = ["store-1", "store-2"]
CLIENTS = ["client-1", "client-2", "client-3"]
CONFIG = StoreConfig(segment_nbytes=12 * SPEC.page_nbytes, bind="tcp://0.0.0.0:7001", lease_s=2.0)
NUM_SEEDS = 6
NUM_SEEDS_SLOW = 60
NUM_OPS = 12
QUIET_S = 10.0


class StoreWorld:
    """Two stores, three clients, one registry."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.nodes: dict[str, StoreNode] = {}
        self.clients: dict[str, StoreClient] = {}
        self.outcomes: Counter[str] = Counter()
        self._stacks: dict[str, AsyncExitStack] = {}
        cluster.checkers.append(self.check)

    def check(self) -> None:
        for name, node in self.nodes.items():
            if self.cluster.node(name).alive:
                node.check()

    async def start(self) -> None:
        registry = self.cluster.node("registry")
        await registry.run(self._registry(registry))
        for name in [*STORES, *CLIENTS]:
            await self.start_one(name)

    async def start_one(self, name: str) -> None:
        sim = self.cluster.node(name)
        start = self._store if name in STORES else self._client
        try:
            await sim.run(start(sim))
        except NodeCrashed:
            return

    async def _registry(self, sim: SimNode) -> None:
        stack = self._stacks[sim.name] = AsyncExitStack()
        service = Service()
        stack.callback(RegistryService(Registry(), service).close)
        stack.push_async_callback(sim.network.close)
        hello = Hello(identity=sim.identity(Role.GATEWAY))
        listener = await sim.network.listen(service, hello, REGISTRY)
        stack.push_async_callback(listener.close)

    async def _store(self, sim: SimNode) -> None:
        stack = self._stacks[sim.name] = AsyncExitStack()
        identity = sim.identity(Role.STORE)
        stack.push_async_callback(sim.network.close)
        membership = RegistryMembership(sim.network, REGISTRY, identity)
        await sim.transfer.start()
        stack.push_async_callback(sim.transfer.close)
        node = StoreNode(
            CONFIG,
            identity=identity,
            network=sim.network,
            transfer=sim.transfer,
            membership=membership,
        )
        self.nodes[sim.name] = node
        stack.push_async_callback(node.close)
        await node.start()

    async def _client(self, sim: SimNode) -> None:
        stack = self._stacks[sim.name] = AsyncExitStack()
        identity = sim.identity(Role.OBSERVER)
        stack.push_async_callback(sim.network.close)
        membership = RegistryMembership(sim.network, REGISTRY, identity)
        stack.push_async_callback(membership.leave)
        await membership.watch_only(deadline_s=deadline_after(20))
        await sim.transfer.start()
        stack.push_async_callback(sim.transfer.close)
        client = StoreClient(
            identity=identity,
            network=sim.network,
            transfer=sim.transfer,
            membership=membership,
            spec=SPEC,
            config=StoreClientConfig(batch_nbytes=3 * SPEC.page_nbytes),
        )
        self.clients[sim.name] = client
        stack.push_async_callback(client.close)

    async def put(self, name: str, tokens: list[int]) -> list[PutOutcome]:
        """Put one prompt from a client; every page has an outcome."""
        source, puts = filled(self.cluster.node(name).transfer, sequence(tokens))
        client = self.clients[name]
        result = await client.put(puts, source=source, deadline_s=deadline_after(8))
        self.outcomes.update(f"put {outcome}" for outcome in result.outcomes)
        return result.outcomes

    async def get(self, name: str, tokens: list[int], *, wait: bool) -> list[GetOutcome]:
        """Get one prompt; pages that were READ hold the right bytes, the others are ignored."""
        pages = sequence(tokens)
        into, gets = empty(self.cluster.node(name).transfer, pages)
        seen: dict[int, GetOutcome] = {}

        def on_page(i: int, outcome: GetOutcome) -> None:
            assert i not in seen, "an outcome came twice"
            seen[i] = outcome
            assert outcome is not GetOutcome.READ or holds(into, gets[i]), "wrong bytes"

        client = self.clients[name]
        result = await client.get(
            gets, into=into, deadline_s=deadline_after(6), wait=wait, on_page=on_page
        )
        assert seen == dict(enumerate(result.outcomes))
        before = bytes(into.view)
        await asyncio.sleep(0.5)
        assert bytes(into.view) == before, "the destination was touched after the call"
        self.outcomes.update(f"get {outcome}" for outcome in result.outcomes)
        return result.outcomes

    async def close(self) -> None:
        for name in [*CLIENTS, *STORES, "registry"]:
            sim = self.cluster.node(name)
            if sim.alive:
                await sim.run(self._stacks[name].aclose())


async def use(world: StoreWorld, name: str, rng: random.Random) -> None:
    """What one client does, one thing after the other; some calls are cancelled half-way."""
    for _ in range(NUM_OPS):
        prefix = rng.randrange(4) * 100
        tokens = [*range(prefix, prefix + rng.randrange(1, 30)), rng.randrange(3)]
        if rng.random() < 0.5:
            call: asyncio.Future[Any] = asyncio.ensure_future(world.put(name, tokens))
        else:
            call = asyncio.ensure_future(world.get(name, tokens, wait=rng.random() < 0.5))
        if rng.random() < 0.2:
            await asyncio.wait([call], timeout=rng.random() * 0.05)
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        if not call.cancelled():
            call.result()


async def scenario(cluster: SimCluster) -> None:
    world = StoreWorld(cluster)
    await world.start()

    async def trouble() -> None:
        while True:
            await asyncio.sleep(cluster.rng.expovariate(1 / 1.5))
            name = cluster.rng.choice(STORES)
            if cluster.rng.random() < 0.5:
                world.nodes.pop(name, None)
                cluster.restart(name)
                await world.start_one(name)
            else:
                cluster.pause(name)
                await asyncio.sleep(cluster.rng.random() * 3)
                cluster.resume(name)

    chaos = asyncio.ensure_future(trouble())
    running = [
        cluster.node(name).spawn(use(world, name, cluster.derive_rng(name))) for name in CLIENTS
    ]
    await asyncio.gather(*running)
    chaos.cancel()
    await asyncio.gather(chaos, return_exceptions=True)
    await after_healing(cluster, world)
    await world.close()


async def after_healing(cluster: SimCluster, world: StoreWorld) -> None:
    """Liveness: all works again. Quiescence: every promise ends, every slot is accounted for."""
    cluster.heal()
    for name in STORES:
        if not cluster.node(name).alive or name not in world.nodes:
            cluster.restart(name)
            await world.start_one(name)
    await asyncio.sleep(QUIET_S)
    for node in world.nodes.values():
        numbers = node.numbers()
        for promise in ("num_writing", "num_owed", "num_leases", "num_waits"):
            assert numbers[promise] == 0, (node.identity.node_id, promise, numbers)
    tokens = list(range(1000, 1020))
    first, second = (cluster.node(name) for name in CLIENTS[:2])
    assert await first.run(world.put(CLIENTS[0], tokens)) == [PutOutcome.STORED] * 5
    read = await second.run(world.get(CLIENTS[1], tokens, wait=False))
    assert read == [GetOutcome.READ] * 5


@pytest.mark.parametrize("seed", seeds(NUM_SEEDS))
def test_under_faults_pages_are_whole_or_absent_and_nothing_is_left_behind(seed: int) -> None:
    run_sim(scenario, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS, NUM_SEEDS_SLOW))
def test_the_same_under_many_more_seeds(seed: int) -> None:
    run_sim(scenario, seed)


def test_without_faults_every_put_is_stored_or_present() -> None:
    async def calm(cluster: SimCluster) -> None:
        world = StoreWorld(cluster)
        await world.start()
        for number in range(6):
            name = CLIENTS[number % 3]
            outcomes = await cluster.node(name).run(world.put(name, [number, 1, 2, 3, 4]))
            assert outcomes == [PutOutcome.STORED] * 2
        await world.close()

    run_sim(calm, 1, FaultPlan())
