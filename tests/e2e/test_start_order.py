"""Roles come up in every order; pools grow and shrink while serving."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from tests.e2e.client import complete, tokens_of
from tests.e2e.cluster import Cluster, running
from tests.e2e.reference import expected, prompt_of

pytestmark = [pytest.mark.net, pytest.mark.slow]

ORDERS = list(itertools.permutations(["store", "gateway", "prefill", "decode"]))


@pytest.mark.parametrize("order", ORDERS[::4], ids="-".join)
def test_any_start_order_serves(tmp_path: Path, order: tuple[str, ...]) -> None:
    cluster = Cluster(tmp_path, "tcp", "fake")
    try:
        for role in order:
            proc = cluster.start(role)
            cluster.wait_until_it_says_something(proc)
        cluster.wait_for({"store": 1, "prefill": 1, "decode": 1})
        prompt = prompt_of(80, seed=1)
        body = complete(cluster.url, prompt, 10)
        assert tokens_of(body) == expected(prompt, 10)
        assert body["kvferry"]["pages_pulled"] == 5
    finally:
        cluster.stop()


def test_pools_grow_and_shrink_while_serving(tmp_path: Path) -> None:
    with running(tmp_path) as cluster:
        for role in ("prefill", "decode", "store"):
            cluster.start(role)
        cluster.wait_for({"store": 2, "prefill": 2, "decode": 2})
        prompt = prompt_of(200, seed=2)
        assert tokens_of(complete(cluster.url, prompt, 10)) == expected(prompt, 10)
        leaving = [cluster.proc_of(role) for role in ("prefill", "decode", "store")]
        for proc in leaving:
            proc.signal(signal.SIGTERM)
        cluster.wait_for({"store": 1, "prefill": 1, "decode": 1})
        prompt = prompt_of(210, seed=3)
        assert tokens_of(complete(cluster.url, prompt, 10)) == expected(prompt, 10)
        assert [proc.popen.wait(timeout=60) for proc in leaving] == [0, 0, 0]
