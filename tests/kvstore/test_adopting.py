"""A restarted node serves at once, while what its SSD kept is still being indexed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from kvstore.checksum import checksum_of
from kvstore.config import StoreConfig
from kvstore.page import PageKey
from kvstore.server.adopting import ADOPT_BATCH
from kvstore.server.node import StoreNode
from kvstore.server.tier import TierPage
from kvstore.store import GetOutcome, PageIdentity, PageRecord, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.directories import CHECKSUM, grant, single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.fakes import FakeMembership, World
from tests.kvstore.faulty import PATIENT, get_all, open_client, until
from tests.kvstore.pages import SPEC, bytes_of, sequence
from tests.kvstore.tiering_bench import Bench
from transfer.errors import RemoteFailed
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

NUM_PAGES = 100
PROMPTS = [list(range(start, start + 4)) for start in range(0, NUM_PAGES * 1000, 1000)]
EARLY, LATE = 0, NUM_PAGES - 1  # prompts of which the tier speaks first and last


def kept(page: PageIdentity, checksum: bytes | None = None) -> TierPage:
    """A page as a node before this one has stored it."""
    record = PageRecord(
        key=page.key,
        parent=page.parent,
        depth=page.depth,
        tokens=page.tokens,
        checksum=checksum or checksum_of(SPEC, bytes_of(page).data, page.num_tokens),
        page_nbytes=SPEC.page_nbytes,
    )
    return TierPage(record, SPEC, b"", 35, 1.0)


class HeldTier(FakeTier):
    """Full of pages of an earlier life. It goes on about the first ``num_told`` of them until it
    is released.

    Attributes:
        fault: raised instead of the others.
    """

    def __init__(self, num_told: int) -> None:
        super().__init__()
        for tokens in PROMPTS:
            for page in sequence(tokens):
                self.pages[page.key] = (kept(page), bytes(bytes_of(page).data))
        self.held = True
        self.num_told = num_told
        self.fault: Exception | None = None

    def contents(self) -> Iterator[TierPage]:
        found = super().contents()
        first = [next(found) for _ in range(self.num_told)]
        yield from first
        while self.held:
            yield first[0]
        if self.fault is not None:
            raise self.fault
        yield from found


class Restarted(StoreCluster):
    """A node on a tier."""

    async def node_on(self, tier: FakeTier) -> StoreNode:
        node = StoreNode(
            StoreConfig(segment_nbytes=64 * SPEC.page_nbytes, lease_s=30.0, tick_s=0.01),
            identity=new_identity(Role.STORE, "store-0"),
            network=self.network(),
            transfer=await self.transfer(),
            membership=FakeMembership(self.world),
            tier=tier,
        )
        await node.start()
        self.nodes.append(node)
        return node


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[Restarted]:
    made = Restarted(world, client_config=PATIENT)
    yield made
    await made.close()


async def test_a_restarted_node_serves_a_hit_while_its_tier_is_still_being_indexed(
    cluster: Restarted,
) -> None:
    tier = HeldTier(num_told=10)
    node = await cluster.node_on(tier)
    stores = await cluster.stores()
    client = await open_client(stores)
    await until(lambda: node.numbers()["num_spilled"] == 10)
    assert await get_all(stores, client, PROMPTS[EARLY]) == [GetOutcome.READ]
    assert await get_all(stores, client, PROMPTS[LATE]) == [GetOutcome.ABSENT]
    assert node.healthy
    tier.held = False
    await until(lambda: node.numbers()["num_on_ssd"] == NUM_PAGES)
    await until(lambda: node.numbers()["num_to_adopt"] == 0)
    assert await get_all(stores, client, PROMPTS[LATE]) == [GetOutcome.READ]


async def test_what_is_still_to_be_indexed_is_a_number_of_the_node(cluster: Restarted) -> None:
    tier = HeldTier(num_told=10)
    node = await cluster.node_on(tier)
    assert 0 < node.numbers()["num_to_adopt"] <= NUM_PAGES
    tier.held = False
    await until(lambda: node.numbers()["num_to_adopt"] == 0)


async def test_a_clear_waits_for_what_is_not_indexed_yet_and_forgets_it_too(
    cluster: Restarted,
) -> None:
    tier = HeldTier(num_told=10)
    node = await cluster.node_on(tier)
    client = await open_client(await cluster.stores())
    clearing = asyncio.ensure_future(client.clear(deadline_s=deadline_after(20)))
    await until(lambda: node.numbers()["num_spilled"] == 10)
    assert not clearing.done()
    tier.held = False
    assert await clearing == NUM_PAGES
    assert not tier.pages
    assert tier.num_flushes == 1


async def test_a_node_that_cannot_index_its_tier_says_so_and_cannot_clear(
    cluster: Restarted,
) -> None:
    tier = HeldTier(num_told=10)
    node = await cluster.node_on(tier)
    tier.fault = ValueError("planted")
    tier.held = False
    await until(lambda: not node.healthy)
    client = await open_client(await cluster.stores())
    with pytest.raises(RemoteFailed, match="come back"):
        await client.clear(deadline_s=deadline_after(5))


async def test_closing_a_node_ends_the_indexing(cluster: Restarted) -> None:
    tier = HeldTier(num_told=10)
    node = await cluster.node_on(tier)
    await node.close()
    assert tier.held
    assert tier.closed


async def test_a_page_that_is_put_meanwhile_wins_over_the_older_copy(cluster: Restarted) -> None:
    tier = HeldTier(num_told=10)
    node = await cluster.node_on(tier)
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await put_all(stores, client, PROMPTS[LATE]) == [PutOutcome.STORED]
    tier.held = False
    await until(lambda: node.numbers()["num_to_adopt"] == 0)
    key = sequence(PROMPTS[LATE])[0].key
    assert await client.match([key], deadline_s=deadline_after(5)) == [PageState.READY]
    assert key not in tier.pages
    assert node.numbers()["num_on_ssd"] == NUM_PAGES - 1


# ---- the walk itself


async def adopting(bench: Bench) -> asyncio.Future[int]:
    walk = asyncio.ensure_future(bench.tiering.adopt())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not walk.done()
    return walk


async def test_indexing_looks_at_a_small_number_of_pages_between_looks_at_the_loop() -> None:
    tier = HeldTier(num_told=NUM_PAGES)
    tier.held = False
    bench = Bench(20, tier)
    steps = [0]
    walk = asyncio.ensure_future(bench.tiering.adopt())
    while not walk.done():
        await asyncio.sleep(0)
        steps.append(bench.d.num_spilled)
    assert await walk == NUM_PAGES
    assert max(b - a for a, b in itertools.pairwise(steps)) <= ADOPT_BATCH
    await bench.tiering.close()


async def test_a_copy_made_meanwhile_replaces_the_older_one_and_stays() -> None:
    tier = HeldTier(num_told=1)
    bench = Bench(20, tier)
    again = single(7)
    tier.pages[again.key] = (kept(again, b"older bytes have"), bytes(SPEC.page_nbytes))
    walk = await adopting(bench)
    bench.put(again)
    bench.tiering.kick()
    await until(lambda: tier.num_stores == 1)
    await asyncio.sleep(0)
    tier.held = False
    await walk
    assert tier.pages[again.key][0].record.checksum == CHECKSUM
    assert tier.pages[again.key][1] == bytes_of(again).tobytes()
    assert bench.d.state(again.key) is PageState.READY
    assert bench.evict(20) == 0
    bench.d.check()
    await bench.tiering.close()


async def test_a_page_that_is_on_its_way_down_is_left_alone() -> None:
    tier = HeldTier(num_told=1)
    bench = Bench(20, tier)
    again = single(7)
    tier.pages[again.key] = (kept(again, b"older bytes have"), bytes(SPEC.page_nbytes))
    walk = await adopting(bench)
    tier.gate.clear()
    bench.put(again)
    bench.tiering.kick()
    await until(lambda: tier.num_stores == 1)
    tier.held = False
    await walk
    assert bench.d.state(again.key) is PageState.READY
    tier.gate.set()
    await bench.tiering.idle()
    assert tier.pages[again.key][0].record.checksum == CHECKSUM
    await bench.tiering.close()


async def test_a_page_reserved_meanwhile_is_not_taken_from_the_tier() -> None:
    tier = HeldTier(num_told=1)
    bench = Bench(20, tier)
    page = sequence(PROMPTS[LATE])[0]
    walk = await adopting(bench)
    grant(bench.d, page, 1.0)
    tier.held = False
    assert await walk == NUM_PAGES - 1
    assert bench.d.state(page.key) is PageState.WRITING
    assert page.key not in tier.pages
    bench.d.check()
    await bench.tiering.close()


async def test_a_page_forgotten_meanwhile_does_not_come_back() -> None:
    tier = HeldTier(num_told=NUM_PAGES)
    bench = Bench(20, tier)
    walk = await adopting(bench)
    await until(lambda: bench.d.num_spilled == NUM_PAGES)
    gone: list[PageKey] = list(tier.pages)[1:]
    bench.d.forget(gone)
    tier.held = False
    await walk
    assert bench.d.num_spilled == 1
    assert await bench.tiering.flush()
    assert len(tier.pages) == 1
    await bench.tiering.close()
