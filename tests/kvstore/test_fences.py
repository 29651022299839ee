"""Copies that a clear stands against: made at once if they are younger, else owed till it is over.

And what must not go unnoticed: a task that copies, and has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.config import StoreConfig
from kvstore.messages import ClearStore, StoreDone
from kvstore.page import PageKey
from kvstore.replication import sending
from kvstore.replication.clears import FENCE_S_MAX, Clears
from kvstore.replication.messages import SendCopies
from kvstore.replication.put_times import PutTimes
from kvstore.replication.sending import CopySender
from kvstore.server.node import StoreNode
from kvstore.store import GetOutcome, PutOutcome
from tests.kvstore.cluster import PATIENT_LEASE_S, StoreCluster
from tests.kvstore.contract import Stores, put_all
from tests.kvstore.fakes import FakeNetwork
from tests.kvstore.faulty import get_all, open_client, raw_channel, until
from tests.kvstore.pages import SPEC, sequence
from transfer.channel import Hello
from transfer.interface import deadline_after

TOKENS = range(40)
KEYS = tuple(page.key for page in sequence(TOKENS))
ALL = [len(KEYS)] * 2
CONFIG = StoreConfig(
    segment_nbytes=64 * SPEC.page_nbytes,
    lease_s=PATIENT_LEASE_S,
    tick_s=0.02,
    replicas=2,
    hot_reads=None,
)


def test_a_refusal_names_what_the_sender_has_not_done_and_when_it_was_begun() -> None:
    clears = Clears()
    clears.begin("x", None, until_s=50.0, now_s=10.0)
    clears.begin("y", b"a", until_s=20.0, now_s=11.0)
    assert clears.fences(b"a", (), 12.0) == (("x", 2.0, 38.0), ("y", 1.0, 8.0))
    assert clears.fences(b"a", ("x",), 12.0) == (("y", 1.0, 8.0),)
    assert clears.fences(b"b", (), 12.0) == (("x", 2.0, 38.0),)


def test_only_a_page_whose_put_was_seen_is_known_to_be_younger() -> None:
    times = PutTimes()
    times.note(KEYS[:1], 5.0)
    assert times.is_after(KEYS[0], 4.9)
    assert not times.is_after(KEYS[0], 5.0)
    assert not times.is_after(KEYS[1], 0.0)
    times.note(KEYS[:1], 7.0)
    assert times.is_after(KEYS[0], 6.0), "put anew"


def test_memory_of_puts_is_bounded_in_number_and_time() -> None:
    times = PutTimes(num_max=4)
    times.note(KEYS[:3], 1.0)
    times.note(KEYS[3:8], 2.0)
    assert len(times) == 4
    assert not times.is_after(KEYS[3], 0.0)
    assert times.is_after(KEYS[4], 0.0)
    times.note(KEYS[:1], 2.0 + FENCE_S_MAX)
    assert len(times) == 1


async def two(cluster: StoreCluster) -> tuple[Stores, StoreClient]:
    for i in range(2):
        await cluster.node(f"store-{i}", CONFIG)
    stores = await cluster.stores()
    return stores, await open_client(stores)


async def clear(cluster: StoreCluster, node: StoreNode) -> None:
    """Clear all, but tell one node only."""
    channel = await raw_channel(cluster, node.address)
    await channel.request(ClearStore(None, "x"), StoreDone, deadline_s=deadline_after(60))


async def have_sent(
    cluster: StoreCluster, target: StoreNode, sender: StoreNode, keys: Sequence[PageKey]
) -> None:
    """Have ``target`` ask ``sender`` for pages."""
    hello = Hello(identity=target.identity)
    deadline_s = deadline_after(5)
    network = FakeNetwork(cluster.world)
    channel = await network.connect(sender.address, hello, deadline_s=deadline_s)
    asked = SendCopies(keys=tuple(keys))
    assert (await channel.request(asked, StoreDone, deadline_s=deadline_s)).count == len(keys)


def sizes(cluster: StoreCluster) -> list[float]:
    return [node.numbers()["num_pages"] for node in cluster.nodes]


async def test_pages_put_after_a_clear_are_copied_though_their_node_was_not_told(
    cluster: StoreCluster,
) -> None:
    stores, client = await two(cluster)
    told, other = cluster.nodes
    await clear(cluster, told)
    assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * len(KEYS)
    assert sizes(cluster) == ALL
    assert other.numbers()["copies_cleared"] > 0, "the clear stood against them"
    assert client.counters()["puts_without_copies"] == 0
    cluster.kill(other)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * len(KEYS)


async def test_pages_put_after_a_clear_are_copied_by_a_node_that_was_started_after_it(
    cluster: StoreCluster,
) -> None:
    told = await cluster.node("store-0", CONFIG)
    await clear(cluster, told)
    await cluster.node("store-1", CONFIG)
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * len(KEYS)
    assert sizes(cluster) == ALL


async def test_a_page_older_than_a_clear_stays_owed_until_no_node_can_begin_it(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "FENCE_S_MAX", 0.05)  # it asks again soon
    stores, client = await two(cluster)
    told, other = cluster.nodes
    await put_all(stores, client, TOKENS)
    await clear(cluster, told)
    await have_sent(cluster, told, other, KEYS)
    await until(lambda: other.numbers()["copies_cleared"] >= 2 * len(KEYS))
    assert other.numbers()["replicas_missing"] == len(KEYS)
    assert sizes(cluster) == [0, len(KEYS)]
    assert told._handlers is not None
    told._handlers.clears = cleared = Clears()
    assert told._replicator is not None
    told._replicator._own.clears = cleared  # the time of the clear is over
    await until(lambda: not other.numbers()["replicas_missing"])
    assert sizes(cluster) == ALL


async def test_nobody_waits_for_a_copy_that_a_clear_stands_against(cluster: StoreCluster) -> None:
    stores, client = await two(cluster)
    told, other = cluster.nodes
    await put_all(stores, client, TOKENS)
    await clear(cluster, told)
    await have_sent(cluster, told, other, KEYS)
    await until(lambda: other.numbers()["copies_cleared"] >= len(KEYS))
    async with asyncio.timeout(2):
        await put_all(stores, client, TOKENS)
    assert other.numbers()["replicas_missing"] > 0


async def test_a_copying_task_that_ends_by_an_error_of_ours_makes_the_node_unhealthy(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: CopySender, keys: list[PageKey]) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(CopySender, "_send", broken)
    stores, client = await two(cluster)
    assert all(node.healthy for node in cluster.nodes)
    putting = asyncio.ensure_future(put_all(stores, client, TOKENS))
    await until(lambda: not any(node.healthy for node in cluster.nodes))
    putting.cancel()
    await asyncio.wait([putting])
    assert all(node.numbers()["copy_tasks_failed"] > 0 for node in cluster.nodes)
    assert "a bug" in caplog.text
