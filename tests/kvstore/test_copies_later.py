"""Copies into a node that has to make room first: they come at its pace, and none is given up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import pytest

from kvstore.config import StoreConfig
from kvstore.messages import (
    AbortPages,
    AcquirePages,
    OpenStore,
    PageGrant,
    PagesAcquired,
    PagesReserved,
    ReservePages,
    StoreDone,
    StoreOpened,
)
from kvstore.page import PageKey
from kvstore.replication import receiving
from kvstore.replication.copy_queue import COPY_TRIES_MAX
from kvstore.replication.messages import CopiesTaken, CopyStatus, TakeCopies
from kvstore.replication.receiving import TAKES_MAX
from kvstore.replication.sending import BATCH_PAGES_MAX
from kvstore.server.node import StoreNode
from kvstore.server.tier import Tier, TierPage
from kvstore.store import PageIdentity, PutOutcome, PutPolicy
from tests.kvstore.cluster import PATIENT_LEASE_S, StoreCluster
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.fakes import FakeMembership, World
from tests.kvstore.faulty import PATIENT, open_client, raw_channel, until
from tests.kvstore.pages import SPEC, filled, sequence
from transfer.channel import Caller
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

R = TypeVar("R", bound=msgspec.Struct)
DISK_TURNS = 60  # of the loop, for one page: several messages come and go meanwhile
NUM_MEMORY = 48  # pages in the memory of a node with a slow disk
PAGES = [page for start in range(0, 100_000, 1000) for page in sequence(range(start, start + 16))]
KEYS = [page.key for page in PAGES]
NUM_MESSAGES_MAX = len(KEYS) // 8  # a machine that stands still ends batches early


class SlowTier(FakeTier):
    async def store(self, page: TierPage, data: memoryview) -> bool:
        for _ in range(DISK_TURNS):
            await asyncio.sleep(0)
        return await super().store(page, data)


async def start(
    cluster: StoreCluster, name: str, num_pages: int, tier: Tier | None = None, replicas: int = 1
) -> StoreNode:
    node = StoreNode(
        StoreConfig(
            segment_nbytes=num_pages * SPEC.page_nbytes,
            lease_s=PATIENT_LEASE_S,
            tick_s=0.02,
            replicas=replicas,
            hot_reads=None,
        ),
        identity=new_identity(Role.STORE, name),
        network=cluster.network(),
        transfer=await cluster.transfer(),
        membership=FakeMembership(cluster.world),
        tier=tier,
    )
    await node.start()
    cluster.nodes.append(node)
    return node


@pytest.fixture
def patient(cluster: StoreCluster) -> StoreCluster:
    cluster.client_config = PATIENT.model_copy(update={"room_wait_s": 30.0})
    return cluster


async def put(cluster: StoreCluster, pages: list[PageIdentity]) -> Counter[str]:
    """Store all; returns what the client counted."""
    stores = await cluster.stores()
    client = await open_client(stores)
    region, puts = filled(stores.transfer, pages)
    result = await client.put(puts, source=region, deadline_s=deadline_after(60))
    assert result.outcomes == [PutOutcome.STORED] * len(pages)
    return Counter(client.counters())


def num_messages(world: World) -> int:
    return sum(isinstance(request, TakeCopies) for request in world.requests)


def held(node: StoreNode) -> set[PageKey]:
    """In memory or on the SSD."""
    return {key for key in KEYS if node._directory.state(key).present}


# ---- a slow disk


async def test_a_drain_into_a_node_with_a_slow_ssd_loses_nothing_and_sends_few_messages(
    patient: StoreCluster, world: World, patience: None
) -> None:
    leaving = await start(patient, "store-0", 2 * len(KEYS))
    await put(patient, PAGES)
    left = await start(patient, "store-1", NUM_MEMORY, SlowTier(len(KEYS)))
    await leaving.drain(60.0)
    assert held(left) == set(KEYS)
    assert num_messages(world) < NUM_MESSAGES_MAX
    numbers = leaving.numbers()
    assert numbers["copies_given_up"] == numbers["copies_refused"] == 0
    assert left.numbers().get("evicted_unspilled", 0) == 0


async def test_a_burst_of_puts_returns_with_its_replicas_on_nodes_with_slow_ssds(
    patient: StoreCluster, world: World, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    monkeypatch.setattr(receiving, "ROOM_WAIT_S", 30.0)  # however slow the machine is
    num_memory = 3 * BATCH_PAGES_MAX  # two batches are leased in either node's memory at once
    prompts = [sequence(range(i, i + 256)) for i in range(0, 16_000, 1000)]
    for i in range(2):
        await start(patient, f"store-{i}", num_memory, SlowTier(2000), replicas=2)
    for pages in prompts:
        assert (await put(patient, pages))["puts_without_copies"] == 0
    for node in patient.nodes:
        assert all(node._directory.state(page.key).present for pages in prompts for page in pages)
    assert num_messages(world) <= sum(map(len, prompts)) / 2


# ---- the sender

Answer = Callable[[TakeCopies, Caller], Awaitable[CopiesTaken]]


async def pair(cluster: StoreCluster, answer: Answer) -> None:
    """Two nodes, and what they answer to ``TakeCopies``."""
    for i in range(2):
        node = await start(cluster, f"store-{i}", 2 * len(KEYS), replicas=2)
        cluster.world.listeners[node.address].service.requests[TakeCopies] = answer


async def test_a_target_that_takes_one_page_a_message_gets_them_all(
    patient: StoreCluster, world: World
) -> None:
    taken: list[PageKey] = []

    async def one_by_one(message: TakeCopies, caller: Caller) -> CopiesTaken:
        taken.append(message.pages[0].record.key)
        later = (CopyStatus.LATER,) * (len(message.pages) - 1)
        return CopiesTaken((CopyStatus.TAKEN, *later))

    await pair(patient, one_by_one)
    counted = await put(patient, PAGES)
    assert counted["puts_without_copies"] == 0
    assert sorted(taken) == sorted(KEYS)


async def test_a_target_that_never_has_room_is_not_waited_for_for_ever(
    patient: StoreCluster, world: World
) -> None:
    async def never(message: TakeCopies, caller: Caller) -> CopiesTaken:
        return CopiesTaken((CopyStatus.LATER,) * len(message.pages))

    await pair(patient, never)
    counted = await put(patient, PAGES[:1])
    assert counted["puts_without_copies"] == 1
    # a repair compares all pages at once, and again after a pause
    assert COPY_TRIES_MAX <= num_messages(world) <= 2 * COPY_TRIES_MAX


# ---- the receiver


class Bench:
    """A node that is offered copies, and pages of another node, leased."""

    def __init__(self, cluster: StoreCluster, source: StoreNode) -> None:
        self._cluster = cluster
        self.source = source
        self.leased = PagesAcquired(incarnation="", lease_id=0, lease_s=0.0, pages=())
        self._token = b""

    async def ask(self, node: StoreNode, message: msgspec.Struct, reply: type[R]) -> R:
        channel = await raw_channel(self._cluster, node.address)
        return await channel.request(message, reply, deadline_s=deadline_after(60))

    async def lease(self, keys: list[PageKey]) -> None:
        self._token = (await self.ask(self.source, OpenStore(), StoreOpened)).read_token
        request = AcquirePages(keys=tuple(keys))
        self.leased = await self.ask(self.source, request, PagesAcquired)
        assert len(self.leased.pages) == len(keys)

    async def offer(
        self, node: StoreNode, *positions: int, lease_s: float = PATIENT_LEASE_S
    ) -> tuple[CopyStatus, ...]:
        message = TakeCopies(
            spec=SPEC,
            policy=PutPolicy(),
            read_token=self._token,
            lease_s=lease_s,
            pages=tuple(self.leased.pages[i] for i in positions),
        )
        return (await self.ask(node, message, CopiesTaken)).statuses


@pytest.fixture
async def bench(patient: StoreCluster, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Its pages are of a node that is a member no more, so that none is copied anywhere else."""
    source = await start(patient, "store-0", 2 * len(KEYS))
    await put(patient, PAGES[:BATCH_PAGES_MAX])
    made = Bench(patient, source)
    await made.lease(KEYS[:BATCH_PAGES_MAX])
    patient.world.unlist(source.identity.node_id)
    return made


async def test_a_batch_that_waited_too_long_for_its_turn_pushes_out_nothing(
    bench: Bench, patient: StoreCluster, world: World, patience: None
) -> None:
    tier = FakeTier()
    node = await start(patient, "store-1", 16, tier)
    tier.gate.clear()
    world.bulk_gate = asyncio.Event()
    before = [asyncio.ensure_future(bench.offer(node, i)) for i in range(TAKES_MAX)]
    await until(lambda: node.numbers()["num_writing"] == TAKES_MAX)
    late = asyncio.ensure_future(bench.offer(node, 10, lease_s=0.2))
    loop = asyncio.get_running_loop()
    over_s = loop.time() + 0.15
    await until(lambda: loop.time() > over_s)
    world.bulk_gate.set()
    assert await asyncio.gather(*before) == [(CopyStatus.TAKEN,)] * TAKES_MAX
    assert await late == (CopyStatus.LATER,)
    assert node.numbers()["reserved"] == TAKES_MAX, "nothing was asked for in vain"
    tier.gate.set()


async def test_one_message_brings_more_pages_than_there_is_room_for_at_once(
    bench: Bench, patient: StoreCluster, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    monkeypatch.setattr(receiving, "SERVE_S", 60.0)
    node = await start(patient, "store-1", 16, SlowTier())
    statuses = await bench.offer(node, *range(BATCH_PAGES_MAX))
    assert statuses == (CopyStatus.TAKEN,) * BATCH_PAGES_MAX
    assert node.numbers()["copies_received"] == BATCH_PAGES_MAX


async def test_a_batch_is_answered_in_time_with_what_has_come_till_then(
    bench: Bench, patient: StoreCluster, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    monkeypatch.setattr(receiving, "SERVE_S", 0.0)
    node = await start(patient, "store-1", 16, SlowTier())
    statuses = Counter(await bench.offer(node, *range(BATCH_PAGES_MAX)))
    assert statuses.keys() == {CopyStatus.TAKEN, CopyStatus.LATER}
    assert statuses[CopyStatus.TAKEN] <= 16


@pytest.mark.parametrize("commits", [True, False])
async def test_a_page_that_another_is_writing_is_waited_for_and_not_given_up_at_once(
    bench: Bench, patient: StoreCluster, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    monkeypatch.setattr(receiving, "WRITE_WAIT_S", 30.0)
    node = await start(patient, "store-1", 64)
    request = ReservePages(spec=SPEC, pages=(PAGES[0],))
    grant = await bench.ask(node, request, PagesReserved)
    offering = asyncio.ensure_future(bench.offer(node, 0, 1))
    await until(lambda: node.numbers()["copies_received"] == 1)
    assert not offering.done()
    mine = (PageGrant(KEYS[0], grant.grants[0].generation),)
    abort = AbortPages(incarnation=grant.incarnation, pages=mine, quiet=True)
    if commits:
        assert node._directory.commit(KEYS[0], mine[0].generation, b"c" * 16)
    else:
        await bench.ask(node, abort, StoreDone)
    settled = CopyStatus.PRESENT if commits else CopyStatus.TAKEN
    assert await offering == (settled, CopyStatus.TAKEN)
