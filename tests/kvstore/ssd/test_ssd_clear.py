"""A clear reaches the disk before it is answered: what was cleared does not come back."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.config import StoreConfig
from kvstore.server.node import StoreNode
from kvstore.ssd import SsdConfig, SsdTier
from kvstore.store import PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import FakeMembership, World
from tests.kvstore.faulty import PATIENT, open_client, until
from tests.kvstore.pages import SPEC
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

NBYTES = 4 << 20
LATER_S = 60.0  # the index is written when it must be, and not by a timer
NUM_SLOTS = 16
PROMPTS = [list(range(start, start + 4)) for start in range(0, 12_000, 1000)]


@pytest.fixture
async def cluster(world: World) -> AsyncIterator[StoreCluster]:
    made = StoreCluster(world, client_config=PATIENT)
    yield made
    await made.close()


async def node_on(cluster: StoreCluster, tier: SsdTier) -> StoreNode:
    node = StoreNode(
        StoreConfig(
            segment_nbytes=NUM_SLOTS * SPEC.page_nbytes,
            lease_s=30.0,
            tick_s=0.01,
            high_watermark=0.8,
            low_watermark=0.25,
        ),
        identity=new_identity(Role.STORE, "store-ssd"),
        network=cluster.network(),
        transfer=await cluster.transfer(),
        membership=FakeMembership(cluster.world),
        tier=tier,
    )
    await node.start()
    cluster.nodes.append(node)
    return node


async def num_found(folder: Path, copy: Path) -> int:
    """Pages that another process would find, if this one ended now."""
    shutil.copytree(folder, copy)
    tier = await SsdTier.open(SsdConfig(path=copy, nbytes=NBYTES))
    num_pages = len(list(tier.contents()))
    await tier.close()
    return num_pages


async def test_nothing_comes_back_after_a_clear_however_the_process_ends(
    cluster: StoreCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    tier = await SsdTier.open(SsdConfig(path=folder, nbytes=NBYTES, flush_s=LATER_S))
    node = await node_on(cluster, tier)
    stores = await cluster.stores()
    client = await open_client(stores)
    for tokens in PROMPTS:
        assert await put_all(stores, client, tokens) == [PutOutcome.STORED]
    await until(lambda: node.numbers()["num_on_ssd"] >= len(PROMPTS) - NUM_SLOTS // 4)
    assert await tier.flush()
    assert await num_found(folder, tmp_path / "before") >= len(PROMPTS) - NUM_SLOTS // 4
    assert await client.clear(deadline_s=deadline_after(20)) == len(PROMPTS)
    assert await num_found(folder, tmp_path / "after") == 0
