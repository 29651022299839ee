"""A clear reaches every copy: what nodes copy to one another meanwhile brings nothing back."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
import pytest

from kvstore.config import StoreConfig
from kvstore.messages import (
    AcquirePages,
    ClearStore,
    LeasedPage,
    MatchPages,
    OpenStore,
    PagesAcquired,
    PagesMatched,
    StoreDone,
    StoreOpened,
    pack_keys,
    states_of,
)
from kvstore.replication.clears import CLEARS_KEPT_MAX, FENCE_S_MAX, KEPT_S, Clears
from kvstore.replication.messages import CopiesTaken, CopyStatus, TakeCopies
from kvstore.server.node import StoreNode
from kvstore.store import PutOutcome, PutPolicy
from tests.kvstore.cluster import PATIENT_LEASE_S, StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import open_client, raw_channel, until
from tests.kvstore.pages import SPEC, sequence
from transfer.interface import deadline_after

R = TypeVar("R", bound=msgspec.Struct)

A, B = b"a" * 32, b"b" * 32
TOKENS = range(40)
KEYS = tuple(page.key for page in sequence(TOKENS))


def test_copies_are_refused_from_who_has_not_done_what_was_begun_here() -> None:
    clears = Clears()
    clears.begin("x", A, until_s=1e9, now_s=0.0)
    assert clears.done() == ()
    assert clears.fences(A, (), 1.0)
    assert clears.fences(A, ("y",), 1.0)
    assert not clears.fences(A, ("y", "x"), 1.0)
    assert not clears.fences(B, (), 1.0)
    clears.end("x")
    assert clears.done() == ("x",)
    assert clears.fences(A, (), 1.0), "done here says nothing of there"


def test_a_clear_of_everything_covers_every_namespace() -> None:
    clears = Clears()
    clears.begin("x", None, until_s=1e9, now_s=0.0)
    assert clears.fences(A, (), 1.0)
    assert clears.fences(b"", (), 1.0)


def test_a_node_that_a_clear_never_reached_is_refused_only_while_it_might_be() -> None:
    clears = Clears()
    clears.begin("x", A, until_s=10.0, now_s=0.0)
    assert clears.fences(A, (), 9.9)
    assert not clears.fences(A, (), 10.0)
    clears.begin("y", B, until_s=1e9, now_s=0.0)
    assert clears.fences(B, (), FENCE_S_MAX - 0.1)
    assert not clears.fences(B, (), FENCE_S_MAX)


def test_a_repeated_clear_is_still_done_and_one_without_a_name_is_not_kept() -> None:
    clears = Clears()
    clears.begin("x", A, until_s=1e9, now_s=0.0)
    clears.end("x")
    clears.begin("x", A, until_s=1e9, now_s=1.0)
    clears.begin("", A, until_s=1e9, now_s=1.0)
    clears.end("")
    clears.end("never begun")
    assert clears.done() == ("x",)
    assert not clears.fences(A, ("x",), 2.0)


def test_memory_of_clears_is_bounded_in_number_and_time() -> None:
    clears = Clears()
    for number in range(2 * CLEARS_KEPT_MAX):
        clears.begin(f"{number}", A, until_s=1e9, now_s=0.0)
        clears.end(f"{number}")
    assert len(clears.done()) == CLEARS_KEPT_MAX
    clears.begin("later", A, until_s=1e9, now_s=KEPT_S)
    assert clears.done() == ()


class Pair:
    """Two nodes that keep one copy of each page, and the pages of the first, leased."""

    def __init__(self, cluster: StoreCluster, first: StoreNode, second: StoreNode) -> None:
        self._cluster = cluster
        self.first, self.second = first, second
        self.leased: tuple[LeasedPage, ...] = ()
        self._token = b""

    async def ask(self, node: StoreNode, message: msgspec.Struct, reply: type[R]) -> R:
        channel = await raw_channel(self._cluster, node.address)
        return await channel.request(message, reply, deadline_s=deadline_after(5))

    async def fill(self) -> None:
        stores = await self._cluster.stores()
        client = await open_client(stores)
        assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * len(KEYS)
        self._token = (await self.ask(self.first, OpenStore(), StoreOpened)).read_token
        self.leased = (await self.ask(self.first, AcquirePages(keys=KEYS), PagesAcquired)).pages
        assert 0 < len(self.leased) < len(KEYS)

    async def copy(self, *clears: str) -> set[CopyStatus]:
        """Offer the pages of the first node to the second, as the first would."""
        message = TakeCopies(
            spec=SPEC,
            policy=PutPolicy(namespace=A),
            read_token=self._token,
            lease_s=PATIENT_LEASE_S,
            pages=self.leased,
            clears=clears,
        )
        return set((await self.ask(self.second, message, CopiesTaken)).statuses)

    async def copies(self) -> int:
        keys = pack_keys([page.record.key for page in self.leased])
        codes = (await self.ask(self.second, MatchPages(keys), PagesMatched)).codes
        return sum(state.present for state in states_of(codes))

    async def clear(self, node: StoreNode, namespace: bytes | None, clear_id: str) -> None:
        await self.ask(node, ClearStore(namespace, clear_id), StoreDone)


@pytest.fixture
async def pair(cluster: StoreCluster) -> Pair:
    config = StoreConfig(
        segment_nbytes=64 * SPEC.page_nbytes, lease_s=PATIENT_LEASE_S, tick_s=0.02, hot_reads=None
    )
    made = Pair(cluster, *[await cluster.node(f"store-{i}", config) for i in range(2)])
    await made.fill()
    return made


async def test_a_node_that_was_cleared_takes_no_copies_from_one_that_was_not(pair: Pair) -> None:
    await pair.clear(pair.second, A, "x")
    assert await pair.copy() == {CopyStatus.CLEARED}
    assert await pair.copies() == 0
    assert await pair.copy("x") == {CopyStatus.TAKEN}, "put after the clear, then"
    assert await pair.copies() == len(pair.leased)


async def test_a_clear_of_another_namespace_refuses_nothing(pair: Pair) -> None:
    await pair.clear(pair.second, B, "x")
    assert await pair.copy() == {CopyStatus.TAKEN}


async def test_a_copy_on_its_way_when_its_receiver_is_cleared_is_not_kept(
    pair: Pair, world: World
) -> None:
    world.bulk_gate = asyncio.Event()
    copying = asyncio.ensure_future(pair.copy())
    await until(lambda: pair.second.numbers()["num_writing"] == len(pair.leased))
    await pair.clear(pair.second, None, "x")
    world.bulk_gate.set()
    assert await copying == {CopyStatus.CLEARED}
    assert await pair.copies() == 0


async def test_after_a_clear_of_all_nodes_new_pages_get_their_copies_at_once(
    cluster: StoreCluster,
) -> None:
    config = StoreConfig(
        segment_nbytes=64 * SPEC.page_nbytes, lease_s=PATIENT_LEASE_S, tick_s=0.02, replicas=2
    )
    nodes = [await cluster.node(f"store-{i}", config) for i in range(2)]
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    assert await client.clear(deadline_s=deadline_after(5)) == 2 * len(KEYS)
    assert [node.numbers()["num_pages"] for node in nodes] == [0, 0]
    await put_all(stores, client, TOKENS)
    assert [node.numbers()["num_pages"] for node in nodes] == [len(KEYS), len(KEYS)]
    assert sum(node.numbers()["copies_cleared"] for node in nodes) == 0
