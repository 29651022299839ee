"""Engines of one real transport, on an event loop of their own.

Owns ``RealWorld`` and its runner. Checks that no task, thread, socket or shared memory outlives the
check.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tests.transfer.bulk_harness import Engines, checked_engines
from tests.transfer.contract.holds import hold_at_gate, hold_copies
from tests.transfer.contract.holds_ucx import links_that_can_be_held
from tests.transfer.contract.world import Check, Hold
from transfer.engine import TransferEngine
from transfer.interface import Region
from transfer.region import HostRegion
from transfer.token import decode_token

_LOOPBACK_PORTS = itertools.count(1)  # names within this process, not sockets
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
BY_COPIER = frozenset({"loopback", "shm", "auto"})


class RealWorld:
    """``World`` for ``TransferEngine``."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.serves_registered_memory = self.revoking_waits = engines.transport != "shm"
        self._settings: dict[TransferEngine, dict[str, Any]] = {}

    async def make(self, **settings: Any) -> TransferEngine:
        if self._engines.transport == "loopback":
            settings.setdefault("port", next(_LOOPBACK_PORTS))
        engine = await self._engines.make(**settings)
        self._settings[engine] = settings
        return engine

    async def restart(self, engine: TransferEngine) -> TransferEngine:
        addresses = {"port": engine.address, "ucx_port": engine._endpoint.ucx}
        ports = {k: int(v.rpartition(":")[2]) for k, v in addresses.items() if v}
        return await self.make(**self._settings[engine] | ports)

    def hold(
        self, user: TransferEngine, region: Region, *, passes: int = 1, inside: bool = False
    ) -> Hold:
        assert isinstance(region, HostRegion), region
        if self._engines.transport in BY_COPIER:
            nbytes = region.nbytes  # not the region: a hold keeps no memory alive
            return hold_copies(user, lambda c: c.remote.nbytes == nbytes, passes, inside=inside)
        return hold_at_gate(region, passes)

    async def asked(self, user: TransferEngine) -> None:
        threads = [user._io, None if user._ucx is None else user._ucx._io]
        for io in filter(None, threads):
            await io.run(asyncio.sleep(0))  # its turn comes after everything given to it before

    def disrupt(self, user: TransferEngine, token: bytes) -> None:
        for transport in user._transports.values():
            transport.disrupt(decode_token(token).endpoint)


def run(
    transport: str, check: Check, *, new_loop: LoopFactory | None = None, **parameters: Any
) -> None:
    """Run one check on a fresh event loop, asyncio's own or what ``new_loop`` returns."""

    async def body() -> None:
        with links_that_can_be_held():
            async with checked_engines(transport) as engines:
                await check(RealWorld(engines), **parameters)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body())
