"""Engines of simulated nodes on one virtual clock.

Owns ``SimWorld`` and its runner. ``run_sim`` fails on tasks that outlive the check, on a deadlock
and on errors that nobody awaited.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, run_sim
from tests.sim.transfer import SimTransfer
from tests.transfer.contract.world import Check, Hold
from transfer.config import TransferConfig
from transfer.interface import Region
from transfer.region import HostRegion
from transfer.token import decode_token

CALM = FaultPlan(silent_crash=0.0)


class SimWorld:
    """``World`` for ``SimTransfer``. Each engine is a node of its own."""

    serves_registered_memory = revoking_waits = True

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._num_nodes = 0

    async def make(self, **settings: Any) -> SimTransfer:
        self._num_nodes += 1
        return self._start(f"node-{self._num_nodes}", TransferConfig(**settings))

    async def restart(self, engine: SimTransfer) -> SimTransfer:
        self._cluster.crash(engine.node)
        self._cluster.restart(engine.node)
        return self._start(engine.node, engine.config)

    def _start(self, name: str, config: TransferConfig) -> SimTransfer:
        node, cluster = self._cluster.node(name), self._cluster
        node.transfer = SimTransfer(cluster.bulk, name, node.life, node.rng, config)
        return node.transfer

    def hold(
        self, user: SimTransfer, region: Region, *, passes: int = 1, inside: bool = False
    ) -> Hold:
        assert isinstance(region, HostRegion), region
        hold = Hold(passes)
        self._cluster.bulk.holds[region] = hold
        return hold

    async def asked(self, user: SimTransfer) -> None:
        await asyncio.sleep(0)  # an operation begins with its task

    def disrupt(self, user: SimTransfer, token: bytes) -> None:
        user.disrupt(decode_token(token).endpoint)


def run(transport: str, check: Check, **parameters: Any) -> None:
    """Run one check in virtual time."""

    async def scenario(cluster: SimCluster) -> None:
        await check(SimWorld(cluster), **parameters)
        cluster.crash_all()

    run_sim(scenario, seed=1, plan=CALM)
