"""The distributed store when readers stop and nodes come and go: silence, restarts, draining."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.config import StoreClientConfig
from kvstore.messages import (
    MatchPages,
    PagesMatched,
)
from kvstore.placement import placement_of
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import get_all, open_client, small, until
from tests.kvstore.pages import empty, sequence
from transfer.errors import PeerLost
from transfer.identity import NodeId
from transfer.interface import deadline_after

# ---- readers that stop


async def test_a_cancelled_read_leaves_no_bytes_and_no_lease(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(8))
    world.bulk_gate = asyncio.Event()
    into, gets = empty(stores.transfer, sequence(range(8)))
    reading = asyncio.ensure_future(client.get(gets, into=into, deadline_s=deadline_after(5)))
    await until(lambda: node.numbers()["num_leases"] == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    world.bulk_gate.set()
    await client.quiet()
    assert node.numbers()["num_leases"] == 0
    assert bytes(into.view) == bytes(into.nbytes)


async def test_waits_leave_nothing_behind(cluster: StoreCluster) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    waiting = [asyncio.ensure_future(get_all(stores, client, [i, i], wait=True)) for i in range(20)]
    await until(lambda: node.numbers()["num_waits"] == 20)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: node.numbers()["num_waits"] == 0)


# ---- nodes that come and go


async def test_without_a_store_node_everything_is_absent_and_nothing_waits(
    cluster: StoreCluster,
) -> None:
    stores = await cluster.stores()
    client = await open_client(stores)
    async with asyncio.timeout(0.5):
        assert await put_all(stores, client, range(4)) == [PutOutcome.FAILED]
        assert await get_all(stores, client, range(4), wait=True) == [GetOutcome.ABSENT]


async def test_a_store_that_is_killed_and_comes_back_works_again(
    cluster: StoreCluster, world: World
) -> None:
    for _ in range(5):
        node = await cluster.node("store-0", small(16))
        stores = await cluster.stores()
        client = await open_client(stores)
        assert await get_all(stores, client, range(8)) == [GetOutcome.ABSENT] * 2
        assert await put_all(stores, client, range(8)) == [PutOutcome.STORED] * 2
        assert await get_all(stores, client, range(8)) == [GetOutcome.READ] * 2
        node.abort()
        world.cut(node.identity.node_id)
        assert await get_all(stores, client, range(8)) == [GetOutcome.FAILED] * 2
        assert await put_all(stores, client, range(8)) == [PutOutcome.FAILED] * 2


async def test_a_restart_on_the_same_address_fences_old_grants(
    cluster: StoreCluster, world: World
) -> None:
    config = small(4).model_copy(update={"bind": "fake://fixed", "lease_s": 5.0})
    old = await cluster.node("store-0", config)
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    world.bulk_gate = asyncio.Event()
    reading = asyncio.ensure_future(get_all(stores, client, range(4)))
    await until(lambda: old.numbers()["num_leases"] == 1)
    old.abort()
    world.cut(old.identity.node_id)
    new = await cluster.node("store-0", config)
    assert new.address == old.address
    world.bulk_gate.set()
    read = await reading  # by now the new node may have been asked, too
    assert read in ([GetOutcome.FAILED], [GetOutcome.ABSENT]), "the old memory must not be read"
    await client.quiet()
    assert await put_all(stores, client, range(4)) == [PutOutcome.STORED]
    assert await get_all(stores, client, range(4)) == [GetOutcome.READ]


async def test_a_waiting_get_follows_pages_to_a_node_that_joined(cluster: StoreCluster) -> None:
    await cluster.node("store-0")
    stores = await cluster.stores()
    client = await open_client(stores)
    waiting = asyncio.ensure_future(get_all(stores, client, range(64), wait=True))
    await asyncio.sleep(0.05)
    await cluster.node("store-1")
    await put_all(stores, client, range(64))
    assert await waiting == [GetOutcome.READ] * 16
    assert all(node.numbers()["num_pages"] > 0 for node in cluster.nodes)


async def test_pages_spread_over_all_nodes_and_one_dead_node_hurts_only_its_own(
    cluster: StoreCluster, world: World
) -> None:
    for i in range(3):
        await cluster.node(f"store-{i}")
    stores = await cluster.stores()
    client = await open_client(stores)
    tokens = range(4 * 60)
    await put_all(stores, client, tokens)
    assert all(node.numbers()["num_pages"] >= 8 for node in cluster.nodes)
    world.cut(NodeId("store-1"))
    placed = placement_of(world.view).place([page.key for page in sequence(tokens)])
    outcomes = await get_all(stores, client, tokens)
    for node_id, outcome in zip(placed, outcomes, strict=True):
        assert outcome is (GetOutcome.FAILED if node_id == "store-1" else GetOutcome.READ)
    world.unlist(NodeId("store-1"))
    outcomes = await get_all(stores, client, tokens)
    for node_id, outcome in zip(placed, outcomes, strict=True):
        assert outcome is (GetOutcome.ABSENT if node_id == "store-1" else GetOutcome.READ)


async def test_match_costs_one_message_per_node(cluster: StoreCluster, world: World) -> None:
    for i in range(3):
        await cluster.node(f"store-{i}")
    client = await open_client(await cluster.stores())
    keys = [page.key for page in sequence(range(400))]
    await client.match(keys, deadline_s=deadline_after(1))
    world.requests.clear()
    await client.match(keys, deadline_s=deadline_after(1))
    assert [type(request) for request in world.requests] == [MatchPages] * 3


async def test_a_dead_node_is_not_connected_to_by_every_call(
    cluster: StoreCluster, world: World
) -> None:
    await cluster.node()
    client = await open_client(await cluster.stores())
    world.cut(NodeId("store-0"))
    keys = [page.key for page in sequence(range(4))]
    for _ in range(50):
        assert await client.match(keys, deadline_s=deadline_after(1)) == [PageState.ABSENT]
    assert client.counters()["connects"] == 1


async def test_concurrent_first_calls_share_one_connect(cluster: StoreCluster) -> None:
    await cluster.node()
    client = await open_client(await cluster.stores())
    keys = [page.key for page in sequence(range(4))]
    await asyncio.gather(*(client.match(keys, deadline_s=deadline_after(1)) for _ in range(20)))
    assert client.counters()["connects"] == 1


async def test_a_silent_node_costs_one_timeout_per_backoff(
    cluster: StoreCluster, world: World
) -> None:
    await cluster.node()
    cluster.client_config = StoreClientConfig(op_timeout_s=0.6, backoff_s=5)
    client = await open_client(await cluster.stores())
    keys = [page.key for page in sequence(range(4))]
    await client.match(keys, deadline_s=deadline_after(1))
    world.reply_lost = PagesMatched
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    for _ in range(10):
        await client.match(keys, deadline_s=deadline_after(5))
    assert 0.5 < loop.time() - started_s < 1.2


async def test_a_draining_store_takes_no_pages_and_finishes_its_readers(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    world.bulk_gate = asyncio.Event()
    reading = asyncio.ensure_future(get_all(stores, client, range(4)))
    await until(lambda: node.numbers()["num_leases"] == 1)
    draining = asyncio.ensure_future(node.drain(5.0))
    await asyncio.sleep(0.05)
    world.publish()
    assert not draining.done()
    assert await put_all(stores, client, [9]) == [PutOutcome.FAILED]
    world.bulk_gate.set()
    assert await reading == [GetOutcome.READ]
    await draining


async def test_closing_a_client_ends_its_calls(cluster: StoreCluster) -> None:
    await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    waiting = asyncio.ensure_future(get_all(stores, client, range(4), wait=True))
    await asyncio.sleep(0.05)
    await client.close()
    async with asyncio.timeout(1):
        assert await waiting in ([GetOutcome.FAILED], [GetOutcome.ABSENT])


async def test_clear_and_stats_reach_every_node(cluster: StoreCluster) -> None:
    for i in range(2):
        await cluster.node(f"store-{i}")
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(80))
    stats = await client.stats(deadline_s=deadline_after(1))
    assert sum(numbers["num_pages"] for numbers in stats.values()) == 20
    assert await client.clear(deadline_s=deadline_after(1)) == 20
    assert await get_all(stores, client, range(80)) == [GetOutcome.ABSENT] * 20


async def test_a_bulk_error_of_the_world_never_escapes(cluster: StoreCluster, world: World) -> None:
    await cluster.node(config=small(4))
    stores = await cluster.stores()
    client = await open_client(stores)
    world.bulk_error = PeerLost("wire cut")
    assert await put_all(stores, client, range(4)) == [PutOutcome.FAILED]
    world.bulk_error = None
    await asyncio.sleep(0.25)  # the back-off
    assert await put_all(stores, client, range(4)) == [PutOutcome.STORED]
