"""Copies between store nodes: replicas, repair, a join, a drain, a damaged copy."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.config import StoreConfig
from kvstore.messages import AcquirePages, PagesAcquired, ReleasePages, StoreDone
from kvstore.page import PageKey
from kvstore.placement import placement_of
from kvstore.replication.messages import TakeCopies
from kvstore.server.node import StoreNode
from kvstore.store import GetOutcome, PutOutcome
from tests.kvstore.cluster import PATIENT_LEASE_S, StoreCluster
from tests.kvstore.contract import Stores, put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import get_all, open_client, raw_channel, small, until
from tests.kvstore.pages import SPEC, sequence
from transfer.errors import HelloRefused, PeerLost
from transfer.identity import NodeId
from transfer.interface import deadline_after
from transfer.registry import Registry

NUM_PAGES = 60
TOKENS = range(4 * NUM_PAGES)
KEYS = [page.key for page in sequence(TOKENS)]


def config(
    replicas: int = 2, *, num_pages: int = 1024, hot_reads: int | None = None
) -> StoreConfig:
    return StoreConfig(
        segment_nbytes=num_pages * SPEC.page_nbytes,
        lease_s=PATIENT_LEASE_S,
        tick_s=0.02,
        replicas=replicas,
        hot_reads=hot_reads,
    )


async def three(cluster: StoreCluster, replicas: int = 2) -> tuple[Stores, StoreClient]:
    """Three nodes and a client."""
    for i in range(3):
        await cluster.node(f"store-{i}", config(replicas))
    stores = await cluster.stores()
    return stores, await open_client(stores)


def held(node: StoreNode, keys: list[PageKey] = KEYS) -> set[PageKey]:
    """Those of ``keys`` that a node holds."""
    found: list[PageKey] = []
    cursor: int | None = 0
    while cursor is not None:
        some, cursor = node.holdings.scan(cursor, 256)
        found += some
    return set(found) & set(keys)


def num_copies(nodes: list[StoreNode]) -> Counter[int]:
    """How many pages lie on how many nodes."""
    copies = Counter(key for node in nodes for key in held(node))
    return Counter(copies[key] for key in KEYS)


def busy(nodes: list[StoreNode]) -> bool:
    numbers = [node.numbers() for node in nodes]
    return any(n["replicas_missing"] or n["repairing"] for n in numbers)


# ---- replicas


async def test_a_put_that_has_returned_is_on_as_many_nodes_as_asked_for(
    cluster: StoreCluster,
) -> None:
    stores, client = await three(cluster)
    assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * NUM_PAGES
    assert num_copies(cluster.nodes) == {2: NUM_PAGES}
    ranks = placement_of(cluster.world.view).ranks(KEYS, 2).tolist()
    for key, nodes in zip(KEYS, ranks, strict=True):
        assert all(key in held(cluster.nodes[node]) for node in nodes)
    assert sum(node.numbers()["copies_received"] for node in cluster.nodes) == NUM_PAGES


async def test_one_replica_copies_nothing(cluster: StoreCluster, world: World) -> None:
    stores, client = await three(cluster, replicas=1)
    await put_all(stores, client, TOKENS)
    assert num_copies(cluster.nodes) == {1: NUM_PAGES}
    assert not any(isinstance(request, TakeCopies) for request in world.requests)


async def test_losing_one_node_of_three_loses_no_page_and_repair_finishes(
    cluster: StoreCluster,
) -> None:
    stores, client = await three(cluster)
    await put_all(stores, client, TOKENS)
    lost, *left = cluster.nodes
    cluster.kill(lost)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES
    await until(lambda: not busy(left))
    assert num_copies(left) == {2: NUM_PAGES}
    assert all(node.numbers()["repairs"] > 0 for node in left)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES


async def test_repair_asks_only_for_pages_whose_holders_have_changed(
    cluster: StoreCluster,
) -> None:
    stores, client = await three(cluster)
    await put_all(stores, client, TOKENS)
    await until(lambda: not busy(cluster.nodes))
    lost, *left = cluster.nodes
    concerned = len(held(lost))
    before = sum(node.numbers()["compared"] for node in left)
    cluster.kill(lost)
    await until(lambda: not busy(left))
    assert sum(node.numbers()["compared"] for node in left) - before == concerned


async def test_two_losses_after_repair_lose_no_page(cluster: StoreCluster) -> None:
    stores, client = await three(cluster)
    await put_all(stores, client, TOKENS)
    for lost in (0, 1):
        cluster.kill(cluster.nodes[lost])
        await until(lambda lost=lost: not busy(cluster.nodes[lost + 1 :]))
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES


async def test_a_node_that_comes_back_empty_is_filled_again(cluster: StoreCluster) -> None:
    stores, client = await three(cluster)
    await put_all(stores, client, TOKENS)
    node = cluster.nodes[0]
    node.abort()
    cluster.world.cut(node.identity.node_id)
    back = await cluster.node("store-0", config())  # before anybody has missed it
    left = cluster.nodes[1:]
    await until(lambda: not busy(left))
    assert len(held(back)) > 0
    assert num_copies(left) == {2: NUM_PAGES}


async def test_a_put_does_not_wait_for_a_node_that_does_not_answer(
    cluster: StoreCluster, world: World
) -> None:
    stores, client = await three(cluster)
    world.cut(NodeId("store-1"))  # still a member
    async with asyncio.timeout(4):
        outcomes = await put_all(stores, client, TOKENS)
    assert outcomes == [PutOutcome.STORED] * NUM_PAGES
    left = [cluster.nodes[0], cluster.nodes[2]]
    assert num_copies(left) == {2: NUM_PAGES}, "the next in rank has taken its place"
    assert client.counters()["puts_without_copies"] == 0
    assert all(node.numbers()["replicas_missing"] for node in left), "it is owed them still"
    cluster.nodes[1].abort()
    world.unlist(NodeId("store-1"))
    await until(lambda: not busy(left))
    assert num_copies(left) == {2: NUM_PAGES}


async def test_a_put_that_waits_for_a_node_that_leaves_waits_for_its_successor(
    cluster: StoreCluster, world: World
) -> None:
    stores, client = await three(cluster)
    stuck, *left = cluster.nodes
    world.stuck = stuck.region  # copies into it do not arrive
    second = placement_of(world.view).ranks(KEYS, 2)[:, 1].tolist()
    num_stuck = second.count(0)
    putting = asyncio.ensure_future(put_all(stores, client, TOKENS))
    arrived = NUM_PAGES - num_stuck
    await until(lambda: sum(n.numbers()["copies_received"] for n in cluster.nodes) == arrived)
    assert not putting.done()
    cluster.kill(stuck)
    # those that went to the lost node itself are found where they were copied
    assert set(await putting) <= {PutOutcome.STORED, PutOutcome.PRESENT}
    assert num_stuck > 0
    assert client.counters()["puts_without_copies"] == 0
    in_both = held(left[0]) & held(left[1])
    assert {key for key, node in zip(KEYS, second, strict=True) if node == 0} <= in_both


async def test_with_nobody_else_a_put_returns_without_the_copy_and_it_is_made_later(
    cluster: StoreCluster, world: World
) -> None:
    for i in range(2):
        await cluster.node(f"store-{i}", config())
    stores = await cluster.stores()
    client = await open_client(stores)
    world.copy_error = PeerLost("nothing arrives")
    async with asyncio.timeout(4):
        outcomes = await put_all(stores, client, TOKENS)
    assert outcomes == [PutOutcome.STORED] * NUM_PAGES
    assert client.counters()["puts_without_copies"] == NUM_PAGES
    world.copy_error = None
    await until(lambda: num_copies(cluster.nodes) == {2: NUM_PAGES})


async def test_a_copy_that_breaks_is_sent_again(cluster: StoreCluster, world: World) -> None:
    cluster.always_write()
    for i in range(2):
        await cluster.node(f"store-{i}", config())
    stores = await cluster.stores()
    client = await open_client(stores)
    world.fail_read_at = len(world.reads)  # the first read is a copy's
    assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * NUM_PAGES
    assert num_copies(cluster.nodes) == {2: NUM_PAGES}
    assert sum(node.numbers()["copies_broken"] for node in cluster.nodes) > 0


async def test_nodes_that_disagree_about_replicas_are_refused_with_both_sides(
    cluster: StoreCluster,
) -> None:
    registry = Registry()
    one = await cluster.node("store-0", config(1))
    two = await cluster.node("store-1", config(2))
    infos = {info.identity.node_id: info for info, _ in cluster.world.infos.values()}
    first, second = (infos[node.identity.node_id] for node in (one, two))
    registry.register(0.0, first, one.status())
    with pytest.raises(HelloRefused, match=r"replicas=2.*against.*replicas=1"):
        registry.register(0.0, second, two.status())


async def test_a_page_that_is_leased_to_be_copied_does_not_look_recently_used(
    cluster: StoreCluster,
) -> None:
    node = await cluster.node("store-0", small(3))
    stores = await cluster.stores()
    client = await open_client(stores)
    prompts = [range(4 * i, 4 * i + 4) for i in range(4)]
    for prompt in prompts[:3]:
        await put_all(stores, client, prompt)
    channel = await raw_channel(cluster, node.address)
    oldest = sequence(prompts[0])[0].key
    leased = await channel.request(
        AcquirePages(keys=(oldest,), touch=False), PagesAcquired, deadline_s=deadline_after(1)
    )
    await channel.request(
        ReleasePages(incarnation=leased.incarnation, lease_id=leased.lease_id),
        StoreDone,
        deadline_s=deadline_after(1),
    )
    await put_all(stores, client, prompts[3])
    assert not held(node, [oldest])


# ---- damage


async def test_a_page_corrupted_on_one_replica_is_dropped_and_read_from_the_other(
    cluster: StoreCluster,
) -> None:
    stores, client = await three(cluster)
    await put_all(stores, client, TOKENS)
    first = placement_of(cluster.world.view).place(KEYS)[0]
    node = next(n for n in cluster.nodes if n.identity.node_id == first)
    for start in range(0, node.region.nbytes, SPEC.page_nbytes):
        node.region.view[start] ^= 1
    others = {n.identity.node_id: held(n) for n in cluster.nodes if n is not node}
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES
    await client.quiet()
    assert node.numbers()["corrupt_dropped"] > 0
    # and they come back from the other replica, whole
    await until(lambda: num_copies(cluster.nodes) == {2: NUM_PAGES})
    assert {n.identity.node_id: held(n) for n in cluster.nodes if n is not node} == others
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES
    assert node.numbers()["copies_received"] > 0


async def test_damage_in_the_senders_memory_is_not_copied_on(cluster: StoreCluster) -> None:
    stores, client = await three(cluster)
    await put_all(stores, client, TOKENS)
    lost, *left = cluster.nodes
    await until(lambda: not busy(cluster.nodes))
    sender = left[0]
    for start in range(0, sender.region.nbytes, SPEC.page_nbytes):
        sender.region.view[start] ^= 1
    only_there = held(sender) & held(lost)
    cluster.kill(lost)
    await until(lambda: not busy(left))
    assert not only_there & held(left[1])
    assert sender.numbers()["corrupt_dropped"] >= len(only_there) > 0


# ---- joins and drains


async def test_a_join_moves_only_the_new_nodes_share_and_the_old_owners_let_go(
    cluster: StoreCluster,
) -> None:
    for i in range(3):
        await cluster.node(f"store-{i}", config(1))
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    before = {node.identity.node_id: held(node) for node in cluster.nodes}
    new = await cluster.node("store-3", config(1))
    await until(lambda: not busy(cluster.nodes))
    placed = placement_of(cluster.world.view).place(KEYS)
    share = {key for key, node_id in zip(KEYS, placed, strict=True) if node_id == "store-3"}
    assert held(new) == share
    assert len(share) > 0
    assert sum(node.numbers()["copies_received"] for node in cluster.nodes) == len(share)
    await until(lambda: sum(n.numbers()["surplus_cooled"] for n in cluster.nodes) == len(share))
    for node in cluster.nodes[:3]:
        assert held(node) >= before[node.identity.node_id] - share
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES


async def test_reads_during_a_join_fall_back_to_the_previous_owner(
    cluster: StoreCluster, world: World
) -> None:
    for i in range(3):
        await cluster.node(f"store-{i}", config(1))
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    world.copy_error = PeerLost("no copies yet")
    new = await cluster.node("store-3", config(1))
    assert not held(new)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES
    states = await client.match(KEYS, deadline_s=deadline_after(1))
    assert all(state.present for state in states)


async def test_a_draining_node_hands_its_pages_on_before_it_closes(
    cluster: StoreCluster,
) -> None:
    stores, client = await three(cluster, replicas=1)
    await put_all(stores, client, TOKENS)
    leaving, *left = cluster.nodes
    mine = held(leaving)
    draining = asyncio.ensure_future(leaving.drain(10.0))
    await asyncio.sleep(0)
    cluster.world.publish()
    await draining
    await leaving.close()
    cluster.world.cut(leaving.identity.node_id)
    assert len(mine) > 0
    assert num_copies(left) == {1: NUM_PAGES}
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES


async def test_a_drain_ends_in_time_when_nobody_takes_the_pages(
    cluster: StoreCluster, world: World
) -> None:
    stores, client = await three(cluster, replicas=1)
    await put_all(stores, client, TOKENS)
    world.copy_error = PeerLost("nothing arrives")
    started_s = asyncio.get_running_loop().time()
    await cluster.nodes[0].drain(0.5)
    assert asyncio.get_running_loop().time() - started_s < 2.0


async def test_the_last_node_drains_at_once(cluster: StoreCluster) -> None:
    node = await cluster.node("store-0", config(2))
    stores = await cluster.stores()
    await put_all(stores, await open_client(stores), TOKENS)
    async with asyncio.timeout(1):
        await node.drain(10.0)


# ---- hot pages


async def test_a_hot_page_gains_replicas_and_reads_spread_over_them(
    cluster: StoreCluster, world: World
) -> None:
    for i in range(3):
        await cluster.node(f"store-{i}", config(1, hot_reads=4))
    stores = await cluster.stores()
    client = await open_client(stores)
    tokens = range(4)
    await put_all(stores, client, tokens)
    key = sequence(tokens)[0].key

    async def read() -> None:
        assert await get_all(stores, client, tokens) == [GetOutcome.READ]

    for _ in range(12):
        await read()
    await until(lambda: all(held(node, [key]) for node in cluster.nodes))
    await read()  # is told
    world.granted.clear()
    for _ in range(30):
        await read()
    load = Counter(world.granted)
    assert len(load) == 3
    assert max(load.values()) <= 1.5 * min(load.values())


async def test_a_client_that_is_told_wrong_reads_the_page_all_the_same(
    cluster: StoreCluster,
) -> None:
    stores, client = await three(cluster, replicas=1)
    await put_all(stores, client, TOKENS)
    for key in KEYS:
        client.links.hot.note(key, 3, asyncio.get_running_loop().time())
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES
    assert len(client.links.hot) < NUM_PAGES, "what was not where it should be is forgotten"
