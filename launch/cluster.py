"""A whole cluster as child processes: which processes, and when it serves.

Owns the plan (names, command lines, devices) and the start to readiness. The processes are the
supervisor's. ``up`` and the demo use the same ``LocalCluster``.

The gateway is stopped first, so that what is running finishes while the nodes are still there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

from launch import process_env
from launch.config import (
    ComputeOptions,
    GatewayOptions,
    NodeOptions,
    Options,
    PageStoreOptions,
    StoreOptions,
    UpOptions,
)
from launch.errors import ConfigError, LaunchError, StartError
from launch.event_ports import check_event_ports, port_options
from launch.http_client import get_json
from launch.ports import check_free, free_port, url_host
from launch.progress import say
from launch.store_settings import ssd_of
from launch.supervisor import ChildSpec, Supervisor

logger = logging.getLogger(__name__)

READY_POLL_S = 0.1
HTTP_TIMEOUT_S = 2.0

_COMPUTE_FIELDS = set(ComputeOptions.model_fields)
_STORE_FIELDS = set(PageStoreOptions.model_fields) - set(Options.model_fields)


def command(role: str, *arguments: str) -> list[str]:
    """Return the command line of a role with this interpreter (``-P``: not from the directory)."""
    return [sys.executable, "-P", "-m", "launch.main", role, *arguments]


def python_path() -> dict[str, str]:
    """Return the environment in which a child finds the same packages as this process."""
    root = str(Path(__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    paths = [path for path in known.split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([root, *(p for p in paths if p != root)])}


def with_ports(options: UpOptions) -> UpOptions:
    """Return the options with real, free ports.

    Raises:
        ConfigError: a port that was named is in use, or was named twice.
    """
    port = options.port or free_port(options.host)
    wanted = GatewayOptions.of(port=options.port, join_port=options.join_port).registry_port
    join_port = wanted or free_port(options.host)
    if port == join_port:
        raise ConfigError(f"--join-port {join_port}: that is --port, too: give another one")
    check_free(options.host, port, "--port")
    check_free(options.host, join_port, "--join-port")
    promised = {"--port": port, "--join-port": join_port}
    check_event_ports(options, num_nodes(options), promised=promised)
    return options.model_copy(update={"port": port, "join_port": join_port})


def num_nodes(options: UpOptions) -> int:
    """Return how many processes publish KV events: all but the gateway."""
    return options.num_stores + options.prefill + options.decode


def join_url(options: UpOptions) -> str:
    """Return the address of the gateway's registry. The ports must be real."""
    return f"tcp://{url_host(options.advertise_host or options.host)}:{options.join_port}"


def plan(options: UpOptions) -> list[ChildSpec]:
    """Return all processes of the cluster. The ports must be real."""
    common: dict[str, Any] = {"host": options.host, "drain_timeout": options.drain_timeout}
    common |= {"log_level": options.log_level, "secret_file": options.secret_file}
    common |= {"advertise_host": options.advertise_host}
    join: dict[str, Any] = {"join": join_url(options)}
    join |= {"transfer": options.transfer, "join_timeout": options.start_timeout}
    join |= {"inject": options.inject}
    env = python_path()
    gateway = GatewayOptions.of(
        **common,
        node_id="gateway",
        port=options.port,
        join_port=options.join_port,
        join=join["join"],  # so that no KVFERRY_JOIN of the environment makes it join elsewhere
        model=options.model,
    )
    specs = [ChildSpec("gateway", command("gateway", *gateway.argv()), env)]
    ports = (port_options(options, index) for index in count())
    for number in range(1, options.num_stores + 1):
        name = f"store-{number}"
        own = pages_of(options, name) | next(ports)
        store = StoreOptions.of(**common, **join, node_id=name, **own)
        specs.append(ChildSpec(name, command("store", *store.argv()), env, stop_order=1))
    gpus = gpu_deal(options.gpus)
    compute = {field: getattr(options, field) for field in _COMPUTE_FIELDS} | common | join
    compute |= {"store": options.engine}
    for role, wanted in (("prefill", options.prefill), ("decode", options.decode)):
        for number in range(1, wanted + 1):
            name = f"{role}-{number}"
            own = {"node_id": name, "gpus": next(gpus), **next(ports)}
            node = NodeOptions.of(**(compute | own))
            specs.append(ChildSpec(name, command(role, *node.argv()), env, stop_order=1))
    return specs


def pages_of(options: UpOptions, name: str) -> dict[str, Any]:
    """Return what ``options`` say of page stores, for the store ``name``."""
    told = {field: getattr(options, field) for field in _STORE_FIELDS}
    return told | {"ssd": ssd_of(options.ssd, name)}


def gpu_deal(gpus: str | None) -> Iterator[str | None]:
    """Yield the GPU of one process after the other, round and round."""
    return cycle(process_env.parse_gpus(gpus)) if gpus is not None else cycle([None])


class Display:
    """Shows the children's lines, without what only says that all start or stop at once.

    And without the advice to start the gateway: its supervisor does.
    """

    def __init__(self) -> None:
        self.registry_expected = False

    def show(self, name: str, line: str) -> None:
        if " waits for the registry at " in line:
            if not self.registry_expected:
                return
            line = line.partition("; start it with: ")[0]
        say(f"[{name}] {line}")


class LocalCluster:
    """The processes of one ``kvferry up``. ``start`` returns when everything serves."""

    def __init__(self, options: UpOptions) -> None:
        self.options = with_ports(options)
        self._display = Display()
        self._supervisor = Supervisor(plan(self.options), show=self._display.show)

    @property
    def url(self) -> str:
        return f"http://{url_host(self.options.host)}:{self.options.port}"

    @property
    def join_url(self) -> str:
        """Where further nodes join, and where ``kvferry status`` looks."""
        return join_url(self.options)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by node name."""
        return self._supervisor.pids

    async def start(self) -> None:
        """Start all processes and wait until every one of them has joined and the gateway serves.

        Raises:
            LaunchError: a process ended, or not everything serves in time; ``close`` afterwards.
        """
        self._supervisor.start()
        ready = asyncio.create_task(self._wait_ready(), name="wait-ready")
        failed = asyncio.create_task(self._supervisor.failed(), name="wait-failed")
        try:
            async with asyncio.timeout(self.options.start_timeout):
                await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise StartError(
                f"--start-timeout {self.options.start_timeout:g}: not everything serves yet: "
                "see the lines above or give it more time"
            ) from None
        finally:
            for task in (ready, failed):
                task.cancel()
            await asyncio.gather(ready, failed, return_exceptions=True)
        if not failed.cancelled():
            raise failed.result()
        ready.result()
        self._supervisor.on_ready()
        self._display.registry_expected = True

    async def failed(self) -> LaunchError:
        """Return when the cluster cannot go on."""
        return await self._supervisor.failed()

    async def drain(self, timeout_s: float) -> None:
        """Finish what runs and stop all processes, the gateway first."""
        self._display.registry_expected = False
        await self._supervisor.stop(timeout_s)

    async def close(self) -> None:
        """Stop all processes that are left."""
        await self._supervisor.stop(0.0)

    def abort(self) -> None:
        self._supervisor.abort()

    async def _wait_ready(self) -> None:
        options = self.options
        wanted = {"store": options.num_stores, "prefill": options.prefill, "decode": options.decode}
        while True:
            if await asyncio.to_thread(self._serves, wanted):
                return
            await asyncio.sleep(READY_POLL_S)

    def _serves(self, wanted: dict[str, int]) -> bool:
        """True when the gateway is ready and all members have joined. Blocking."""
        ready = get_json(f"{self.url}/ready", timeout_s=HTTP_TIMEOUT_S)
        if ready is None or ready.status != 200:
            return False
        cluster = get_json(f"{self.url}/admin/cluster", timeout_s=HTTP_TIMEOUT_S)
        if cluster is None or cluster.status != 200:
            return False
        roles = [member["role"] for member in cluster.body["members"]]
        return all(roles.count(role) >= count for role, count in wanted.items())
