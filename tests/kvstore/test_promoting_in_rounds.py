"""A get of more pages than fit into a node's memory at once still gets all that its SSD has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.config import StoreConfig
from kvstore.messages import AcquirePages, PagesAcquired
from kvstore.server.node import StoreNode
from kvstore.store import GetOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.fakes import FakeMembership, World
from tests.kvstore.faulty import PATIENT, get_all, open_client, raw_channel, until
from tests.kvstore.pages import SPEC, bytes_of, sequence
from tests.kvstore.test_adopting import kept
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

NUM_SLOTS = 12
TOKENS = range(4 * 3 * NUM_SLOTS)  # pages for three times the memory
NUM_PAGES = 3 * NUM_SLOTS


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[StoreCluster]:
    made = StoreCluster(world, client_config=PATIENT)
    yield made
    await made.close()


async def restarted(cluster: StoreCluster) -> tuple[StoreNode, FakeTier]:
    """A node of twelve slots, all of whose pages are on its SSD."""
    tier = FakeTier()
    for page in sequence(TOKENS):
        tier.pages[page.key] = (kept(page), bytes(bytes_of(page).data))
    node = StoreNode(
        StoreConfig(segment_nbytes=NUM_SLOTS * SPEC.page_nbytes, lease_s=30.0, tick_s=0.01),
        identity=new_identity(Role.STORE, "store-0"),
        network=cluster.network(),
        transfer=await cluster.transfer(),
        membership=FakeMembership(cluster.world),
        tier=tier,
    )
    await node.start()
    cluster.nodes.append(node)
    await until(lambda: node.numbers()["num_spilled"] == NUM_PAGES)
    return node, tier


async def test_a_get_of_more_spilled_pages_than_memory_holds_reads_them_all(
    cluster: StoreCluster,
) -> None:
    await restarted(cluster)
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await get_all(stores, client, TOKENS) == [GetOutcome.READ] * NUM_PAGES


async def test_pages_that_do_not_come_up_end_a_get_and_are_absent(cluster: StoreCluster) -> None:
    _, tier = await restarted(cluster)
    stores = await cluster.stores()
    client = await open_client(stores)
    tier.broken = "no answer"
    assert await get_all(stores, client, TOKENS) == [GetOutcome.ABSENT] * NUM_PAGES


async def test_an_acquire_says_how_many_pages_are_left_on_the_ssd(cluster: StoreCluster) -> None:
    node, tier = await restarted(cluster)
    channel = await raw_channel(cluster, node.address)
    keys = tuple(page.key for page in sequence(TOKENS))
    reply = await channel.request(
        AcquirePages(keys=keys), PagesAcquired, deadline_s=deadline_after(5)
    )
    assert len(reply.pages) == tier.num_loads == NUM_SLOTS // 2, "no page was pushed out again"
    assert reply.num_spilled == NUM_PAGES - NUM_SLOTS // 2
    await channel.close()
