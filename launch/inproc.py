"""All roles in one process: ``kvferry up --transfer loopback``.

Owns the roles, each with its own parts. For laptops and tests: the same node code, without
processes; pages move inside of one address space. One event loop serves everything, the engines
compute on their own threads.

Started stores first, stopped gateway first.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count

from launch import model_store, process_env
from launch.cluster import join_url, pages_of
from launch.config import ComputeOptions, GatewayOptions, NodeOptions, StoreOptions, UpOptions
from launch.errors import LaunchError
from launch.event_ports import port_options
from launch.gateway_role import GatewayRole
from launch.node_role import NodeRole, NodeRoleName
from launch.ports import url_host
from launch.runner_factory import make_runner
from launch.runtime import Role
from launch.store_role import StoreRole
from transfer import identity

logger = logging.getLogger(__name__)

_SHARED = ("host", "advertise_host", "secret_file", "drain_timeout", "log_level")


class InProcessCluster:
    """The roles of ``kvferry up`` in this process. The ports of the options must be real."""

    def __init__(self, options: UpOptions) -> None:
        self.options = options
        shared = {name: getattr(options, name) for name in _SHARED}
        join = {
            "join": join_url(options),
            "transfer": "loopback",
            "inject": options.inject,
        }
        self._gateway = GatewayRole(
            GatewayOptions.of(
                **shared,
                node_id="gateway",
                port=options.port,
                join_port=options.join_port,
                model=options.model,
            )
        )
        ports = (port_options(options, index) for index in count())
        self._stores = [
            StoreRole(
                StoreOptions.of(
                    **shared,
                    **join,
                    node_id=f"store-{n}",
                    **pages_of(options, f"store-{n}"),
                    **next(ports),
                )
            )
            for n in range(1, options.num_stores + 1)
        ]
        compute = {name: getattr(options, name) for name in ComputeOptions.model_fields}
        compute |= shared | join | {"store": options.engine}
        self._node_options: list[tuple[NodeRoleName, NodeOptions]] = [
            (role, NodeOptions.of(**(compute | {"node_id": f"{role}-{n}"} | next(ports))))
            for role, wanted in _counts(options)
            for n in range(1, wanted + 1)
        ]
        self._nodes: list[NodeRole] = []

    @property
    def url(self) -> str:
        return f"http://{url_host(self.options.host)}:{self.options.port}"

    @property
    def join_url(self) -> str:
        return join_url(self.options)

    async def start(self) -> None:
        """Load the engines and start every role."""
        model = model_store.resolve(self.options.model)
        threads = process_env.num_threads(self.options.threads)
        await self._gateway.start()
        for store in self._stores:
            await store.start()
        for role, options in self._node_options:
            runner = await asyncio.to_thread(
                make_runner, options, model, threads, gpus=self.options.gpus
            )
            node = NodeRole(role, options, runner)
            self._nodes.append(node)
            await node.start()
        prefill = (identity.Role.PREFILL,) if self.options.prefill else ()
        await self._gateway.wait_ready((identity.Role.DECODE, *prefill))

    async def failed(self) -> LaunchError:
        """Return when a role cannot go on."""
        tasks = [asyncio.ensure_future(role.failed()) for role in self._all()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, timeout_s: float) -> None:
        for role in self._all():
            await role.drain(timeout_s)

    async def close(self) -> None:
        """Nodes leave while the registry is still there: the gateway is closed last."""
        for role in reversed(self._all()):
            await role.close()

    def abort(self) -> None:
        for role in self._all():
            role.abort()

    def _all(self) -> list[Role]:
        return [self._gateway, *self._nodes, *self._stores]


def _counts(options: UpOptions) -> list[tuple[NodeRoleName, int]]:
    return [("prefill", options.prefill), ("decode", options.decode)]
