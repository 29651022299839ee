"""A scripted cluster in one process: network, membership and a dispatcher over fake nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.request import PrefillUpdate, TokenOut
from gateway.config import DispatcherConfig
from gateway.dispatch import Dispatcher
from gateway.trace import GenerationDone, GenerationTrace
from kvstore.events import ClearCache
from tests.gateway.fake_node import FakeNode, Reply, alphabet_reply, request_of
from tests.hub import HubNetwork
from transfer.channel import Channel, Hello, Listener, Service
from transfer.errors import PeerLost, PeerUnreachable
from transfer.identity import Identity, Role, new_identity
from transfer.interface import deadline_after
from transfer.membership import Member, MembershipView, NodeInfo, NodeStatus, ViewCallback


class FakeChannel:
    """A conversation with one fake node."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node
        self._closed = asyncio.Event()

    @property
    def peer(self) -> Identity:
        return self._node.identity

    @property
    def closed(self) -> bool:
        return self._closed.is_set() or self._node.dead.is_set()

    async def request(self, message: msgspec.Struct, reply: type[Any], *, deadline_s: float) -> Any:
        await asyncio.sleep(0)
        if self.closed:
            raise PeerLost(f"{self._node.name} is dead")
        if isinstance(message, ClearCache):
            return self._node.clear(message)
        assert isinstance(message, PrefillUpdate)
        return self._node.update(message)

    async def stream(
        self, message: msgspec.Struct, item: Any, *, deadline_s: float
    ) -> AsyncIterator[Any]:
        if self.closed:
            raise PeerLost(f"{self._node.name} is dead")
        items: Any = self._node.handle(message)
        lost = [asyncio.ensure_future(e.wait()) for e in (self._node.dead, self._closed)]
        following: asyncio.Future[Any] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(items, None))
                await asyncio.wait([following, *lost], return_when=asyncio.FIRST_COMPLETED)
                if self.closed:
                    raise PeerLost(f"{self._node.name} is lost")
                found = following.result()
                if found is None:
                    return
                yield found
        finally:
            left = [f for f in (following, *lost) if f is not None and not f.done()]
            for future in left:
                future.cancel()
            if left:
                await asyncio.wait(left)
            await items.aclose()

    async def close(self) -> None:
        self._closed.set()

    def abort(self) -> None:
        self._closed.set()


class FakeNetwork(HubNetwork):
    """Connects to the nodes of a ``FakeCluster`` by address."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, FakeNode] = {}
        self.num_connects = 0

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        raise NotImplementedError

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        await asyncio.sleep(0)
        self.num_connects += 1
        node = self.nodes.get(address)
        if node is None or node.dead.is_set():
            raise PeerUnreachable(f"nobody at {address}")
        if node.refuse_connects:
            node.refuse_connects -= 1
            raise PeerUnreachable(f"{address} is not ready")
        return FakeChannel(node)

    async def close(self) -> None: ...


class FakeMembership:
    """A view that the test sets."""

    def __init__(self) -> None:
        self.view = MembershipView()
        self.connected = True
        self.superseded = False
        self._callbacks: list[ViewCallback] = []

    def show(self, members: Sequence[Member]) -> None:
        ordered = tuple(sorted(members, key=lambda m: m.node_id))
        self.view = MembershipView(version=self.view.version + 1, members=ordered)
        for callback in self._callbacks:
            callback(self.view)

    def subscribe(self, callback: ViewCallback) -> None:
        self._callbacks.append(callback)
        callback(self.view)

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        raise NotImplementedError

    async def leave(self) -> None: ...


FAST = DispatcherConfig(
    reconnect_min_s=0.005,
    reconnect_max_s=0.02,
    capacity_wait_s=0.2,
    prefill_wait_s=0.2,
    update_retry_s=0.005,
    overload_retry_s=0.01,
    finish_grace_s=0.5,
)


PROMPT = list(range(40))


def store_member() -> Member:
    """A store node in the view; the gateway only asks whether there is one."""
    identity = new_identity(Role.STORE, "s0")
    return Member(
        info=NodeInfo(identity=identity, address="fake://s0", transport="fake"),
        status=NodeStatus(),
    )


@dataclass
class FakeCluster:
    """Nodes, membership, network and a dispatcher over them."""

    num_prefill: int = 1
    num_decode: int = 1
    reply: Reply = alphabet_reply
    config: DispatcherConfig = FAST
    with_store: bool = True
    network: FakeNetwork = field(default_factory=FakeNetwork)
    membership: FakeMembership = field(default_factory=FakeMembership)
    nodes: dict[str, FakeNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at in range(self.num_prefill):
            self.add(Role.PREFILL, f"p{at}")
        for at in range(self.num_decode):
            self.add(Role.DECODE, f"d{at}")
        self.dispatcher = Dispatcher(
            self.config,
            identity=new_identity(Role.GATEWAY, "gateway"),
            network=self.network,
            membership=self.membership,
            rng=random.Random(0),
        )

    def add(self, role: Role, name: str) -> FakeNode:
        """Add a node, or another life of one; ``show`` makes it known."""
        node = FakeNode(role, name, self.reply, self.network.hub)
        self.nodes[name] = node
        self.network.nodes[node.address] = node
        return node

    def remove(self, name: str) -> None:
        self.nodes.pop(name).kill()
        self.show()

    def show(self) -> None:
        stores = [store_member()] if self.with_store else []
        self.membership.show([node.member for node in self.nodes.values()] + stores)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeCluster]:
        await self.dispatcher.start()
        self.show()
        await self.settle()
        try:
            yield self
        finally:
            await self.dispatcher.close()
            await self.settle()
            for node in self.nodes.values():
                assert node.open_streams == [], f"{node.name} still serves {node.open_streams}"
            assert self.dispatcher.stats.num_in_flight == 0
            for router in self.dispatcher.placement.routers.values():
                assert router.num_in_flight == 0, "load was counted and never ended"

    async def settle(self) -> None:
        """Let everything run that can run without time passing."""
        for _ in range(30):
            await asyncio.sleep(0)

    def p(self, at: int = 0) -> FakeNode:
        return self.nodes[f"p{at}"]

    def d(self, at: int = 0) -> FakeNode:
        return self.nodes[f"d{at}"]


async def wait_for(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    """Wait until ``condition()``; polls the loop, fails after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - any state may be the condition
            await asyncio.sleep(0.001)


async def collect(
    cluster: FakeCluster, request: Any = None, trace: GenerationTrace | None = None
) -> tuple[list[int], GenerationDone]:
    """All tokens, and the end; indices are checked."""
    request = request or request_of(PROMPT)
    tokens: list[int] = []
    done = None
    generation: Any = cluster.dispatcher.generate(
        request, deadline_s=deadline_after(5.0), trace=trace
    )
    async with aclosing(generation) as items:
        async for item in items:
            assert done is None, "an item after the end"
            if isinstance(item, TokenOut):
                assert item.index == len(tokens)
                tokens.append(item.token)
            else:
                done = item
    assert done is not None
    return tokens, done
