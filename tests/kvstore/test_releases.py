"""Read leases end soon, and together: with the next request, or a moment later."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from kvstore.messages import AcquirePages, PagesAcquired, ReleasePages
from kvstore.store import GetOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import get_all, open_client, raw_channel, until
from tests.kvstore.pages import sequence
from transfer.interface import deadline_after

TOKENS = range(4)


M = TypeVar("M")


def sent(world: World, kind: type[M]) -> list[M]:
    return [message for message in world.requests if isinstance(message, kind)]


async def test_an_ended_lease_goes_with_the_next_request_for_pages(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    for _ in range(3):
        assert await get_all(stores, client, TOKENS) == [GetOutcome.READ]
        assert node.numbers()["num_leases"] <= 1
    firsts = [message.first for message in sent(world, AcquirePages)]
    assert firsts[0] is None
    assert None not in firsts[1:] or sent(world, ReleasePages), "a slow machine sends it before"
    await client.quiet()
    assert node.numbers()["num_leases"] == 0


async def test_the_last_lease_is_released_without_another_request(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    await get_all(stores, client, TOKENS)
    await until(lambda: node.numbers()["num_leases"] == 0)
    assert len(sent(world, ReleasePages)) == 1


async def test_leases_of_reads_at_the_same_time_end_in_one_message(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    world.bulk_gate = asyncio.Event()
    reads = [asyncio.ensure_future(get_all(stores, client, TOKENS)) for _ in range(8)]
    await until(lambda: node.numbers()["num_leases"] == 8)
    world.bulk_gate.set()
    await asyncio.gather(*reads)
    await client.quiet()
    assert node.numbers()["num_leases"] == 0
    assert len(sent(world, ReleasePages)) < 8


async def test_leases_of_another_incarnation_are_not_ended_by_a_request(
    cluster: StoreCluster,
) -> None:
    """Lease ids begin anew with a process: an old one may be somebody else's now."""
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, TOKENS)
    channel = await raw_channel(cluster, node.address)
    keys = (sequence(TOKENS)[0].key,)
    mine = await channel.request(
        AcquirePages(keys=keys), PagesAcquired, deadline_s=deadline_after(1)
    )
    for incarnation, num_left in (("old", 2), (mine.incarnation, 2)):
        stale = ReleasePages(incarnation=incarnation, lease_id=mine.lease_id)
        await channel.request(
            AcquirePages(keys=keys, first=stale), PagesAcquired, deadline_s=deadline_after(1)
        )
        assert node.numbers()["num_leases"] == num_left


async def test_an_absent_page_costs_one_question(cluster: StoreCluster, world: World) -> None:
    await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.ABSENT]
    assert len(sent(world, AcquirePages)) == 1
    assert client.counters()["get_absent"] == 1


async def test_the_messages_that_a_match_takes_are_counted(cluster: StoreCluster) -> None:
    for i in range(3):
        await cluster.node(f"store-{i}")
    stores = await cluster.stores()
    client = await open_client(stores)
    keys = [page.key for page in sequence(range(400))]
    await client.match(keys, deadline_s=deadline_after(5))
    assert client.counters()["match_messages"] == 3
