"""What a get says of nodes it could not ask, and how long it believes what a node has promised."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvstore.client.lease import Lease
from kvstore.client.link import StoreLink
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.messages import AcquirePages, PagesAcquired
from kvstore.placement import placement_of
from kvstore.store import GetOutcome, PutOutcome
from tests.kvstore.cluster import PATIENT_LEASE_S, StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import get_all, open_client, raw_channel, until
from tests.kvstore.pages import SPEC, sequence
from transfer.errors import PeerLost
from transfer.identity import Incarnation, NodeId
from transfer.interface import deadline_after

TOKENS = range(160)
KEYS = [page.key for page in sequence(TOKENS)]


def config(replicas: int) -> StoreConfig:
    return StoreConfig(
        segment_nbytes=256 * SPEC.page_nbytes,
        lease_s=PATIENT_LEASE_S,
        tick_s=0.02,
        replicas=replicas,
    )


async def nodes(cluster: StoreCluster, count: int) -> None:
    for i in range(count):
        await cluster.node(f"store-{i}", config(replicas=2))
    await until(lambda: not any(node.numbers()["repairing"] for node in cluster.nodes))
    cluster.world.publish()  # a heartbeat


@pytest.mark.parametrize("num_pages", [8, 40])
async def test_a_page_that_may_be_on_a_node_in_back_off_has_failed_and_is_not_absent(
    cluster: StoreCluster, world: World, num_pages: int
) -> None:
    cluster.client_config = StoreClientConfig(backoff_s=600.0, backoff_max_s=600.0)
    await nodes(cluster, 4)
    stores = await cluster.stores()
    client = await open_client(stores)
    world.cut(NodeId("store-1"))
    placement = placement_of(world.view)
    down = placement.node_ids.index(NodeId("store-1"))
    ranks = placement.ranks(KEYS[:num_pages], 2).tolist()
    wanted = [GetOutcome.FAILED if down in nodes else GetOutcome.ABSENT for nodes in ranks]
    assert len(set(wanted)) == 2
    tokens = range(4 * num_pages)
    assert await get_all(stores, client, tokens) == wanted, "asked in vain"
    assert await get_all(stores, client, tokens) == wanted, "passed over"


async def test_a_get_asks_again_when_a_node_became_another_process_meanwhile(
    cluster: StoreCluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes(cluster, 2)
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await put_all(stores, client, TOKENS[:4]) == [PutOutcome.STORED]
    first, second = placement_of(world.view).ranks(KEYS[:1], 2)[0].tolist()
    call, gate = StoreLink.call, asyncio.Event()

    async def held(self: StoreLink, message: msgspec.Struct, *args: Any, **options: Any) -> Any:
        if isinstance(message, AcquirePages) and self.node_id == f"store-{first}":
            await gate.wait()
            raise PeerLost(self.node_id)
        return await call(self, message, *args, **options)

    monkeypatch.setattr(StoreLink, "call", held)
    reading = asyncio.ensure_future(get_all(stores, client, TOKENS[:4]))
    await asyncio.sleep(0)
    node = cluster.nodes[second]
    info, status = world.infos[node.identity.node_id]
    node.renew(msgspec.structs.replace(node.identity, incarnation=Incarnation("other")))
    renewed = msgspec.structs.replace(info, identity=node.identity)
    world.infos[node.identity.node_id] = renewed, status
    world.publish()
    gate.set()
    assert await reading == [GetOutcome.READ]


async def test_a_node_says_how_long_a_reader_has_waited_for_its_lease(
    cluster: StoreCluster,
) -> None:
    node = await cluster.node("store-0", config(replicas=1))
    stores = await cluster.stores()
    client = await open_client(stores)
    channel = await raw_channel(cluster, node.address)
    now_s = asyncio.get_running_loop().time
    request = AcquirePages(keys=(KEYS[0],), wait_s=5.0)
    sent_s = now_s()
    asking = asyncio.ensure_future(
        channel.request(request, PagesAcquired, deadline_s=deadline_after(5))
    )
    await until(lambda: node.numbers()["num_waits"] == 1)
    waiting_s = now_s()
    await until(lambda: now_s() > waiting_s + 0.02)
    await put_all(stores, client, TOKENS[:4])
    assert 0.02 <= (await asking).waited_s <= now_s() - sent_s


async def test_a_lease_is_not_counted_from_the_moment_its_reader_came_to_itself(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await cluster.node("store-0", config(replicas=1))
    stores = await cluster.stores()
    writer, reader = await open_client(stores), await open_client(stores)
    call, stands = StoreLink.call, asyncio.Event()
    now_s = asyncio.get_running_loop().time
    made: list[float] = []

    async def late(self: StoreLink, *args: Any, **options: Any) -> Any:
        reply = await call(self, *args, **options)
        if isinstance(reply, PagesAcquired) and reply.pages:
            await stands.wait()
        return reply

    class Seen(Lease):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self.end_s)

    monkeypatch.setattr(StoreLink, "call", late)
    monkeypatch.setattr("kvstore.client.pulling.Lease", Seen)
    reading = asyncio.ensure_future(get_all(stores, reader, TOKENS[:4], wait=True))
    await until(lambda: node.numbers()["num_waits"] == 1)
    await put_all(stores, writer, TOKENS[:4])
    await until(lambda: node.numbers()["num_leases"] == 1)
    granted_s = now_s()
    await until(lambda: now_s() > granted_s + 0.02)
    stands.set()
    assert await reading == [GetOutcome.READ]
    (end_s,) = made
    assert end_s <= granted_s + PATIENT_LEASE_S
