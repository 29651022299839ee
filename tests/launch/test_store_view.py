"""What an operator sees of the page stores: every number in its place, in a narrow terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.messages import NamespaceUsage, StoreStats
from launch import cache
from launch.cluster import with_ports
from launch.config import JoinOptions, UpOptions
from launch.errors import ConfigError, StartError
from launch.http_client import post_json
from launch.inproc import InProcessCluster
from launch.main import main
from launch.status import describe, fetch, fetch_all
from launch.store_view import (
    NAMESPACES_SHOWN,
    Answer,
    by_namespace,
    short_count,
    store_text,
    summary,
)
from transfer.identity import Role, new_identity
from transfer.membership import Member, MembershipView, NodeInfo, NodeStatus

WIDTH_MAX = 100
HUGE = 99_999_999_999.0
NUMBERS = {
    "num_pages": 12.0,
    "num_spilled": 3456.0,
    "num_writing": 7.0,
    "num_owed": 2.0,
    "segment_nbytes": 4096.0,
    "free_nbytes": 1024.0,
    "pinned_nbytes": 512.0,
    "ssd_nbytes": 1048576.0,
    "ssd_used_nbytes": 524288.0,
    "ssd_pages": 4000.0,
    "ssd_degraded": 0.0,
    "hits": 300.0,
    "misses": 100.0,
    "evicted_watermark": 40.0,
    "evicted_demand": 30.0,
    "evicted_quota": 20.0,
    "evicted_slab": 10.0,
    "leased_pages": 11.0,
    "num_leases": 5.0,
    "num_waits": 6.0,
    "replicas_missing": 8.0,
    "repairing": 1.0,
    "uptime_s": 3725.4,
}


def member_of(name: str, numbers: dict[str, float], policy: str = "heat", **labels: str) -> Member:
    info = NodeInfo(
        identity=new_identity(Role.STORE, name),
        address=f"tcp://{name}:1",
        contract={"replicas": "2"},
        labels={"policy": policy, **labels},
    )
    return Member(info=info, status=NodeStatus(gauges=numbers))


def stats_of(numbers: dict[str, float], *usages: NamespaceUsage, **facts: str) -> Answer:
    return Answer(StoreStats(numbers=numbers, facts=facts, namespaces=usages))


def table_of(text: str, first: str) -> dict[str, list[str]]:
    """The cells of the table whose heading begins with ``first``, by column."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(first))
    headings = [part.strip() for part in lines[at].split("  ") if part.strip()]
    starts = [lines[at].index(heading) for heading in headings]
    rows = []
    for line in lines[at + 1 :]:
        if line.startswith(("pages evicted", "namespace ")) or ": " in line or "and " in line:
            break
        rows.append([line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)])
    return {h: [row[i] for row in rows] for i, h in enumerate(headings)}


@pytest.mark.parametrize(
    ("num_stores", "said"), [(1, "on 1 node, 2 wanted"), (2, "on 2 of 2 nodes")]
)
def test_fewer_stores_than_replicas_are_said_to_be_too_few(num_stores: int, said: str) -> None:
    names = [f"s{n}" for n in range(num_stores)]
    stores = {name: summary(member_of(name, NUMBERS), stats_of(NUMBERS)) for name in names}
    assert f"every page {said}" in store_text(stores).splitlines()[0]


def test_a_summary_has_every_number_that_the_issue_asks_for() -> None:
    answer = stats_of(NUMBERS, NamespaceUsage(b"n" * 32, 9, 90, 900))
    shown = summary(member_of("s1", {"num_pages": 1.0}), answer)
    assert shown["pages"] == {"ready": 12, "spilled": 3456, "writing": 7, "owed": 2}
    assert shown["memory"] == {"nbytes": 4096, "used_nbytes": 3072, "pinned_nbytes": 512}
    assert shown["ssd"] == {
        **{"nbytes": 1048576, "used_nbytes": 524288, "pages": 4000, "degraded": None},
        "given_nbytes": None,
    }
    assert (shown["match_hit_ratio"], shown["pages_read"]) == (0.75, 11)
    assert shown["evicted"] == {"watermark": 40, "demand": 30, "quota": 20, "slab": 10}
    assert (shown["leases"], shown["reservations"], shown["waits"]) == (5, 7, 6)
    assert (shown["replicas_missing"], shown["repairing"]) == (8, True)
    assert (shown["policy"], shown["uptime_s"], shown["answered"]) == ("heat", 3725.4, True)
    use = {"namespace": (b"n" * 32).hex(), "pages": 9, "memory_nbytes": 90, "ssd_nbytes": 900}
    assert shown["namespaces"] == [use]
    json.dumps(shown)


def test_the_tables_say_what_the_summary_says() -> None:
    text = store_text({"s1": summary(member_of("s1", {}), stats_of(NUMBERS))})
    pages = table_of(text, "store  ready")
    assert {name: cells[0] for name, cells in pages.items()} == {
        **{"store": "s1", "ready": "12", "spilled": "3456", "writing": "7", "owed": "2"},
        **{"memory used": "3.0 of 4.0 KiB", "SSD used": "512 KiB of 1.0 MiB", "matched": "75.0 %"},
    }
    work = {name: cells[0] for name, cells in table_of(text, "store  up").items()}
    assert len(work.pop("life")) == 6
    assert work == {
        **{"store": "s1", "up": "1 h 2 m", "read": "11", "leases": "5", "waits": "6"},
        **{"watermark": "40", "demand": "30", "quota": "20", "slab": "10"},
        "missing": "8",
    }
    assert "s1 is repairing" in text
    assert text.startswith("page store: policy heat; every page on 1 node, 2 wanted\n")


def test_no_table_is_wider_than_a_narrow_terminal() -> None:
    numbers = dict.fromkeys(NUMBERS, HUGE) | {"repairing": 1.0, "uptime_s": 8.6e6}
    numbers |= {"segment_nbytes": 1023.0 * (1 << 30), "free_nbytes": 1022.1 * (1 << 30)}
    numbers |= {"ssd_nbytes": 1023.0 * (1 << 40), "ssd_used_nbytes": 1022.9 * (1 << 30)}
    uses = [NamespaceUsage(bytes([n]) * 32, 10**11, 1 << 40, 1 << 49) for n in range(99)]
    stores = {
        name: summary(member_of(name, numbers), stats_of(numbers, *uses))
        for name in ("prefix-store-1", "store-2")
    }
    text = store_text(stores)
    assert max(map(len, text.splitlines())) <= WIDTH_MAX


def test_the_largest_namespaces_of_all_stores_are_shown_and_the_rest_is_counted() -> None:
    one = [NamespaceUsage(bytes([n]) * 32, 1, 100 * n, 0) for n in range(1, 15)]
    other = [NamespaceUsage(bytes([1]) * 32, 5, 0, 10_000), NamespaceUsage(b"", 2, 1, 0)]
    stores = {
        "s1": summary(member_of("s1", NUMBERS), stats_of(NUMBERS, *one)),
        "s2": summary(member_of("s2", NUMBERS), stats_of(NUMBERS, *other)),
    }
    totals = by_namespace(stores.values())
    assert totals[0] == {
        **{"namespace": "01" * 32, "pages": 6, "memory_nbytes": 100, "ssd_nbytes": 10_000},
    }
    assert len(totals) == 15
    text = store_text(stores)
    assert f"and {15 - NAMESPACES_SHOWN} smaller namespaces" in text
    assert "0e" * 32 in text
    assert "02" * 32 not in text


def test_pages_without_a_namespace_are_shown_as_such() -> None:
    answer = stats_of(NUMBERS, NamespaceUsage(b"", 2, 1, 0))
    assert "(none named)" in store_text({"s1": summary(member_of("s1", NUMBERS), answer)})


def test_less_of_a_disk_than_was_given_is_explained() -> None:
    numbers = NUMBERS | {"ssd_nbytes": float(31 * (64 << 20)), "ssd_used_nbytes": 0.0}
    stores = {}
    for name, given in (("s1", 2 << 30), ("s2", 2 << 30), ("s3", 31 * (64 << 20))):
        member = member_of(name, numbers, ssd_given_nbytes=str(given))
        stores[name] = summary(member, stats_of(numbers))
    assert stores["s1"]["ssd"]["given_nbytes"] == 2 << 30
    text = store_text(stores)
    assert table_of(text, "store  ready")["SSD used"] == ["0 B of 1.9 GiB"] * 3
    explained = [line for line in text.splitlines() if "of --ssd" in line]
    assert explained == [
        "s1, s2: 1.9 GiB of the 2.0 GiB of --ssd hold pages: its file has a header and whole slabs"
    ]


def test_a_disk_that_takes_no_pages_is_loud_and_says_why() -> None:
    broken = NUMBERS | {"ssd_degraded": 1.0}
    why = stats_of(broken, ssd_degraded="write: No space left on device")
    text = store_text({"s1": summary(member_of("s1", broken), why)})
    assert text.splitlines()[-1] == "s1: THE SSD TAKES NO PAGES: write: No space left on device"
    silent = store_text({"s1": summary(member_of("s1", broken), Answer(None, "lost"))})
    assert "THE SSD TAKES NO PAGES" in silent


def test_a_store_that_does_not_answer_is_shown_as_of_its_heartbeat_and_named() -> None:
    shown = summary(member_of("s1", NUMBERS), Answer(None, "PeerUnreachable: nobody"))
    assert shown["pages"]["ready"] == 12
    assert not shown["answered"]
    assert "s1 did not answer (PeerUnreachable: nobody)" in store_text({"s1": shown})


def test_a_new_store_without_numbers_can_be_shown() -> None:
    shown = summary(member_of("s1", {}), Answer(None, "starting"))
    assert shown["match_hit_ratio"] is None
    assert shown["ssd"] is None
    text = store_text({"s1": shown})
    assert table_of(text, "store  ready")["SSD used"] == ["-"]


def test_different_policies_are_said_by_node() -> None:
    stores = {
        name: summary(member_of(name, NUMBERS, policy), stats_of(NUMBERS))
        for name, policy in (("s1", "lru"), ("s2", "heat"))
    }
    assert store_text(stores).startswith("page store: policy s1 lru, s2 heat; ")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0"), (99_999, "99999"), (100_000, "100k"), (999_499, "999k"), (999_500, "1.0M")),
        *((1_234_567, "1.2M"), (99_949_999, "99.9M"), (99_950_000, "100M"), (10**9, "1.0G")),
    ],
)
def test_counts_are_short(number: int, text: str) -> None:
    assert short_count(number) == text


# ---- a real cluster, in this process


@pytest.fixture
async def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InProcessCluster]:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    (tmp_path / "ssd").mkdir()
    told: dict[str, Any] = {"segment": "1MiB", "ssd": f"{tmp_path}/ssd:4MiB", "store": 2}
    options = UpOptions.of(
        model="fake", port=0, replicas=2, policy="heat", transfer="loopback", **told
    )
    cluster = InProcessCluster(with_ports(options))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


async def complete(cluster: InProcessCluster, salt: str) -> None:
    body = {"model": "fake", "prompt": list(range(200)), "max_tokens": 2, "cache_salt": salt}
    url = f"{cluster.url}/v1/completions"
    response = await asyncio.to_thread(post_json, url, body, headers={}, timeout_s=60.0)
    assert response is not None
    assert response.status == 200


async def look(cluster: InProcessCluster) -> tuple[MembershipView, dict[str, Any]]:
    options = JoinOptions.of(join=f"tcp://127.0.0.1:{cluster.options.join_port}")
    view, answers = await fetch_all(options, timeout_s=30.0)
    found = [m for m in view.members if m.node_id in answers]
    return view, {m.node_id: describe(m, answers[m.node_id])["store"] for m in found}


async def pages_by_namespace(cluster: InProcessCluster) -> dict[str, int]:
    _, stores = await look(cluster)
    return {use["namespace"]: use["pages"] for use in by_namespace(stores.values())}


@pytest.mark.net
async def test_a_tenants_pages_can_be_named_seen_and_cleared(live: InProcessCluster) -> None:
    view, stores = await look(live)
    assert list(stores) == ["store-1", "store-2"]
    assert all(store["answered"] and store["ssd"] for store in stores.values())
    assert all(store["ssd"]["given_nbytes"] == 4 << 20 for store in stores.values())
    names = {
        salt: cache.namespace_hex(view, model="fake", salt=salt, adapter=None) for salt in "ab"
    }
    await complete(live, "a")
    await complete(live, "b")
    async with asyncio.timeout(60):
        while len(await pages_by_namespace(live)) < 2:
            pass
        while not min((held := await pages_by_namespace(live)).values()) >= 2 * 12:
            pass
    assert set(held) == set(names.values())
    done = await asyncio.to_thread(cache.clear, view, {"salt": "a"}, None)
    report = cache.report(done)
    assert cache.nothing_held(done) is None
    assert report[0] == f"namespace {names['a']}"
    assert len(report) == 1 + 4, "a prefill, a decode and two store nodes"
    assert set(await pages_by_namespace(live)) == {names["b"]}
    with pytest.raises(ConfigError, match=r"namespace: .*pattern"):
        await asyncio.to_thread(cache.clear, view, {"namespace": "x"}, None)
    await asyncio.to_thread(cache.clear, view, {"namespace": names["b"]}, None)
    assert await pages_by_namespace(live) == {}
    for order, how in (
        ({"salt": "A"}, "model 'fake', salt 'A', no adapter"),
        ({"namespace": names["b"]}, "as given"),
    ):
        missed = cache.nothing_held(await asyncio.to_thread(cache.clear, view, order, None))
        assert missed is not None
        assert how in str(missed)
    everything = await asyncio.to_thread(cache.clear, view, {"all": True}, None)
    assert cache.nothing_held(everything) is None, "a cluster that holds nothing is as wanted"


@pytest.mark.net
async def test_what_a_namespace_needs_is_said_when_it_is_missing(live: InProcessCluster) -> None:
    options = JoinOptions.of(join=f"tcp://127.0.0.1:{live.options.join_port}")
    view = await fetch(options, timeout_s=30.0)
    with pytest.raises(ConfigError, match="--model other: this cluster serves fake"):
        cache.namespace_hex(view, model="other", salt=None, adapter=None)
    with pytest.raises(ConfigError, match="--salt '': empty"):
        cache.namespace_hex(view, model=None, salt="", adapter=None)
    assert len(cache.namespace_hex(view, model="/models/fake", salt=None, adapter="x")) == 64


@pytest.mark.net
async def test_clearing_a_name_that_nobody_uses_is_said_and_has_an_exit_code_of_its_own(
    live: InProcessCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await complete(live, "tenant")
    at = ["--join", live.join_url]
    assert await asyncio.to_thread(main, ["cache", "clear", "--salt", "tenannt", *at]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    view = await fetch(JoinOptions.of(join=live.join_url), timeout_s=30.0)
    name = cache.namespace_hex(view, model=None, salt="tenannt", adapter=None)
    wanted = f"no pages under namespace {name} (computed from model 'fake', salt 'tenannt', no "
    assert line.startswith(f"kvferry: error: {wanted}adapter): nothing was cleared.")
    assert "`kvferry status` lists the namespaces" in line
    assert await asyncio.to_thread(main, ["cache", "clear", "--salt", "tenant", *at]) == 0
    assert await asyncio.to_thread(main, ["cache", "clear", "--all", *at]) == 0
    assert capsys.readouterr().err == ""


def test_without_nodes_there_is_no_namespace_and_without_a_gateway_no_clearing() -> None:
    with pytest.raises(StartError, match="no prefill or decode node has joined"):
        cache.namespace_hex(MembershipView(), model=None, salt=None, adapter=None)
    with pytest.raises(StartError, match="kvferry gateway"):
        cache.clear(MembershipView(), {"all": True}, None)


def test_pages_that_an_ssd_did_not_get_are_told() -> None:
    lost = {**NUMBERS, "evicted_unspilled": 53.0}
    shown = summary(member_of("s1", {}), stats_of(lost))
    assert shown["unspilled"] == 53
    assert "s1: 53 pages left memory without a copy on the SSD" in store_text({"s1": shown})
    calm = summary(member_of("s1", {}), stats_of(NUMBERS))
    assert "without a copy" not in store_text({"s1": calm})
