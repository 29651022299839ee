"""The whole system on a bad wire: faults are injected into every transfer of every process.

Resets, truncations, corrupt bytes, delays and operations that never complete cost time; every
answer is still the one that a perfect machine gives, and what was corrupt is counted.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.events import GetStats, StatsReply
from tests.e2e.client import complete, tokens_of
from tests.e2e.cluster import Cluster, running
from tests.e2e.reference import expected, prompt_of
from transfer.channel import Hello
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after
from transfer.zmq_network import ZmqNetwork

pytestmark = [pytest.mark.net, pytest.mark.slow]

RULES = (
    "read nth=7 drop count=2; any nth=23 reset; any nth=31 truncate; any p=0.3 corrupt=20; "
    "any p=0.3 delay=1ms..40ms; any p=0.3 stall=1ms..20ms; seed=3"
)
FAULTY = {"KVFERRY_INJECT": RULES, "KVFERRY_ALLOW_INJECT": "1"}
KINDS = ("drop", "reset", "truncate", "corrupt", "delay", "stall")
# Slow enough that restoring a page is always cheaper than computing it, as with a real model.
DELAYS = {"prefill": ["--fake-token-delay", "0.0002"]}
NUM_PROMPTS = 16
MAX_ROUNDS = 20
MAX_TOKENS = 24


async def count(network: ZmqNetwork, address: str, name: str) -> float:
    """One counter of one node."""
    hello, deadline_s = Hello(identity=new_identity(Role.OBSERVER)), deadline_after(10.0)
    channel = await network.connect(address, hello, deadline_s=deadline_s)
    stats = await channel.request(GetStats(), StatsReply, deadline_s=deadline_s)
    await channel.close()
    return stats.counters[name]


async def num_corrupt(members: list[dict[str, Any]]) -> float:
    """Pages that prefill and decode nodes found corrupt."""
    names = {"prefill": "pages_pulled_corrupt", "decode": "num_pull_corrupt"}
    network = ZmqNetwork()
    try:
        return sum(
            [
                await count(network, member["address"], names[member["role"]])
                for member in members
                if member["role"] in names
            ]
        )
    finally:
        await network.close()


def injected(cluster: Cluster) -> set[str]:
    """The kinds of faults that any process has met."""
    logs = "\n".join(proc.log.read_text() for proc in cluster.procs.values())
    return {kind for kind in KINDS if f"injected the first {kind}" in logs}


@pytest.mark.parametrize(("transport", "num"), [("tcp", 2), ("shm", 1)])
def test_every_answer_is_right_on_a_wire_that_breaks_corrupts_delays_and_drops(
    tmp_path: Path, transport: str, num: int
) -> None:
    shape = {"prefill": num, "decode": num, "store": num}
    corrupt, kinds = 0.0, set[str]()
    with running(tmp_path, **shape, transport=transport, options=DELAYS, env=FAULTY) as cluster:
        for number in range(MAX_ROUNDS):
            prompts = [prompt_of(40 + 37 * i, seed=100 * number + i) for i in range(NUM_PROMPTS)]
            wanted = [expected(prompt, MAX_TOKENS) for prompt in prompts]
            with ThreadPoolExecutor(8) as pool:
                bodies = list(pool.map(lambda p: complete(cluster.url, p, MAX_TOKENS), prompts))
            assert [tokens_of(body) for body in bodies] == wanted
            members = httpx.get(f"{cluster.url}/admin/cluster", timeout=5).json()["members"]
            corrupt, kinds = asyncio.run(num_corrupt(members)), injected(cluster)
            if corrupt and kinds == set(KINDS):
                break
        for proc in cluster.procs.values():
            announced = "FAULTS ARE INJECTED" in proc.log.read_text()
            assert announced is (proc.role != "gateway"), proc.name
    assert corrupt > 0
    assert kinds == set(KINDS)
