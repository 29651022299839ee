"""A simulated store cluster: real nodes, clients and registry on simulated machines.

Owns how they are put together (as ``launch`` does for processes), their disks, and the calls that
clients make, each checked. Knows no faults: ``tests/sim/store_chaos.py`` strikes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

from kvstore.client.store_client import StoreClient
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.page import PageKey, PageSpec
from kvstore.server.node import StoreNode
from kvstore.store import GetOutcome, PageIdentity, PageState, PutOutcome, PutPolicy
from tests.sim import checkers
from tests.sim.book import SPEC, empty, filled, right
from tests.sim.checkers import StoreChecks, check_quiet, require
from tests.sim.disk import SimDisk, SimTier
from tests.sim.harness import NodeCrashed, SimCluster, SimNode
from tests.sim.network import SimNetwork
from tests.sim.node_watch import NodeWatch
from tests.sim.tap import Hook
from transfer.channel import Hello, Listener, Service
from transfer.errors import PeerUnreachable, TransferError
from transfer.identity import Role
from transfer.interface import Region, deadline_after
from transfer.registry import Registry, RegistryService
from transfer.registry_client import RegistryMembership

REGISTRY = "tcp://registry:7000"
STORES = ("store-1", "store-2", "store-3")
CLIENTS = ("client-1", "client-2", "client-3")
LEASE_S = 1.0
GRACE_S = 0.5
SEGMENT_PAGES = 12
DISK_PAGES = 16
PROMISES = ("num_writing", "num_owed", "num_leases", "num_waits", "replicas_missing", "repairing")
CONFIG = StoreConfig(
    segment_nbytes=SEGMENT_PAGES * SPEC.page_nbytes,
    bind="tcp://0.0.0.0:7001",
    lease_s=LEASE_S,
    lease_grace_s=GRACE_S,
    tick_s=0.2,
)
CLIENT_CONFIG = StoreClientConfig(batch_nbytes=3 * SPEC.page_nbytes, op_timeout_s=1.0)


class WatchedNetwork(SimNetwork):
    """The network of one life; what is listened with is watched."""

    watch: Callable[[Service], None]

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        self.watch(service)
        return await super().listen(service, hello, bind)


class StoreWorld:
    """Three stores, three clients, one registry.

    Args:
        config: of all store nodes. ssd: nodes have disks. specs: page geometry by client, where
            it is not ``SPEC``.
    """

    def __init__(
        self,
        cluster: SimCluster,
        config: StoreConfig = CONFIG,
        *,
        ssd: bool = False,
        specs: dict[str, PageSpec] | None = None,
        client_config: StoreClientConfig | None = None,
    ) -> None:
        self.cluster = cluster
        self.config = config
        self.client_config = client_config or CLIENT_CONFIG
        self.checks = StoreChecks(cluster.loop)
        self.nodes: dict[str, StoreNode] = {}
        self.clients: dict[str, StoreClient] = {}
        self.tiers: dict[str, SimTier] = {}
        self.disks: dict[str, SimDisk] = {}
        self.book: dict[PageKey, PageIdentity] = {}
        self.hooks: dict[type, Hook] = {}  # before a message is handled, see ``tap``
        self.outcomes: Counter[str] = Counter()
        self._specs = specs or {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self._results: dict[str, tuple[Region, bytes]] = {}
        if ssd:
            nbytes = DISK_PAGES * SPEC.page_nbytes
            self.disks = {n: SimDisk(cluster.derive_rng(f"disk/{n}"), nbytes) for n in STORES}
        cluster.checkers.append(self.checks.check_next)
        cluster.fabric.check_every = checkers.CHECK_EVERY

    # ---- the life of nodes

    async def start(self) -> None:
        for name in ("registry", *STORES, *CLIENTS):
            await self.start_one(name)
        await self.settle()

    async def settle(self) -> None:
        """Wait until every client sees every store, and no back-off is left of bad times."""
        await self.cluster.until(
            lambda: all(self.cluster.node(c).call(self._sees_all, c) for c in self.clients),
            timeout_s=30,
        )

    def _sees_all(self, name: str) -> bool:
        links = self.clients[name].links.all()
        return len(links) == len(STORES) and all(link.usable for link in links)

    async def start_one(self, name: str) -> None:
        sim = self.cluster.node(name)
        start = {"registry": self._registry, "store": self._store, "client": self._client}
        try:
            await sim.run(start[name.split("-")[0]](sim))
        except NodeCrashed:
            return
        except PeerUnreachable:  # cut off from the registry: the process ends with an error
            self.crash(name)

    def crash(self, name: str) -> None:
        """kill -9; a disk keeps what it had synced."""
        self.nodes.pop(name, None)
        self.clients.pop(name, None)
        self.cluster.crash(name)
        if name in self.disks:
            self.disks[name].lose_power()

    async def restart(self, name: str) -> None:
        """Another life: the same address, new memory, the old disk."""
        self.crash(name)
        self.cluster.restart(name)
        await self.start_one(name)

    async def leave(self, name: str) -> None:
        """Close a node in order: it drains, says goodbye, and its process ends."""
        sim, node = self.cluster.node(name), self.nodes.pop(name, None)
        if node is None or not sim.alive:
            return
        try:
            await sim.run(node.drain(2.0))
            await sim.run(self._stacks[name].aclose())
        except NodeCrashed:
            return
        self.cluster.crash(name)

    def is_up(self, name: str) -> bool:
        return self.cluster.node(name).alive and name in {**self.nodes, **self.clients}

    async def close(self) -> None:
        for name in [*CLIENTS, *STORES, "registry"]:
            await self.close_one(name)

    async def close_one(self, name: str) -> None:
        """End a process in order, without a drain."""
        sim = self.cluster.node(name)
        if sim.alive:
            await sim.run(self._stacks[name].aclose())

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
        sim.network = network = WatchedNetwork(self.cluster.fabric, sim.name, sim.life)
        stack.push_async_callback(network.close)
        membership = RegistryMembership(sim.network, REGISTRY, identity)
        await sim.transfer.start()
        stack.push_async_callback(sim.transfer.close)
        tier = SimTier(self.disks[sim.name], sim.life) if sim.name in self.disks else None
        node = StoreNode(
            self.config,
            identity=identity,
            network=network,
            transfer=sim.transfer,
            membership=membership,
            tier=tier,
            wall_clock=asyncio.get_running_loop().time,
        )
        watch = NodeWatch(
            sim.name,
            self.checks,
            view=lambda: node.region.view,
            on_ssd=lambda key: tier is not None and key in tier.known,
            book=self.book,
            hooks=self.hooks,
        )
        network.watch = watch.add_to
        if tier is not None:
            self.tiers[sim.name] = tier
        stack.push_async_callback(node.close)
        await node.start()
        self.nodes[sim.name] = node
        self.cluster.bulk.arrivals[node.region] = watch.reading_into
        self.checks.follow(sim.name, lambda: sim.alive, node.check)

    async def _client(self, sim: SimNode) -> None:
        stack = self._stacks[sim.name] = AsyncExitStack()
        identity = sim.identity(Role.OBSERVER)
        stack.push_async_callback(sim.network.close)
        membership = RegistryMembership(sim.network, REGISTRY, identity)
        stack.push_async_callback(membership.leave)
        await membership.watch_only(deadline_s=deadline_after(5))
        await sim.transfer.start()
        stack.push_async_callback(sim.transfer.close)
        client = StoreClient(
            identity=identity,
            network=sim.network,
            transfer=sim.transfer,
            membership=membership,
            spec=self.spec_of(sim.name),
            config=self.client_config,
        )
        self.clients[sim.name] = client
        self._results.pop(sim.name, None)
        stack.push_async_callback(client.close)

    # ---- calls; run them in the client's life

    def spec_of(self, client: str) -> PageSpec:
        return self._specs.get(client, SPEC)

    async def put(
        self,
        name: str,
        pages: list[PageIdentity],
        *,
        timeout_s: float = 5.0,
        policy: PutPolicy | None = None,
    ) -> list[PutOutcome]:
        """Put one prompt; every page has an outcome."""
        self.book.update((page.key, page) for page in pages)
        source, puts = filled(self.cluster.node(name).transfer, pages, self.spec_of(name))
        deadline_s = deadline_after(timeout_s)
        with self.checks.call("put", deadline_s):
            result = await self.clients[name].put(
                puts, source=source, deadline_s=deadline_s, policy=policy or PutPolicy()
            )
        require(len(result.outcomes) == len(pages), "completion", "pages without an outcome")
        self.outcomes.update(f"put {outcome}" for outcome in result.outcomes)
        return result.outcomes

    async def get(
        self,
        name: str,
        pages: list[PageIdentity],
        *,
        timeout_s: float = 5.0,
        wait: bool = False,
    ) -> list[GetOutcome]:
        """Get one prompt: pages that were READ hold the right bytes, the others are ignored."""
        self._check_untouched(name)
        self.book.update((page.key, page) for page in pages)
        spec = self.spec_of(name)
        into, gets = empty(self.cluster.node(name).transfer, pages, spec)
        seen: dict[int, GetOutcome] = {}

        def on_page(i: int, outcome: GetOutcome) -> None:
            if i in seen:
                self.checks.report("completion", f"{name}: an outcome came twice")
            seen[i] = outcome
            page = into.view[gets[i].local_offset :][: spec.page_nbytes]
            if outcome is GetOutcome.READ and not right(page, pages[i], spec):
                what = f"{name} has read wrong bytes of {pages[i].key.hex()}"
                self.checks.report("integrity", what)

        deadline_s = deadline_after(timeout_s)
        with self.checks.call("get", deadline_s):
            result = await self.clients[name].get(
                gets, into=into, deadline_s=deadline_s, wait=wait, on_page=on_page
            )
        require(seen == dict(enumerate(result.outcomes)), "completion", "outcomes differ")
        self._results[name] = into, bytes(into.view)
        self.outcomes.update(f"get {outcome}" for outcome in result.outcomes)
        return result.outcomes

    def _check_untouched(self, name: str) -> None:
        """What the last ``get`` gave is still what it gave: a call ends when it ends."""
        into, before = self._results.pop(name, (None, b""))
        if into is not None:
            same = bytes(into.view) == before
            require(same, "integrity", f"{name}: memory was touched after a get had ended")

    async def match(self, name: str, pages: list[PageIdentity]) -> list[PageState]:
        deadline_s = deadline_after(3.0)
        with self.checks.call("match", deadline_s):
            return await self.clients[name].match([p.key for p in pages], deadline_s=deadline_s)

    async def clear(self, name: str, root: bytes | None = None) -> int | None:
        """Clear all, or one namespace; None when not every node could be told."""
        deadline_s = deadline_after(3.0)
        with self.checks.call("clear", deadline_s):
            try:
                return await self.clients[name].clear(deadline_s=deadline_s, namespace=root)
            except TransferError:
                self.outcomes["clear failed"] += 1
                return None

    # ---- the end

    def check_quiet(self) -> None:
        """Nobody has work: no promise is left on any node, no task in any client."""
        self.checks.check_all()
        for name, node in self.nodes.items():
            check_quiet(name, node.numbers(), PROMISES)
        for name, client in self.clients.items():
            left = len(client._background)
            require(not left, "quiescence", f"{name}: {left} tasks in the background")


def drawn_policy(rng: random.Random, root: bytes) -> PutPolicy:
    """Priorities high and low, for good and for a while."""
    if rng.random() < 0.6:
        return PutPolicy(namespace=root)
    lasts_s = rng.choice([None, 0.5, 5.0])
    return PutPolicy(namespace=root, priority=rng.choice([0, 20, 60, 100]), priority_s=lasts_s)
