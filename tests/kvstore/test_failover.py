"""A client whose nodes break: resets, dead nodes, views that disagree, leases that run out."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.client.link import BULK_INCIDENTS_MAX, StoreLink
from kvstore.client.store_client import StoreClient
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.messages import LeasesRenewed, MatchPages, PagesMatched, RenewLeases
from kvstore.placement import placement_of
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import Stores, put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import FAST, get_all, open_client, small, until
from tests.kvstore.pages import SPEC, empty, filled, sequence
from transfer.errors import PeerLost
from transfer.identity import NodeId
from transfer.interface import deadline_after

NUM_PAGES = 40
TOKENS = range(4 * NUM_PAGES)
PAGES = sequence(TOKENS)
KEYS = [page.key for page in PAGES]


async def started(
    cluster: StoreCluster, count: int, replicas: int = 1
) -> tuple[Stores, StoreClient]:
    for i in range(count):
        config = StoreConfig(
            segment_nbytes=1024 * SPEC.page_nbytes, lease_s=30.0, tick_s=0.02, replicas=replicas
        )
        await cluster.node(f"store-{i}", config)
    await until(lambda: not any(node.numbers()["repairing"] for node in cluster.nodes))
    cluster.world.publish()  # a heartbeat
    stores = await cluster.stores()
    return stores, await open_client(stores)


# ---- broken connections


async def test_a_put_survives_a_connection_that_is_reset(
    cluster: StoreCluster, world: World
) -> None:
    cluster.always_write()
    stores, client = await started(cluster, 1)
    world.break_writes = 2
    assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * NUM_PAGES
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES
    assert client.counters()["bulk_failures"] == 2
    assert "backoffs" not in client.counters()


async def test_the_slots_of_a_broken_write_stay_fenced_until_no_byte_can_arrive(
    cluster: StoreCluster, world: World
) -> None:
    cluster.always_write()
    stores, client = await started(cluster, 1)
    world.break_writes = 1
    await put_all(stores, client, range(8))
    first, second = world.writes[-2:]
    assert {r.remote_offset for r in first}.isdisjoint(r.remote_offset for r in second)
    assert cluster.nodes[0].numbers()["num_owed"] == len(PAGES[:2])


async def test_a_writer_whose_connection_breaks_every_time_gives_up_after_a_few_tries(
    cluster: StoreCluster, world: World
) -> None:
    cluster.always_write()
    stores, client = await started(cluster, 1)
    world.break_writes = 1000
    async with asyncio.timeout(3):
        assert await put_all(stores, client, range(4)) == [PutOutcome.FAILED]
    assert 1000 - world.break_writes <= BULK_INCIDENTS_MAX


async def test_operations_that_break_together_are_one_incident(
    cluster: StoreCluster, world: World
) -> None:
    cluster.client_config = FAST.model_copy(update={"batch_nbytes": 1, "num_batches": 16})
    stores, client = await started(cluster, 1)
    await put_all(stores, client, TOKENS)
    world.bulk_gate = asyncio.Event()
    reading = asyncio.ensure_future(get_all(stores, client, TOKENS))
    await until(lambda: cluster.nodes[0].numbers()["num_leases"] == 1)
    world.bulk_error = PeerLost("the one connection of them all")
    world.bulk_gate.set()
    for _ in range(20):
        await asyncio.sleep(0)
    world.bulk_error = None
    await reading
    assert client.counters()["bulk_failures"] >= 16
    await asyncio.sleep(0)


# ---- dead nodes


async def test_a_put_goes_to_the_next_in_rank_when_the_first_is_dead(
    cluster: StoreCluster, world: World
) -> None:
    stores, client = await started(cluster, 3)
    world.cut(NodeId("store-1"))
    assert await put_all(stores, client, TOKENS) == [PutOutcome.STORED] * NUM_PAGES
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES
    states = await client.match(KEYS, deadline_s=deadline_after(1))
    assert states == [PageState.READY] * NUM_PAGES
    assert client.counters()["puts_moved_on"] > 0


async def test_a_waiting_get_is_answered_by_the_node_that_took_the_page_instead(
    cluster: StoreCluster, world: World
) -> None:
    stores, client = await started(cluster, 3)
    writer = await open_client(stores)
    world.cut(NodeId("store-0"))
    waiting = asyncio.ensure_future(get_all(stores, client, TOKENS, wait=True))
    await until(lambda: sum(node.numbers()["num_waits"] for node in cluster.nodes) == 2)
    await put_all(stores, writer, TOKENS)
    assert await waiting == [GetOutcome.READ] * NUM_PAGES


async def test_a_match_does_not_wait_for_a_silent_node_when_its_replicas_have_all(
    cluster: StoreCluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, client = await started(cluster, 3, replicas=2)
    await put_all(stores, client, TOKENS)
    call = StoreLink.call
    asked = asyncio.Event()

    async def silent(self: StoreLink, message: object, reply: object, **limits: float) -> object:
        if self.node_id == "store-1" and isinstance(message, MatchPages):
            asked.set()
            await asyncio.Event().wait()
        return await call(self, message, reply, **limits)  # type: ignore[type-var, arg-type]

    monkeypatch.setattr(StoreLink, "call", silent)
    states = await client.match(KEYS, deadline_s=deadline_after(60))
    assert states == [PageState.READY] * NUM_PAGES
    assert asked.is_set()


async def test_clients_with_another_view_find_the_pages_all_the_same(
    cluster: StoreCluster, world: World
) -> None:
    stores, old = await started(cluster, 2)
    world.callbacks.remove(old.links.follow)  # this client hears of no further change
    await cluster.node("store-2", cluster.nodes[0].config)
    new = await open_client(stores)
    assert await put_all(stores, new, TOKENS) == [PutOutcome.STORED] * NUM_PAGES
    # the old one asks other nodes for what lies on the new one, and puts it again where it looks
    outcomes = await put_all(stores, old, TOKENS)
    assert set(outcomes) == {PutOutcome.STORED, PutOutcome.PRESENT}
    for client in (old, new):
        assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES


# ---- round trips


async def test_a_match_of_thousands_of_keys_is_one_message_to_each_node(
    cluster: StoreCluster, world: World
) -> None:
    _, client = await started(cluster, 3)
    keys = [page.key for page in sequence(range(4 * 5000))]
    await client.match(keys, deadline_s=deadline_after(5))
    world.requests.clear()
    await client.match(keys, deadline_s=deadline_after(5))
    assert [type(request) for request in world.requests] == [MatchPages] * 3
    placed = placement_of(world.view).place(keys)
    requests = [request for request in world.requests if isinstance(request, MatchPages)]
    assert sorted(len(request.keys) // 32 for request in requests) == sorted(
        placed.count(node_id) for node_id in set(placed)
    )


async def test_a_state_that_is_none_is_a_failure_of_the_node(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = await started(cluster, 1)
    call = StoreLink.call

    async def odd(self: StoreLink, message: object, reply: object, **limits: float) -> object:
        answer = await call(self, message, reply, **limits)  # type: ignore[type-var, arg-type]
        return PagesMatched(b"\xff" * NUM_PAGES) if isinstance(answer, PagesMatched) else answer

    monkeypatch.setattr(StoreLink, "call", odd)
    states = await client.match(KEYS, deadline_s=deadline_after(1))
    assert states == [PageState.ABSENT] * NUM_PAGES
    assert client.counters()["broken_matches"] == 1


# ---- leases


@pytest.mark.parametrize("what", ["get", "put"])
async def test_a_slow_transfer_keeps_its_lease_by_renewing_it_at_half_life(
    cluster: StoreCluster, world: World, what: str
) -> None:
    node = await cluster.node(config=small(16, lease_s=0.4))
    stores = await cluster.stores()
    client = await open_client(stores)
    if what == "get":
        await put_all(stores, client, range(16))
    world.bulk_gate = asyncio.Event()
    if what == "get":
        call = asyncio.ensure_future(get_all(stores, client, range(16)))
    else:
        call = asyncio.ensure_future(put_all(stores, client, range(16)))  # type: ignore[arg-type]
    await until(lambda: sum(isinstance(r, RenewLeases) for r in world.requests) >= 4)
    held = "num_leases" if what == "get" else "num_writing"
    assert node.numbers()[held] > 0, "twice its first length has passed"
    world.bulk_gate.set()
    assert set(await call) == {GetOutcome.READ if what == "get" else PutOutcome.STORED}


async def test_a_transfer_ends_with_a_lease_that_cannot_be_renewed(
    cluster: StoreCluster, world: World
) -> None:
    await cluster.node(config=small(16, lease_s=0.3))
    cluster.client_config = StoreClientConfig(op_timeout_s=0.1)
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(16))
    world.bulk_gate = asyncio.Event()
    world.reply_lost = LeasesRenewed
    into, gets = empty(stores.transfer, sequence(range(16)))
    async with asyncio.timeout(5):
        result = await client.get(gets, into=into, deadline_s=deadline_after(30))
    assert result.outcomes == [GetOutcome.FAILED] * 4
    world.bulk_gate.set()
    await asyncio.sleep(0.05)
    assert bytes(into.view) == bytes(into.nbytes), "nothing arrives after the end"


async def test_a_quick_transfer_renews_nothing(cluster: StoreCluster, world: World) -> None:
    stores, client = await started(cluster, 1)
    source, puts = filled(stores.transfer, PAGES)
    await client.put(puts, source=source, deadline_s=deadline_after(5))
    await get_all(stores, client, TOKENS)
    assert not any(isinstance(request, RenewLeases) for request in world.requests)
