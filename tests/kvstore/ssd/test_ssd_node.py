"""A real store node on a real tier: pages outlive the node's memory, and the node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.checksum import checksum_of
from kvstore.config import StoreConfig
from kvstore.page import PageSpec
from kvstore.server.directory import Directory
from kvstore.server.node import StoreNode
from kvstore.server.segment import Segment
from kvstore.server.tiering import Tiering
from kvstore.ssd import SsdConfig, SsdTier
from kvstore.ssd.config import MIB
from kvstore.ssd.opening import PAGES_NAME
from kvstore.store import GetOutcome, PageIdentity, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import FakeMembership, World
from tests.kvstore.faulty import PATIENT, get_all, open_client, until
from tests.kvstore.pages import SPEC, bytes_of, sequence
from tests.kvstore.ssd.ssd_pages import LARGE
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

NUM_SLOTS = 16
PROMPTS = [list(range(start, start + 4)) for start in range(0, 64_000, 1000)]  # a page each
LONG_PROMPTS = [list(range(start, start + 32)) for start in range(0, 24_000, 1000)]  # of 8 pages
NUM_PAGES = len(PROMPTS)
NUM_KEPT = 4  # pages of memory that are below the low watermark: they need no copy


class Cluster(StoreCluster):
    """Nodes of 16 pages of memory, each with an SSD."""

    async def node_with_ssd(
        self,
        folder: Path,
        *,
        num_slots: int = NUM_SLOTS,
        high: float = 0.8,
        low: float = NUM_KEPT / NUM_SLOTS,
    ) -> tuple[StoreNode, SsdTier]:
        tier = await SsdTier.open(SsdConfig(path=folder, nbytes=4 << 20))
        node = StoreNode(
            StoreConfig(
                segment_nbytes=num_slots * SPEC.page_nbytes,
                lease_s=30.0,
                tick_s=0.01,
                high_watermark=high,
                low_watermark=low,
            ),
            identity=new_identity(Role.STORE, "store-ssd"),
            network=self.network(),
            transfer=await self.transfer(),
            membership=FakeMembership(self.world),
            tier=tier,
        )
        await node.start()
        self.nodes.append(node)
        return node, tier


@pytest.fixture
async def ssd_cluster(world: World) -> AsyncIterator[Cluster]:
    cluster = Cluster(world, client_config=PATIENT)
    yield cluster
    await cluster.close()


async def states(cluster: Cluster) -> list[PageState]:
    stores = await cluster.stores()
    client = await open_client(stores)
    keys = [page.key for tokens in PROMPTS for page in sequence(tokens)]
    return await client.match(keys, deadline_s=deadline_after(5))


async def put_prompts(cluster: Cluster, node: StoreNode) -> None:
    """Put four times what memory holds, as fast as the spiller follows."""
    stores = await cluster.stores()
    client = await open_client(stores)
    for tokens in PROMPTS:
        assert await put_all(stores, client, tokens) == [PutOutcome.STORED]
        await until(lambda: num_uncopied(node) <= NUM_KEPT)


def num_uncopied(node: StoreNode) -> int:
    """Pages that would be lost if memory was."""
    numbers = node.numbers()
    return int(numbers["num_pages"] + numbers["num_spilled"] - numbers["num_on_ssd"])


def num_staying(node: StoreNode) -> int:
    """Pages in memory that are not next to go."""
    numbers = node.numbers()
    return int(numbers["num_pages"] - numbers["num_in_line"])


async def get_prompts(cluster: Cluster) -> list[GetOutcome]:
    stores = await cluster.stores()
    client = await open_client(stores)
    outcomes = []
    for tokens in PROMPTS:
        outcomes += await get_all(stores, client, tokens)  # asserts the bytes
    return outcomes


async def test_pages_that_left_memory_are_served_from_the_ssd(
    ssd_cluster: Cluster, tmp_path: Path
) -> None:
    node, tier = await ssd_cluster.node_with_ssd(tmp_path / "tier")
    await put_prompts(ssd_cluster, node)
    seen = await states(ssd_cluster)
    assert seen.count(PageState.SPILLED) >= NUM_PAGES - NUM_SLOTS
    assert all(state.present for state in seen)
    assert await get_prompts(ssd_cluster) == [GetOutcome.READ] * NUM_PAGES
    assert tier.numbers()["ssd_promoted"] >= NUM_PAGES - NUM_SLOTS


async def test_a_new_incarnation_serves_the_pages_of_the_last(
    ssd_cluster: Cluster, tmp_path: Path
) -> None:
    first, tier = await ssd_cluster.node_with_ssd(tmp_path / "tier")
    await put_prompts(ssd_cluster, first)
    num_on_ssd = tier.num_pages
    await first.close()
    second, tier = await ssd_cluster.node_with_ssd(tmp_path / "tier")
    assert second.identity.incarnation != first.identity.incarnation
    assert tier.num_pages == num_on_ssd >= NUM_PAGES - NUM_SLOTS
    assert (await states(ssd_cluster)).count(PageState.SPILLED) == num_on_ssd
    outcomes = await get_prompts(ssd_cluster)
    assert outcomes.count(GetOutcome.READ) == num_on_ssd
    assert outcomes.count(GetOutcome.ABSENT) == NUM_PAGES - num_on_ssd


async def test_a_page_damaged_on_the_ssd_is_a_miss_and_can_be_put_again(
    ssd_cluster: Cluster, tmp_path: Path
) -> None:
    first, tier = await ssd_cluster.node_with_ssd(tmp_path / "tier")
    await put_prompts(ssd_cluster, first)
    await first.close()
    with (tmp_path / "tier" / PAGES_NAME).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(8))
    _, tier = await ssd_cluster.node_with_ssd(tmp_path / "tier")
    num_on_ssd = tier.num_pages
    outcomes = await get_prompts(ssd_cluster)
    assert outcomes.count(GetOutcome.READ) == num_on_ssd - 1
    assert tier.numbers()["ssd_dropped_header"] == 1
    stores = await ssd_cluster.stores()
    client = await open_client(stores)
    for tokens in PROMPTS:
        outcome = (await put_all(stores, client, tokens))[0]
        assert outcome in (PutOutcome.STORED, PutOutcome.PRESENT)


async def test_a_workload_of_long_prompts_three_times_memory_loses_nearly_nothing(
    ssd_cluster: Cluster, tmp_path: Path
) -> None:
    node, tier = await ssd_cluster.node_with_ssd(
        tmp_path / "tier", num_slots=64, high=0.95, low=0.9
    )
    stores = await ssd_cluster.stores()
    client = await open_client(stores)
    for tokens in LONG_PROMPTS:
        assert await put_all(stores, client, tokens) == [PutOutcome.STORED] * 8
        await until(lambda: num_staying(node) <= 48)  # the spill watermark
    outcomes = []
    for tokens in LONG_PROMPTS:
        outcomes += await get_all(stores, client, tokens)  # asserts the bytes
        await until(lambda: num_staying(node) <= 48)
    assert outcomes.count(GetOutcome.READ) >= 0.95 * len(outcomes)
    assert tier.numbers()["ssd_stored"] >= 2 * 64


async def test_pages_of_another_size_displace_colder_ones_from_a_full_tier(tmp_path: Path) -> None:
    tier = await SsdTier.open(SsdConfig(path=tmp_path / "tier", nbytes=MIB))
    memory = memoryview(bytearray(2 * MIB))
    d = Directory(Segment(len(memory)), lease_s=5.0, high=len(memory), low=len(memory), spill=0)
    tiering = Tiering(d, tier, memory, now_s=lambda: now_s)
    now_s = 0.0

    async def put(number: int, spec: PageSpec) -> PageIdentity:
        page = sequence(range(number, number + spec.page_size), spec=spec)[0]
        slot = d.reserve([page], spec, now_s)[0].slot
        assert slot is not None
        blob = memory[slot.offset : slot.offset + slot.nbytes]
        blob[:] = bytes_of(page, spec=spec).data
        assert d.commit(page.key, slot.generation, checksum_of(spec, blob, spec.page_size))
        tiering.kick()
        await tiering.idle()
        return page

    number = 0
    while tier.has_room(SPEC.page_nbytes):
        number, now_s = number + 10, now_s + 1.0
        await put(number, SPEC)
    large = []
    for _ in range(20):
        number, now_s = number + 10, now_s + 1.0
        large.append(await put(number, LARGE))
    assert all(page.key in tier for page in large)
    assert tier.numbers()["ssd_slabs_emptied"] >= 20 * LARGE.page_nbytes // (MIB // 16)
    assert d.spilling.num_on_ssd == tier.num_pages
    d.check()
    tier.check()
    await tiering.close()
