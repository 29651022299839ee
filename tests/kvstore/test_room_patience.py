"""How long a put waits for room: one end of patience for all its pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import msgspec
import pytest

from kvstore.client.writing import PATIENCE, ROOM_WAIT_S_MIN
from kvstore.config import WAIT_S_MAX, StoreClientConfig
from kvstore.messages import (
    PagesReserved,
    PagesTaken,
    ReservePages,
    ReserveStatus,
    TakePages,
    TakeStatus,
    WriteGrant,
)
from kvstore.server.node import StoreNode
from kvstore.server.tier import TierPage
from kvstore.store import PutOutcome
from tests.kvstore.contract import put_all
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.fakes import World
from tests.kvstore.faulty import PATIENT, open_client
from tests.kvstore.pages import SPEC, filled, sequence
from tests.kvstore.test_room import Cluster
from transfer.channel import Caller
from transfer.interface import deadline_after

NUM_PAGES = 12
PUT_S = 20.0


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[Cluster]:
    cluster = Cluster(world, client_config=PATIENT)
    yield cluster
    await cluster.close()


class OneByOne:
    """A node that has room for one page a request; what its writers were willing to wait."""

    def __init__(self, world: World, node: StoreNode, *, offers: bool) -> None:
        self._offers = offers
        self.waits_s: list[float] = []
        requests = world.listeners[node.address].service.requests
        requests[TakePages if offers else ReservePages] = self._answer

    async def _answer(self, message: msgspec.Struct, caller: Caller) -> msgspec.Struct:
        assert isinstance(message, TakePages | ReservePages)
        self.waits_s.append(message.wait_s)
        num_later = len(message.pages) - 1
        if self._offers:
            return PagesTaken((TakeStatus.PRESENT,) + (TakeStatus.LATER,) * num_later)
        statuses = (ReserveStatus.PRESENT,) + (ReserveStatus.LATER,) * num_later
        grants = tuple(WriteGrant(status) for status in statuses)
        return PagesReserved(incarnation="x", lease_s=1.0, grants=grants)


async def waits_of_a_put(
    cluster: Cluster,
    world: World,
    *,
    offers: bool,
    room_wait_s: float | None,
    put_s: float = PUT_S,
) -> list[float]:
    """What the waits of one put may take, of which each brings one page."""
    node = await cluster.node()
    cluster.client_config = PATIENT.model_copy(update={"room_wait_s": room_wait_s})
    if not offers:
        cluster.always_write()
    one_by_one = OneByOne(world, node, offers=offers)
    stores = await cluster.stores()
    client = await open_client(stores)
    region, puts = filled(stores.transfer, sequence(range(NUM_PAGES * SPEC.page_size)))
    result = await client.put(puts, source=region, deadline_s=deadline_after(put_s))
    assert result.outcomes == [PutOutcome.PRESENT] * NUM_PAGES
    first, *others = one_by_one.waits_s
    assert first == 0.0
    assert len(others) == NUM_PAGES - 1
    return others


@pytest.mark.parametrize("offers", [True, False])
@pytest.mark.parametrize(
    ("room_wait_s", "limit_s"), [(1.0, 1.0), (100.0, PATIENCE * PUT_S), (None, PATIENCE * PUT_S)]
)
async def test_a_wait_that_brings_a_page_prolongs_no_patience(
    cluster: Cluster, world: World, offers: bool, room_wait_s: float | None, limit_s: float
) -> None:
    waits_s = await waits_of_a_put(cluster, world, offers=offers, room_wait_s=room_wait_s)
    assert waits_s[0] <= limit_s
    assert all(later < earlier for earlier, later in pairwise(waits_s)), "they all end at once"


@pytest.mark.parametrize("offers", [True, False])
async def test_a_put_without_patience_asks_for_room_at_once_and_goes_on(
    cluster: Cluster, world: World, offers: bool
) -> None:
    waits_s = await waits_of_a_put(cluster, world, offers=offers, room_wait_s=1e-9)
    assert waits_s == [ROOM_WAIT_S_MIN] * (NUM_PAGES - 1)


async def test_no_wait_is_longer_than_a_node_grants(cluster: Cluster, world: World) -> None:
    waits_s = await waits_of_a_put(cluster, world, offers=True, room_wait_s=None, put_s=1000.0)
    assert waits_s == [WAIT_S_MAX] * (NUM_PAGES - 1)


def test_by_default_a_put_waits_as_long_as_its_deadline_allows() -> None:
    assert StoreClientConfig().room_wait_s is None


class TurnByTurn(FakeTier):
    """Stores one page after the other, each of which takes so many turns of the loop."""

    def __init__(self, num_turns: int) -> None:
        super().__init__()
        self._num_turns = num_turns
        self._one = asyncio.Lock()

    async def store(self, page: TierPage, data: memoryview) -> bool:
        async with self._one:
            for _ in range(self._num_turns):
                await asyncio.sleep(0)
        return await super().store(page, data)


@pytest.mark.parametrize("offers", [True, False])
async def test_a_burst_loses_nothing_at_a_slow_disk_that_goes_on(
    cluster: Cluster, patience: None, offers: bool
) -> None:
    node = await cluster.node_on(TurnByTurn(100))
    if not offers:
        cluster.always_write()
    stores = await cluster.stores()
    client = await open_client(stores)
    prompts = [range(start, start + 16) for start in range(0, 10_000, 1000)]
    outcomes = await asyncio.gather(*(put_all(stores, client, tokens) for tokens in prompts))
    assert outcomes == [[PutOutcome.STORED] * 4] * len(prompts)
    numbers = node.numbers()
    assert numbers["room_waits"] > 0
    assert numbers.get("evicted_unspilled", 0) == numbers.get("refused", 0) == 0
