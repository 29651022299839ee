"""What a store client's link does when its node leaves, hangs, or answers nonsense."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvstore.client.link import StoreLink
from kvstore.messages import (
    AcquirePages,
    OpenStore,
    PagesAcquired,
    PagesCommitted,
    PagesReserved,
    PageStates,
    StoreOpened,
)
from kvstore.server import handlers
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import FakeNetwork, World
from tests.kvstore.faulty import FAST, get_all, open_client, raw_channel
from tests.kvstore.pages import sequence
from transfer.channel import Caller, Channel, Hello, Service
from transfer.errors import PeerUnreachable, RemoteFailed
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after
from transfer.membership import NodeInfo


class Watched(FakeNetwork):
    """Remembers the channels it opened."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.opened: list[Channel] = []

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        channel = await super().connect(address, hello, deadline_s=deadline_s)
        self.opened.append(channel)
        return channel


@pytest.fixture
async def hanging() -> AsyncIterator[tuple[StoreLink, Watched, asyncio.Event]]:
    """A link to a node that never hands its tokens out, and when it was asked."""
    world, asked = World(), asyncio.Event()
    node = new_identity(Role.STORE, "store-0")

    async def hang(message: OpenStore, caller: Caller) -> StoreOpened:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    service = Service()
    service.on(OpenStore, hang)
    listener = await FakeNetwork(world).listen(service, Hello(identity=node), "tcp://127.0.0.1:0")
    network = Watched(world)
    link = StoreLink(
        NodeInfo(identity=node, address=listener.address),
        network=network,
        hello=Hello(identity=new_identity(Role.DECODE)),
        config=FAST,
        counters=Counter(),
    )
    yield link, network, asked
    await link.close()
    await listener.close()


async def test_a_node_that_leaves_while_it_is_connected_to_is_unreachable_not_a_cancellation(
    hanging: tuple[StoreLink, Watched, asyncio.Event],
) -> None:
    link, network, asked = hanging
    calling = asyncio.ensure_future(
        link.call(OpenStore(), StoreOpened, deadline_s=deadline_after(5))
    )
    await asked.wait()
    link.abort()
    with pytest.raises(PeerUnreachable, match="left the cluster"):
        await calling
    (channel,) = network.opened
    assert channel.closed, "the half-open channel is not left behind"


async def test_a_caller_that_is_cancelled_does_not_end_the_attempt_of_others(
    hanging: tuple[StoreLink, Watched, asyncio.Event],
) -> None:
    link, _, asked = hanging
    calling = asyncio.ensure_future(
        link.call(OpenStore(), StoreOpened, deadline_s=deadline_after(5))
    )
    await asked.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert not link.connect().done()


@pytest.mark.parametrize("kind", [PageStates, PagesReserved, PagesCommitted])
async def test_answers_that_do_not_fit_the_question_are_failures_not_exceptions(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch, kind: type[msgspec.Struct]
) -> None:
    await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    call = StoreLink.call

    async def short(self: StoreLink, message: Any, reply: Any, **limits: float) -> Any:
        answer = await call(self, message, reply, **limits)
        if reply is not kind:
            return answer
        (name,) = {"states", "grants", "statuses"} & set(reply.__struct_fields__)
        return msgspec.structs.replace(answer, **{name: getattr(answer, name)[1:]})

    monkeypatch.setattr(StoreLink, "call", short)
    keys = [page.key for page in sequence(range(8))]
    stored = await put_all(stores, client, range(8))
    assert stored == [PutOutcome.STORED if kind is PageStates else PutOutcome.FAILED] * 2
    if kind is PageStates:
        found = await client.match(keys, deadline_s=deadline_after(1))
        assert found == [PageState.ABSENT] * 2


async def test_a_page_that_is_granted_twice_has_one_outcome(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(8))
    call = StoreLink.call

    async def twice(self: StoreLink, message: Any, reply: Any, **limits: float) -> Any:
        answer = await call(self, message, reply, **limits)
        if reply is PagesAcquired:
            answer = msgspec.structs.replace(answer, pages=answer.pages * 2)
        return answer

    monkeypatch.setattr(StoreLink, "call", twice)
    assert await get_all(stores, client, range(8)) == [GetOutcome.READ] * 2


async def test_a_node_grants_a_bounded_number_of_leases(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "LEASES_MAX", 1)
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    channel = await raw_channel(cluster, node.address)
    acquire = AcquirePages(keys=(sequence(range(4))[0].key,), wait_s=float("nan"))
    first = await channel.request(acquire, PagesAcquired, deadline_s=deadline_after(1))
    assert len(first.pages) == 1
    with pytest.raises(RemoteFailed, match="busy"):
        await channel.request(acquire, PagesAcquired, deadline_s=deadline_after(1))
