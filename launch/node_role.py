"""Prefill and decode processes: the engine and one node.

Owns the order: environment, model, parts, node. The weights are loaded before the event loop
starts, so that nothing else waits for them; a signal meanwhile simply ends the process.
With ``--count N`` this process only supervises N others, each with its own GPU.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from launch import model_store, process_env
from launch.cluster import command, gpu_deal, python_path
from launch.config import NodeOptions, option_of
from launch.errors import LaunchError
from launch.event_ports import check_event_ports, port_options
from launch.runtime import config_errors, run_role, setup_logging
from launch.supervisor import ChildSpec, Supervisor
from transfer.identity import Role

if TYPE_CHECKING:
    from engine.step import Runner
    from launch.parts import Parts
    from launch.pool_access import PoolAccess
    from transfer.membership import Membership

logger = logging.getLogger(__name__)

NodeRoleName = Literal["prefill", "decode"]


def run(role: NodeRoleName, options: NodeOptions) -> None:
    """Run ``kvferry prefill`` or ``kvferry decode`` to its end."""
    setup_logging(options.log_level)
    options.refuse_loopback()
    check_event_ports(options, options.count)
    if options.count > 1:
        run_role(NodeGroup(role, options), drain_timeout_s=options.drain_timeout)
        return
    from launch.page_store import check_store
    from launch.parts import read_secret, transfer_config

    transfer_config(options, read_secret(options))  # refused before anything is set or read
    check_store(options.store)
    model = model_store.resolve(options.model)
    num_threads = process_env.apply(cores=options.cores, threads=options.threads, gpus=options.gpus)
    logger.info("%s: loading the engine", options.node_id or role)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the loop takes over
    from launch.runner_factory import make_runner

    runner = make_runner(options, model, num_threads, gpus=options.gpus)
    run_role(NodeRole(role, options, runner), drain_timeout_s=options.drain_timeout)


def make_node(
    role: NodeRoleName,
    options: NodeOptions,
    parts: Parts,
    runner: Runner,
    access: PoolAccess,
    membership: Membership,
) -> Any:
    """Build the node of one role on its parts."""
    from launch.parts import control_bind

    common: dict[str, Any] = {
        "identity": parts.identity,
        "network": parts.network,
        "transfer": parts.transfer,
        "membership": membership,
        "store": access.store,
        "region": access.region,
        "runner": runner,
        "wall_clock": time.time,
    }
    bind = control_bind(options)
    with config_errors("--chunk-size"):
        if role == "prefill":
            from prefill_node.config import PrefillConfig
            from prefill_node.node import PrefillNode

            size = options.chunk_size
            config = PrefillConfig(bind=bind, chunk_size=size, token_budget=size)
            return PrefillNode(config, **common)
        from decode_node.config import DecodeConfig
        from decode_node.node import DecodeNode

        return DecodeNode(DecodeConfig(bind=bind, step_tokens=options.chunk_size), **common)


class NodeRole:
    """A prefill or decode node in a process of its own."""

    def __init__(self, role: NodeRoleName, options: NodeOptions, runner: Runner) -> None:
        self._role = role
        self._options = options
        self._runner = runner
        self._parts: Parts | None = None
        self._store: Any = None
        self._node: Any = None

    async def start(self) -> None:
        from launch.page_store import make_store, stated
        from launch.parts import Parts
        from launch.pool_access import reach_pool

        self._parts = parts = Parts(Role(self._role), self._options)
        await parts.start()
        self._store = make_store(self._options, parts, self._runner.info.spec)
        seat = stated(self._options, parts.membership, self._store)
        with config_errors("staging memory"):
            access = reach_pool(self._store, self._runner.pool, parts.transfer)
        self._store = access.store
        self._node = make_node(self._role, self._options, parts, self._runner, access, seat)
        await parts.joined(self._node.start())
        logger.info("%s serves over %s", parts.identity.node_id, parts.transfer.transport)

    async def failed(self) -> LaunchError:
        """Return when the process is of no use any more."""
        assert self._parts is not None, "start() first"
        meaning = "the step loop died, or the engine failed several times in a row"
        return await self._parts.failed({meaning: lambda: bool(self._node.healthy)})

    async def drain(self, timeout_s: float) -> None:
        if self._node is not None:
            await self._node.drain(timeout_s)

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()
        if self._store is not None:
            await self._store.close()
        if self._parts is not None:
            await self._parts.close()

    def abort(self) -> None:
        if self._parts is not None:
            self._parts.abort()  # first: an engine that has ended waits for no peer
        if self._node is not None:
            self._node.abort()


class NodeGroup:
    """``--count N``: N processes of one role, supervised."""

    def __init__(self, role: NodeRoleName, options: NodeOptions) -> None:
        gpus = gpu_deal(options.gpus)
        specs = []
        for number in range(1, options.count + 1):
            name = f"{options.node_id or role}-{number}"
            own = ["--node-id", name] if options.node_id else []
            gpu = next(gpus)
            own += ["--gpus", gpu] if gpu is not None else []
            ports = port_options(options, number - 1)
            own += [part for field, port in ports.items() for part in (option_of(field), str(port))]
            arguments = [*options.argv("count", "node_id", "gpus", *ports), *own]
            specs.append(ChildSpec(name, command(role, *arguments), python_path()))
        self._supervisor = Supervisor(specs)

    async def start(self) -> None:
        self._supervisor.start()
        self._supervisor.on_ready()  # each stands for itself: one that dies comes back

    async def failed(self) -> LaunchError:
        return await self._supervisor.failed()

    async def drain(self, timeout_s: float) -> None:
        await self._supervisor.stop(timeout_s)

    async def close(self) -> None:
        await self._supervisor.stop(0.0)

    def abort(self) -> None:
        self._supervisor.abort()
