"""Every number that a store node states is exported, with its right type, and documented."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.store_numbers import FAMILIES, SAMPLES
from kvstore.config import StoreConfig
from kvstore.placement import REPLICAS_FACT
from kvstore.replication.messages import CopyStatus
from kvstore.server.node import StoreNode
from kvstore.ssd import SsdConfig, SsdTier
from kvstore.ssd.slot_io import Damage
from tests.gateway.fakes import FakeCluster
from tests.gateway.http import Door, door
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import FakeMembership, World
from tests.kvstore.faulty import until
from tests.kvstore.pages import SPEC
from transfer.identity import Role, new_identity
from transfer.membership import Member, NodeInfo, NodeStatus

ROOT = Path(__file__).resolve().parents[2]
COUNTING = ("kvstore/server", "kvstore/replication", "kvstore/ssd", "kvstore/client/link.py")
COUNTED = re.compile(r"""counters\[(f?)"([^"]+)"\]""")
HINT = "add it to gateway/store_numbers.py, and its metric to docs/operating.md"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[StoreNode]:
    """A store node with an SSD that has taken, evicted and spilled pages."""
    world = World()
    cluster = StoreCluster(world)
    node = StoreNode(
        StoreConfig(
            segment_nbytes=8 * SPEC.page_nbytes,
            high_watermark=0.5,
            low_watermark=0.25,
            eviction="slru",
        ),
        identity=new_identity(Role.STORE, "store-ssd"),
        network=cluster.network(),
        transfer=await cluster.transfer(),
        membership=FakeMembership(world),
        wall_clock=lambda: 1_700_000_000.0,
        tier=await SsdTier.open(SsdConfig(path=tmp_path / "ssd", nbytes=4 << 20)),
    )
    await node.start()
    cluster.nodes.append(node)
    stores = await cluster.stores()
    client = await cluster.client(stores.transfer, network=cluster.network())
    for start in range(0, 800, 100):
        await put_all(stores, client, range(start, start + 4))
    await until(lambda: node.numbers().get("evicted_watermark", 0) > 0)
    yield node
    await cluster.close()


def member_of(name: str, numbers: dict[str, float], *, draining: bool = False) -> Member:
    info = NodeInfo(
        identity=new_identity(Role.STORE, name),
        address=f"fake://{name}",
        transport="fake",
        contract={REPLICAS_FACT: "2"},
        labels={"policy": "heat"},
    )
    return Member(info=info, status=NodeStatus(gauges=numbers, draining=draining))


async def scraped(d: Door) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await d.client.get("/metrics")).text
    return {
        (s.name.removeprefix("kvferry_store_"), tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name.startswith("kvferry_store_")
    }


async def test_every_number_of_a_live_node_is_in_the_catalogue(node: StoreNode) -> None:
    numbers = node.numbers()
    assert numbers["evicted"], "the node has something to say"
    assert "ssd_pages" in numbers
    assert set(numbers) - set(SAMPLES) == set(), HINT


async def test_the_heartbeats_of_an_idle_node_are_equal(node: StoreNode) -> None:
    """Those that differ are written to etcd, and sent to every member."""
    busy = ("num_spilling", "ssd_stores_under_way", "ssd_index_backlog", "num_writing")
    await until(lambda: not any(node.numbers()[name] for name in busy))
    before = node.status()
    asked = asyncio.get_running_loop().time()
    await until(lambda: asyncio.get_running_loop().time() > asked)
    assert node.status() == before


async def test_heartbeats_carry_numbers_and_nothing_else(node: StoreNode) -> None:
    status = node.status()
    sent = msgspec.msgpack.encode(status)
    assert msgspec.msgpack.decode(sent, type=NodeStatus) == status


def test_every_counter_in_the_code_of_a_store_is_in_the_catalogue() -> None:
    """Also those that a healthy node never counts."""
    missing: list[str] = []
    for path in COUNTING:
        files = sorted((ROOT / path).rglob("*.py")) if "." not in path else [ROOT / path]
        for file in files:
            prefix = "ssd_" if "kvstore/ssd" in str(file) else ""
            for is_format, name in COUNTED.findall(file.read_text(encoding="utf-8")):
                known = prefix + name.partition("{")[0]
                found = any(n.startswith(known) for n in SAMPLES) if is_format else known in SAMPLES
                missing += [] if found else [f"{file.name}: {prefix}{name}"]
    assert missing == [], HINT


def test_what_is_counted_by_kind_is_in_the_catalogue_with_every_kind() -> None:
    for status in CopyStatus:
        assert f"copies_{status}" in SAMPLES, HINT
    for why in (*Damage, "error"):
        assert f"ssd_dropped_{why}" in SAMPLES, HINT
    source = (ROOT / "kvstore/server/evictor.py").read_text(encoding="utf-8")
    named = r"""_evict_one\("(\w+)"|evict\(row, "(\w+)"|"(quota)" if|reason = "(\w+)\""""
    reasons = re.findall(named, source)
    assert len(set(reasons)) == 5
    for reason in ("".join(found) for found in reasons):
        assert f"evicted_{reason}" in SAMPLES, HINT
    source = (ROOT / "kvstore/ssd/page_writer.py").read_text(encoding="utf-8")
    refusals = re.findall(r'"(refused_\w+)"', source)
    assert len(refusals) >= 5
    for reason in refusals:
        assert f"ssd_{reason}" in SAMPLES, HINT


def test_the_catalogue_is_consistent() -> None:
    assert {sample.metric for sample in SAMPLES.values()} == set(FAMILIES), "no family is empty"
    assert len(set(SAMPLES.values())) == len(SAMPLES), "no two numbers make one sample"
    for name, sample in SAMPLES.items():
        assert (sample.label is None) == (FAMILIES[sample.metric].label is None), name
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-z_]+", name)
        assert not name.endswith("_total"), "the exporter adds it"
        assert family.text.endswith(".")


def test_every_metric_is_documented_as_it_is() -> None:
    text = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    for name, family in FAMILIES.items():
        shown, kind = (f"{name}_total", "counter") if family.counter else (name, "gauge")
        row = f"| `{shown}` | {kind} | {family.label or ''} | {family.text} |"
        assert row.replace("|  |", "| |") in text, row


async def test_metrics_say_what_every_store_node_said(node: StoreNode) -> None:
    cluster = FakeCluster(with_store=False)
    async with door(cluster) as d:
        numbers = node.numbers()
        bare = {"num_pages": 3.0, "segment_nbytes": 64.0, "free_nbytes": 32.0}
        cluster.membership.show(
            [member_of("a", numbers), member_of("b", bare, draining=True), member_of("c", {})]
        )
        found = await scraped(d)
        evicted = [found[("evictions_total", (("node", "a"), ("reason", "watermark")))]]
        assert evicted == [numbers["evicted_watermark"]]
        assert found[("pages", (("node", "b"), ("state", "ready")))] == 3
        assert found[("capacity_bytes", (("node", "a"), ("tier", "ssd")))] == numbers["ssd_nbytes"]
        assert found[("refused_pages_total", (("node", "b"),))] == 0, "a counter begins at 0"
        assert ("ssd_stored_pages_total", (("node", "b"),)) not in found, "b has no SSD"
        assert ("waits", (("node", "b"),)) not in found, "b did not say"
        info = [key for key in found if key[0] == "info"]
        assert [dict(labels)["node"] for _, labels in info] == ["a", "b", "c"]
        assert dict(info[0][1]) == {"node": "a", "policy": "heat", "replicas": "2"}
        assert not any(dict(labels)["node"] == "c" for name, labels in found if name != "info")


async def test_counters_and_gauges_have_their_types_and_help() -> None:
    cluster = FakeCluster(with_store=False)
    async with door(cluster) as d:
        text = (await d.client.get("/metrics")).text
        families = {f.name: f for f in text_string_to_metric_families(text)}
        for name, family in FAMILIES.items():
            exported = families[f"kvferry_store_{name}"]
            assert exported.type == ("counter" if family.counter else "gauge")
            assert exported.documentation == family.text


async def test_series_grow_with_nodes_and_with_nothing_else() -> None:
    cluster = FakeCluster(with_store=False)
    strange = {f"key-{n}": 1.0 for n in range(1000)} | {"num_pages": 1.0, "ssd_nbytes": 1.0}
    async with door(cluster) as d:
        counts = []
        for num_nodes in (1, 2, 4):
            cluster.membership.show([member_of(f"n{n}", strange) for n in range(num_nodes)])
            counts.append(len(await scraped(d)))
        assert counts[1] == 2 * counts[0]
        assert counts[2] == 4 * counts[0]
        assert counts[0] <= len(SAMPLES) + 1
