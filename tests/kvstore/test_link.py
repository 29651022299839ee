"""What a store client's link does when its node leaves, hangs, or answers nonsense."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvstore.client.link import BULK_INCIDENTS_MAX, StoreLink
from kvstore.messages import (
    AcquirePages,
    OpenStore,
    PagesAcquired,
    PagesCommitted,
    PagesMatched,
    PagesReserved,
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
from transfer.errors import PeerLost, PeerUnreachable, RegionRevoked, RemoteFailed
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


def quiet_link() -> StoreLink:
    """A link that has not been used."""
    return StoreLink(
        NodeInfo(identity=new_identity(Role.STORE, "store-0"), address="fake://1"),
        network=FakeNetwork(World()),
        hello=Hello(identity=new_identity(Role.DECODE)),
        config=FAST,
        counters=Counter(),
    )


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


@pytest.mark.parametrize("kind", [PagesMatched, PagesReserved, PagesCommitted])
async def test_answers_that_do_not_fit_the_question_are_failures_not_exceptions(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch, kind: type[msgspec.Struct]
) -> None:
    cluster.always_write()
    await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    call = StoreLink.call

    async def short(self: StoreLink, message: Any, reply: Any, **limits: float) -> Any:
        answer = await call(self, message, reply, **limits)
        if reply is not kind:
            return answer
        (name,) = {"codes", "grants", "statuses"} & set(reply.__struct_fields__)
        return msgspec.structs.replace(answer, **{name: getattr(answer, name)[1:]})

    monkeypatch.setattr(StoreLink, "call", short)
    keys = [page.key for page in sequence(range(8))]
    stored = await put_all(stores, client, range(8))
    assert stored == [PutOutcome.STORED if kind is PagesMatched else PutOutcome.FAILED] * 2
    if kind is PagesMatched:
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


# ---- the verdict on bulk operations


async def test_one_broken_connection_is_no_dead_node_and_many_in_a_row_are() -> None:
    link = quiet_link()
    for number in range(1, BULK_INCIDENTS_MAX + 1):
        assert link.usable, number
        link.judge_bulk(PeerLost("reset"), started_s=asyncio.get_running_loop().time())
    assert not link.usable
    assert 0 < link.backs_off_s <= FAST.backoff_s


async def test_operations_that_were_under_way_together_are_one_incident() -> None:
    link = quiet_link()
    started_s = asyncio.get_running_loop().time()
    for _ in range(10 * BULK_INCIDENTS_MAX):
        link.judge_bulk(PeerLost("reset"), started_s=started_s - 1.0)
    assert link.usable


async def test_a_bulk_operation_that_succeeds_wipes_the_slate() -> None:
    link = quiet_link()
    for _ in range(10):
        for _ in range(BULK_INCIDENTS_MAX - 1):
            link.judge_bulk(PeerLost("reset"), started_s=asyncio.get_running_loop().time())
        link.bulk_done()
    assert link.usable


async def test_a_node_that_is_closing_is_skipped_for_a_while() -> None:
    link = quiet_link()
    link.judge(RemoteFailed("closed", "shutting down"), waited_s=0.0)
    assert not link.usable
    with pytest.raises(PeerUnreachable, match="skipped"):
        await link.call(OpenStore(), StoreOpened, deadline_s=deadline_after(1))


async def test_revoked_memory_means_new_tokens_not_a_dead_node(cluster: StoreCluster) -> None:
    await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    (link,) = client.links.all()
    before = client.counters()["connects"]
    link.judge_bulk(RegionRevoked("gone"), started_s=asyncio.get_running_loop().time())
    assert await get_all(stores, client, range(4)) == [GetOutcome.READ]
    assert client.counters()["connects"] == before + 1


@pytest.mark.parametrize("code", ["bad_page", "bad_message", "bad_keys"])
async def test_a_request_that_no_node_takes_is_logged_once(
    code: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = quiet_link()
    for number in range(3):
        link.judge(RemoteFailed(code, f"number {number}"), waited_s=0.0)
        link.judge(RemoteFailed("draining", "closes soon"), waited_s=0.0)
    said = [record for record in caplog.records if record.name == "kvstore.client.link"]
    assert [record.levelname for record in said] == ["WARNING"]
    assert code in said[0].getMessage()
    assert "number 0" in said[0].getMessage()
    assert link.usable, "it is no fault of the node"
