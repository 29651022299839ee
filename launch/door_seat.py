"""The gateway's own seat: it keeps the registry for all others, or is one more member of an etcd.

Owns the registry's listener and service (``RegistrySeat``), the gateway's record in etcd
(``EtcdSeat``), and what each can say of its health. Knows no HTTP and no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from launch.errors import ConfigError, StartError
from launch.gateway_health import GatewayHealth
from launch.seat import etcd_seat, no_answer
from transfer.channel import Hello, Listener, Service
from transfer.errors import PeerUnreachable, Unauthorized
from transfer.identity import Identity
from transfer.membership import Membership, NodeInfo, NodeStatus
from transfer.registry import Registry, RegistryService
from transfer.registry_client import LocalMembership
from transfer.zmq_network import ZmqNetwork

Status = Callable[[], NodeStatus]
Labels = Mapping[str, str]


class DoorSeat(Protocol):
    """How the gateway is in the cluster. ``start`` first, ``close`` last."""

    @property
    def membership(self) -> Membership: ...

    @property
    def join_url(self) -> str:
        """What the other roles are given as ``--join``."""
        ...

    @property
    def checks(self) -> Mapping[str, Callable[[], bool]]:
        """Name → "alive?", for ``/health``."""
        ...

    async def start(self, status: Status, labels: Labels) -> None: ...

    async def close_health(self) -> None:
        """Stop what ``checks`` needs, before the services that it looks at end."""
        ...

    async def close(self) -> None: ...

    def abort(self) -> None: ...


class RegistrySeat:
    """The registry lives here: nodes join at ``join_url``."""

    def __init__(self, identity: Identity, network: ZmqNetwork, bind: str) -> None:
        self._identity = identity
        self._network = network
        self._bind = bind
        self._registry = Registry()
        self._service: RegistryService | None = None
        self._health: GatewayHealth | None = None
        self.listener: Listener | None = None
        self.membership = LocalMembership(self._registry)

    @property
    def join_url(self) -> str:
        assert self.listener is not None, "start() first"
        return self.listener.address

    @property
    def checks(self) -> Mapping[str, Callable[[], bool]]:
        assert self._health is not None, "start() first"
        return self._health.checks

    async def start(self, status: Status, labels: Labels) -> None:
        """Listen for nodes and be the first member.

        Raises:
            ConfigError: the join port is in use.
        """
        service = Service()
        self._service = RegistryService(self._registry, service)
        try:
            hello = Hello(identity=self._identity)
            self.listener = await self._network.listen(service, hello, self._bind)
        except PeerUnreachable as error:
            port = self._bind.rpartition(":")[2]
            raise ConfigError(f"--join-port {port}: {error}") from error
        info = NodeInfo(identity=self._identity, address=self.listener.address, labels=dict(labels))
        await self.membership.join(info, status)
        self._health = GatewayHealth(
            self._network, self.listener.address, self._identity.node_id, self.membership
        )
        await self._health.start()

    async def close_health(self) -> None:
        if self._health is not None:
            await self._health.close()

    async def close(self) -> None:
        await self.membership.leave()
        if self._service is not None:
            self._service.close()
        if self.listener is not None:
            await self.listener.close()

    def abort(self) -> None:
        if self._health is not None:
            self._health.abort()


class EtcdSeat:
    """The members are in etcd; the gateway is one of them, and there may be several gateways.

    Nothing listens for nodes here. While etcd is away the gateway serves by the last view, and
    ``/ready`` says so; ``/health`` is about this process alone.
    """

    def __init__(
        self, join: str, identity: Identity, network: ZmqNetwork, timeout_s: float
    ) -> None:
        self.join_url = join
        self._identity = identity
        self._timeout_s = timeout_s
        self.membership = etcd_seat(join, identity, renewed=network.renew)

    @property
    def checks(self) -> Mapping[str, Callable[[], bool]]:
        return {"membership": self._is_member}

    def _is_member(self) -> bool:
        seat = self.membership
        return seat.alive and seat.view.get(self._identity.node_id) is not None

    async def start(self, status: Status, labels: Labels) -> None:
        """Join.

        Raises:
            StartError: no etcd answered in time.
            ConfigError: etcd does not let this user in.
        """
        info = NodeInfo(identity=self._identity, address="", labels=dict(labels))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.membership.join(info, status)
        except TimeoutError:
            raise StartError(no_answer(self.join_url, self._timeout_s, starts=True)) from None
        except Unauthorized as error:
            raise ConfigError(f"--join {self.join_url}: {error}") from error

    async def close_health(self) -> None: ...

    async def close(self) -> None:
        await self.membership.leave()

    def abort(self) -> None:
        self.membership.abort()
