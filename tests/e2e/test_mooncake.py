"""Claims about the whole path with Mooncake as the page store: no store node of kvferry runs.

Every token of the fake model is a function of every KV byte before it, so one wrong byte anywhere
between the prefill node, Mooncake and the decode node changes the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cluster import LocalCluster
from launch.config import UpOptions
from tests.e2e.client import complete, tokens_of
from tests.e2e.cluster import Cluster, running
from tests.e2e.reference import expected, prompt_of
from tests.kvstore.mooncake import cluster as mooncake
from tests.until import until

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.shared_processes]

PAGE = 16
WITHIN_S = 60.0
DELAYS = ["--fake-token-delay", "0.0005"]  # restoring a page is cheaper than computing it


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mooncake.MooncakeCluster]:
    mooncake.require_library()
    with mooncake.running(tmp_path_factory.mktemp("engine")) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(
    engine: mooncake.MooncakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    store = ["--store", engine.url]
    options = {"prefill": [*DELAYS, *store], "decode": store}
    with running(tmp_path_factory.mktemp("cluster"), store=0, options=options) as started:
        yield started


def test_every_page_crosses_mooncake_and_no_byte_is_wrong(cluster: Cluster) -> None:
    prompt = prompt_of(300, seed=1)
    answer = complete(cluster.url, prompt, 40)
    assert tokens_of(answer) == expected(prompt, 40)
    trace = answer["kvferry"]
    assert trace["computed_tokens"] == 300
    assert trace["pages_pulled"] == -(-300 // PAGE)
    assert trace["pages_pushed"] >= -(-300 // PAGE)


def test_an_identical_prompt_hits(cluster: Cluster) -> None:
    prompt = prompt_of(200, seed=2)
    first = complete(cluster.url, prompt, 8)
    again = complete(cluster.url, prompt, 8)
    assert tokens_of(again) == tokens_of(first) == expected(prompt, 8)
    assert again["kvferry"]["computed_tokens"] <= PAGE


def test_a_new_prefill_node_hits_what_the_dead_one_put_into_mooncake(cluster: Cluster) -> None:
    prompt = prompt_of(400, seed=3)
    first = complete(cluster.url, prompt, 8)
    old = cluster.proc_of("prefill")
    old.kill()
    cluster.wait_for({"decode": 1})
    cluster.restart(old)
    cluster.wait_for({"prefill": 1, "decode": 1})
    again = complete(cluster.url, prompt, 8)
    assert tokens_of(again) == tokens_of(first)
    assert again["kvferry"]["computed_tokens"] <= PAGE


def test_a_master_that_is_killed_is_said_to_be_lost_and_its_return_brings_the_pages_back(
    tmp_path: Path,
) -> None:
    mooncake.require_library()
    (tmp_path / "engine").mkdir()
    (tmp_path / "nodes").mkdir()
    with mooncake.running(tmp_path / "engine") as engine:
        store = ["--store", engine.url]
        options = {"prefill": [*DELAYS, *store], "decode": store}
        with running(tmp_path / "nodes", store=0, options=options) as cluster:
            log = cluster.proc_of("prefill").log
            prompt = prompt_of(200, seed=5)
            assert tokens_of(complete(cluster.url, prompt, 4)) == expected(prompt, 4)
            engine.kill("master")
            for seed in range(6, 12):
                prompt = prompt_of(200, seed=seed)
                assert tokens_of(complete(cluster.url, prompt, 4)) == expected(prompt, 4)
            assert "answers no more" in log.read_text()
            engine.start_master()
            engine.kill("owner")
            engine.start_owner()
            until(lambda: "answers again" in log.read_text(), cluster.logs, WITHIN_S)

            def crosses() -> bool:
                answer = complete(cluster.url, prompt_of(200, seed=20), 4)
                return bool(answer["kvferry"]["pages_pulled"])

            until(crosses, cluster.logs, WITHIN_S)


async def test_one_command_runs_a_cluster_on_a_mooncake_that_is_there(
    engine: mooncake.MooncakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kvferry up --store mooncake://...``: no store process, and every page passes Mooncake."""
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    options = UpOptions.of(model="fake", port=0, threads=1, store=engine.url)
    up = LocalCluster(options)
    try:
        await up.start()
        assert set(up.pids) == {"gateway", "prefill-1", "decode-1"}
        prompt = prompt_of(300, seed=9)
        answer = await asyncio.to_thread(complete, up.url, prompt, 20)
        assert tokens_of(answer) == expected(prompt, 20)
        assert answer["kvferry"]["pages_pulled"] == -(-300 // PAGE)
    finally:
        await up.close()
