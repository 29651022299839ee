"""Store nodes that drain while others do, too: nobody waits for nodes that take nothing."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.replication import departures
from kvstore.replication.departures import SILENCE_S, Departures
from kvstore.server.node import StoreNode
from kvstore.store import GetOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import get_all, open_client, until
from tests.kvstore.test_replication import NUM_PAGES, TOKENS, busy, config, held, num_copies, three
from transfer.errors import DeadlineExceeded, PeerLost, PeerUnreachable, RemoteFailed
from transfer.identity import Role, new_identity

DRAIN_S = 600.0  # no test waits for it
LIMIT_S = 30.0


async def drain_all(nodes: list[StoreNode]) -> None:
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(node.drain(DRAIN_S) for node in nodes))


async def filled(cluster: StoreCluster, replicas: int) -> None:
    """Three nodes, with pages on all; from here on the view changes only when a test says so."""
    stores, client = await three(cluster, replicas)
    await put_all(stores, client, TOKENS)
    await until(lambda: not busy(cluster.nodes))
    assert all(held(node) for node in cluster.nodes)
    await client.close()


# ---- whole clusters


@pytest.mark.parametrize("replicas", [1, 2])
async def test_nodes_that_all_drain_end_at_once_though_the_view_does_not_change(
    cluster: StoreCluster, replicas: int
) -> None:
    await filled(cluster, replicas)
    before = [held(node) for node in cluster.nodes]
    await drain_all(cluster.nodes)
    assert [held(node) for node in cluster.nodes] == before
    assert not busy(cluster.nodes)


async def test_a_drain_under_way_ends_when_the_last_of_the_others_drains(
    cluster: StoreCluster, world: World
) -> None:
    await filled(cluster, 1)
    world.bulk_gate = asyncio.Event()  # no copy arrives: the drain lasts
    first, *others = cluster.nodes
    draining = asyncio.ensure_future(first.drain(DRAIN_S))
    await until(lambda: first.numbers()["replicas_missing"] > 0)
    assert not draining.done()
    await drain_all(others)
    async with asyncio.timeout(LIMIT_S):
        await draining
    assert not first.numbers()["replicas_missing"]


async def test_a_drain_under_way_ends_when_the_view_loses_all_others(
    cluster: StoreCluster, world: World
) -> None:
    await filled(cluster, 1)
    world.bulk_gate = asyncio.Event()  # no copy arrives: the drain lasts
    first, *others = cluster.nodes
    draining = asyncio.ensure_future(first.drain(DRAIN_S))
    await until(lambda: first.numbers()["replicas_missing"] > 0)
    for node in others:
        world.unlist(node.identity.node_id)
    async with asyncio.timeout(LIMIT_S):
        await draining
    assert not first.numbers()["replicas_missing"]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_two_nodes_that_drain_hand_all_their_pages_to_the_third(
    cluster: StoreCluster, replicas: int
) -> None:
    stores, client = await three(cluster, replicas)
    await put_all(stores, client, TOKENS)
    *leaving, staying = cluster.nodes
    await drain_all(leaving)
    assert num_copies([staying]) == {1: NUM_PAGES}
    for node in leaving:
        await node.close()
        cluster.world.cut(node.identity.node_id)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES


async def test_nodes_that_are_gone_without_a_word_are_not_waited_for(
    cluster: StoreCluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "SILENCE_S", 0.0)
    await filled(cluster, 2)
    last, *gone = cluster.nodes
    for node in gone:
        world.cut(node.identity.node_id)
    await drain_all([last])
    assert not last.numbers()["replicas_missing"]


async def test_nodes_that_closed_before_this_one_drains_are_not_waited_for(
    cluster: StoreCluster, world: World
) -> None:
    await filled(cluster, 2)
    last, *gone = cluster.nodes
    view = world.view
    await drain_all(gone)
    for node in gone:
        world.cut(node.identity.node_id)
    assert world.view is view
    await drain_all([last])
    assert held(last)


async def test_another_life_of_a_node_that_drained_is_given_pages(cluster: StoreCluster) -> None:
    for i in range(2):
        await cluster.node(f"store-{i}", config(1))
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    staying, leaving = cluster.nodes
    await drain_all([leaving])
    cluster.kill(leaving)
    new = await cluster.node("store-1", config(1))
    await drain_all([staying])
    assert num_copies([new]) == {1: NUM_PAGES}


# ---- the verdict

NODE = new_identity(Role.STORE, "store-7")


def verdicts() -> tuple[Departures, list[None]]:
    calls: list[None] = []
    return Departures(lambda: calls.append(None)), calls


@pytest.mark.parametrize("code", ["draining", "closed"])
def test_a_node_that_refuses_because_it_parts_has_departed_in_this_life(code: str) -> None:
    verdict, calls = verdicts()
    verdict.note_failure(NODE, RemoteFailed(code, "no"), 0.0)
    verdict.note_parting(NODE)
    assert verdict.has_departed(NODE)
    assert len(calls) == 1
    assert not verdict.has_departed(new_identity(Role.STORE, "store-7"))


def test_silence_counts_from_the_drain_on_and_an_answer_ends_it() -> None:
    verdict, calls = verdicts()
    verdict.note_failure(NODE, PeerLost("before"), 0.0)
    verdict.count_silence()
    verdict.note_failure(NODE, PeerUnreachable("first"), 100.0)
    verdict.note_answer(NODE)
    verdict.note_failure(NODE, DeadlineExceeded("first again"), 100.0 + SILENCE_S)
    verdict.note_failure(NODE, RemoteFailed("busy", "an answer"), 101.0 + SILENCE_S)
    verdict.note_failure(NODE, PeerLost("first again"), 102.0 + SILENCE_S)
    assert not verdict.has_departed(NODE)
    verdict.note_failure(NODE, PeerLost("last"), 102.0 + 2 * SILENCE_S)
    assert verdict.has_departed(NODE)
    assert len(calls) == 1


def test_failures_before_a_drain_are_no_departure() -> None:
    verdict, calls = verdicts()
    verdict.note_failure(NODE, PeerLost("one"), 0.0)
    verdict.note_failure(NODE, PeerLost("two"), 1000.0)
    assert not verdict.has_departed(NODE)
    assert not calls
