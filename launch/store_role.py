"""The store process: lends memory to the cluster. Imports no torch.

Owns the node and its parts. Everything that a page store does is ``kvstore``'s.
"""

from __future__ import annotations

from kvstore.config import StoreConfig
from kvstore.server.node import StoreNode
from launch import process_env
from launch.config import StoreOptions
from launch.errors import LaunchError
from launch.parts import Parts, control_bind
from launch.runtime import config_errors, run_role, setup_logging
from launch.sizes import segment_size
from transfer.identity import Role


class StoreRole:
    """A store node in a process of its own."""

    def __init__(self, options: StoreOptions) -> None:
        self._parts = Parts(Role.STORE, options)
        with config_errors("--segment"):
            config = StoreConfig(
                segment_nbytes=segment_size(options.segment),
                bind=control_bind(options),
            )
        self._node = StoreNode(
            config,
            identity=self._parts.identity,
            network=self._parts.network,
            transfer=self._parts.transfer,
            membership=self._parts.membership,
        )

    async def start(self) -> None:
        await self._parts.start()
        await self._parts.joined(self._node.start())

    async def failed(self) -> LaunchError:
        """Return when the process is of no use any more."""
        meaning = "the store's timer died: nothing expires, nothing is evicted"
        return await self._parts.failed({meaning: lambda: self._node.healthy})

    async def drain(self, timeout_s: float) -> None:
        await self._node.drain(timeout_s)

    async def close(self) -> None:
        await self._node.close()
        await self._parts.close()

    def abort(self) -> None:
        self._node.abort()
        self._parts.abort()


def run(options: StoreOptions) -> None:
    """Run ``kvferry store`` to its end."""
    setup_logging(options.log_level)
    options.refuse_loopback()
    process_env.bound_malloc()
    run_role(StoreRole(options), drain_timeout_s=options.drain_timeout)
