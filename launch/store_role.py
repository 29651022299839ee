"""The store process: lends memory, and a disk if it has one, to the cluster. Imports no torch.

Owns the node and its parts. Everything that a page store does is ``kvstore``'s.
"""

from __future__ import annotations

import time

from kvstore.server.node import StoreNode
from kvstore.ssd import SsdRefused, SsdTier
from launch import process_env
from launch.config import StoreOptions
from launch.errors import ConfigError, LaunchError
from launch.event_ports import check_event_ports
from launch.parts import Parts, control_bind
from launch.runtime import run_role, setup_logging
from launch.seat import StatingSeat
from launch.sizes import in_units
from launch.store_settings import ssd_config, store_config
from launch.store_view import SSD_LABEL
from transfer.identity import Role
from transfer.membership import Membership


class StoreRole:
    """A store node in a process of its own."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        check_event_ports(options, 1)
        self._config = store_config(options, control_bind(options))
        self._ssd = None if options.ssd is None else ssd_config(options.ssd)
        self._parts = Parts(Role.STORE, options)
        self._node: StoreNode | None = None

    async def start(self) -> None:
        """Open the disk, then join: whoever sees this node can use what is on it.

        Raises:
            ConfigError: the disk cannot be used as asked for.
        """
        await self._parts.start()
        tier = await self._open_ssd()
        self._node = StoreNode(
            self._config,
            identity=self._parts.identity,
            network=self._parts.network,
            transfer=self._parts.transfer,
            membership=self._seat(),
            wall_clock=time.time,
            tier=tier,
        )
        self._parts.on_renewed(self._node.renew)
        await self._parts.joined(self._node.start())

    def _seat(self) -> Membership:
        """The seat; with a disk it says which size was given, of which a part holds pages."""
        if self._ssd is None:
            return self._parts.membership
        return StatingSeat(self._parts.membership, labels={SSD_LABEL: str(self._ssd.nbytes)})

    async def _open_ssd(self) -> SsdTier | None:
        if self._ssd is None:
            return None
        try:
            return await SsdTier.open(self._ssd)
        except SsdRefused as error:
            raise ConfigError(f"--ssd {self._options.ssd}: {in_units(str(error))}") from error

    async def failed(self) -> LaunchError:
        """Return when the process is of no use any more."""
        node = self._node
        assert node is not None, "start() first"
        meaning = "a task of the store died: its timer, its copies or its SSD stand still"
        return await self._parts.failed({meaning: lambda: node.healthy})

    async def drain(self, timeout_s: float) -> None:
        if self._node is not None:
            await self._node.drain(timeout_s)

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()
        await self._parts.close()

    def abort(self) -> None:
        self._parts.abort()  # first: an engine that has ended waits for no peer
        if self._node is not None:
            self._node.abort()


def run(options: StoreOptions) -> None:
    """Run ``kvferry store`` to its end."""
    setup_logging(options.log_level)
    options.refuse_loopback()
    process_env.bound_malloc()
    run_role(StoreRole(options), drain_timeout_s=options.drain_timeout)
