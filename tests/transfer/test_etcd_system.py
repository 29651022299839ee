"""The whole system, its members in etcd: it serves, also while etcd is away and after a pause.

``KVFERRY_TEST_OUTAGE_S`` is how long etcd stands still (60: the minute that users are promised).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.client import complete, tokens_of
from tests.e2e.cluster import ROOT, Cluster, Proc
from tests.e2e.reference import expected, prompt_of
from tests.transfer.etcd_server import EtcdServer, needs_etcd, running_etcd
from transfer.etcd.seat import LEASE_TTL_S

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.shared_processes, needs_etcd]

OUTAGE_S = float(os.environ.get("KVFERRY_TEST_OUTAGE_S", LEASE_TTL_S + 2.0))
WANTED = {"store": 1, "prefill": 1, "decode": 1}
SEEN_WITHIN_S = 20.0


class EtcdCluster(Cluster):
    """Every role, the gateway too, joins an etcd."""

    etcd: EtcdServer

    @property
    def join(self) -> str:
        return self.etcd.url

    def start_all(self) -> None:
        for role in ("decode", "store", "prefill"):
            self.start(role)
        self.start("gateway", "--join", self.etcd.url)

    def listed(self) -> dict[str, dict[str, Any]]:
        """Members by node id, as the gateway shows them."""
        body = httpx.get(f"{self.url}/admin/cluster", timeout=5).json()
        return {member["node_id"]: member for member in body["members"]}

    def incarnation_of(self, proc: Proc) -> str | None:
        """Of the member that is this process; None while it is not listed."""
        pid = str(proc.popen.pid)
        found = [m for m in self.listed().values() if m["labels"].get("pid") == pid]
        return found[0]["incarnation"] if found else None


def until(condition: Callable[[], bool], within_s: float = SEEN_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One for all tests: starting it takes longer than they do. Each leaves it as it was."""
    directory: Path = tmp_path_factory.mktemp("etcd-system")
    with running_etcd(directory) as etcd:
        made = EtcdCluster(directory, "tcp", "fake")
        made.etcd = etcd
        try:
            made.start_all()
            made.wait_for(WANTED)
            yield made
        except BaseException as error:
            error.add_note(made.logs())
            raise
        finally:
            made.stop()


def serves(cluster: Cluster, seed: int) -> dict[str, Any]:
    prompt = prompt_of(100, seed=seed)
    body: dict[str, Any] = complete(cluster.url, prompt, 10)
    assert tokens_of(body) == expected(prompt, 10)
    return body


def kvferry(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "launch.main", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_all_roles_joined_by_etcd_serve_and_status_shows_them(cluster: EtcdCluster) -> None:
    assert serves(cluster, 1)["kvferry"]["pages_pulled"] > 0
    shown = kvferry("status", "--join", cluster.etcd.url, "--json")
    assert shown.returncode == 0, shown.stderr
    found = {member["role"]: member for member in json.loads(shown.stdout)}
    assert set(found) == {"gateway", "store", "prefill", "decode"}
    assert all(0 <= member["heartbeat_age_s"] <= LEASE_TTL_S for member in found.values())
    assert found["gateway"]["labels"]["url"] == cluster.url
    nobody = kvferry("status", "--join", "etcd://127.0.0.1:9/test", "--timeout", "1")
    assert nobody.returncode == 1
    assert "--join etcd://127.0.0.1:9/test: nobody answered" in nobody.stderr


@pytest.mark.timeout(OUTAGE_S + 120)
def test_traffic_goes_on_while_etcd_is_away(cluster: EtcdCluster) -> None:
    before = {m["node_id"]: m["incarnation"] for m in cluster.listed().values()}
    cluster.etcd.stand_still()
    end, seed = time.monotonic() + OUTAGE_S, 100
    while time.monotonic() < end:
        serves(cluster, seed)
        assert httpx.get(f"{cluster.url}/health", timeout=5).status_code == 200
        seed += 1
    ready = httpx.get(f"{cluster.url}/ready", timeout=5)
    assert ready.status_code == 200
    assert "the last view is used" in ready.text
    cluster.etcd.go_on()
    until(lambda: "the last view is used" not in httpx.get(f"{cluster.url}/ready").text)
    for seed in range(200, 230):
        serves(cluster, seed)
    assert {m["node_id"]: m["incarnation"] for m in cluster.listed().values()} == before


@pytest.mark.parametrize(("role", "seed"), [("store", 300), ("decode", 310)])
def test_a_node_that_stood_still_beyond_its_lease_serves_again(
    cluster: EtcdCluster, role: str, seed: int
) -> None:
    proc = cluster.proc_of(role)
    serves(cluster, seed)
    before = cluster.incarnation_of(proc)
    proc.signal(signal.SIGSTOP)
    until(lambda: cluster.incarnation_of(proc) is None)
    proc.signal(signal.SIGCONT)
    until(lambda: cluster.incarnation_of(proc) not in (None, before))
    cluster.wait_for(WANTED)
    assert serves(cluster, seed)["kvferry"]["decode_node"]
    assert serves(cluster, seed + 1)["kvferry"]["pages_pulled"] > 0
    assert "another incarnation" in proc.log.read_text()


def test_a_node_of_another_page_size_is_refused_with_both_sides(cluster: EtcdCluster) -> None:
    other = cluster.start("decode", "--page-size", "32")
    assert other.popen.wait(60) == 2, "starting it again would not help"
    text = other.log.read_text()
    assert "page_size=32" in text
    assert "page_size=16" in text
    serves(cluster, 400)
