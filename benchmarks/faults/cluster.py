"""Three store nodes and a registry as real processes, and a client in this one.

Owns the processes that it started: signals them by their handle, ends them all.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from kvstore.client.store_client import StoreClient
from kvstore.page import PageSpec
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.identity import NodeId, Role, new_identity
from transfer.interface import deadline_after
from transfer.registry_client import RegistryMembership
from transfer.zmq_network import ZmqNetwork

NUM_NODES = 3
START_S = 60.0
END_S = 15.0


class FaultCluster:
    """``async with`` it; nothing is left behind."""

    def __init__(
        self, *, replicas: int, transfer: str, spec: PageSpec, segment_nbytes: int
    ) -> None:
        self.spec = spec
        self._options = (
            *("--replicas", str(replicas), "--transfer", transfer),
            *("--segment-nbytes", str(segment_nbytes)),
        )
        self._transport = transfer
        self._processes: dict[str, Process] = {}

    async def __aenter__(self) -> FaultCluster:
        try:
            self._join = await self._start("registry")
            names = [f"store-{i}" for i in range(NUM_NODES)]
            await asyncio.gather(*(self.start_node(name) for name in names))
            await self._open_client()
        except BaseException:
            await self._end_processes()
            raise
        return self

    async def _open_client(self) -> None:
        identity = new_identity(Role.OBSERVER)
        self._network = ZmqNetwork()
        self.transfer = TransferEngine(TransferConfig(transport=self._transport))
        await self.transfer.start()
        self.membership = RegistryMembership(self._network, self._join, identity)
        await self.membership.watch_only(deadline_s=deadline_after(START_S))
        self.client = StoreClient(
            identity=identity,
            network=self._network,
            transfer=self.transfer,
            membership=self.membership,
            spec=self.spec,
        )
        complete = asyncio.Event()
        self.membership.subscribe(
            lambda view: complete.set() if len(self.alive()) == NUM_NODES else None
        )
        async with asyncio.timeout(START_S):
            await complete.wait()

    async def start_node(self, name: str) -> None:
        await self._start(name, "--join", self._join, *self._options)

    async def _start(self, name: str, *args: str) -> str:
        """Start a process; returns the line that it prints when it is ready."""
        command = (sys.executable, "-m", "benchmarks.faults.process", name, *args)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
        self._processes[name] = process
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise RuntimeError(f"{name} ended before it was ready")
        return line

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def alive(self) -> set[NodeId]:
        """The store nodes in the client's view."""
        return {member.node_id for member in self.membership.view.with_role(Role.STORE)}

    async def numbers(self) -> dict[NodeId, dict[str, float]]:
        """What every store node that answers says of itself."""
        return await self.client.stats(deadline_s=deadline_after(5.0))

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()
        await self.membership.leave()
        await self.transfer.close()
        await self._network.close()
        await self._end_processes()

    async def _end_processes(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                assert process.stdin is not None
                process.stdin.close()
        for process in self._processes.values():
            try:
                async with asyncio.timeout(END_S):
                    await process.communicate()  # its pipes have ended, too, when this returns
            except TimeoutError:
                process.kill()
                await process.communicate()
