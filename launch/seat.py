"""A process's seat in the cluster, by what ``--join`` says: the gateway's registry, or etcd.

Owns the choice, who asks etcd (the environment's ``KVFERRY_ETCD_*``), and what every heartbeat says
beside the node's own numbers. Knows no roles.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from launch.config import JOIN_PORT_OFFSET
from launch.errors import ConfigError
from transfer.channel import Network
from transfer.engine import TransferEngine
from transfer.etcd import EtcdAccess, is_etcd, parse_address
from transfer.identity import Identity
from transfer.membership import Membership, MembershipView, NodeInfo, NodeStatus, ViewCallback
from transfer.registry_client import RegistryMembership

if TYPE_CHECKING:
    from transfer.etcd import EtcdMembership

ETCD_USER_VARIABLE = "KVFERRY_ETCD_USER"
ETCD_PASSWORD_VARIABLE = "KVFERRY_ETCD_PASSWORD"
ETCD_CACERT_VARIABLE = "KVFERRY_ETCD_CACERT"
ETCD_CERT_VARIABLE = "KVFERRY_ETCD_CERT"
ETCD_KEY_VARIABLE = "KVFERRY_ETCD_KEY"


class OutsideSeat(Membership, Protocol):
    """A membership that some other process keeps."""

    @property
    def alive(self) -> bool:
        """False when nobody keeps the seat and the view any more."""
        ...

    async def watch_only(self, *, deadline_s: float | None = None) -> None:
        """Follow the cluster without being listed in it."""
        ...

    def abort(self) -> None:
        """Stop at once, without a goodbye."""
        ...


def etcd_access() -> EtcdAccess:
    """Return what the environment says of user and certificates."""
    get = os.environ.get
    return EtcdAccess(
        user=get(ETCD_USER_VARIABLE) or None,
        password=get(ETCD_PASSWORD_VARIABLE) or None,
        cacert=get(ETCD_CACERT_VARIABLE) or None,
        cert=get(ETCD_CERT_VARIABLE) or None,
        key=get(ETCD_KEY_VARIABLE) or None,
    )


def no_answer(join: str, timeout_s: float, *, starts: bool) -> str:
    """Return one line: who did not answer at ``join``, and what to do.

    ``starts``: for a process that may come before whom it joins.
    """
    if is_etcd(join):
        remedy = "etcd does not answer: start it there, or name where etcd is"
    else:
        remedy = "start `kvferry gateway` there, or name" if starts else "name"
        remedy += " the address that `kvferry gateway` or `kvferry up` prints (a join port is the "
        remedy += f"HTTP port + {JOIN_PORT_OFFSET} by default), or its secret differs"
    return f"--join {join}: nobody answered within {timeout_s:g} s: {remedy}"


def no_renewal(identity: Identity) -> None:
    """Nobody has to know of another incarnation."""


def outside_seat(
    join: str,
    network: Network,
    identity: Identity,
    *,
    renewed: Callable[[Identity], None] = no_renewal,
) -> OutsideSeat:
    """Return the seat at ``join``, not taken yet.

    Args:
        renewed: called when the process has another incarnation from now on (etcd only).

    Raises:
        ConfigError: a certificate for etcd cannot be read.
    """
    if is_etcd(join):
        return etcd_seat(join, identity, renewed=renewed)
    return RegistryMembership(network, join, identity)


def etcd_seat(
    join: str, identity: Identity, *, renewed: Callable[[Identity], None]
) -> EtcdMembership:
    """Return the seat in the etcd at ``join``, as ``outside_seat`` does."""
    from transfer.etcd import EtcdMembership

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it says every request
    access = etcd_access()
    try:
        return EtcdMembership(parse_address(join), identity, access=access, renewed=renewed)
    except OSError as error:
        raise ConfigError(
            f"--join {join}: {error}: {ETCD_CACERT_VARIABLE} ({access.cacert}), "
            f"{ETCD_CERT_VARIABLE} ({access.cert}) and {ETCD_KEY_VARIABLE} ({access.key}) name "
            "PEM files that this process can read"
        ) from error


class SeatAround:
    """A seat that is another one, but for what whoever inherits changes."""

    def __init__(self, seat: Membership) -> None:
        self._seat = seat

    @property
    def view(self) -> MembershipView:
        return self._seat.view

    @property
    def connected(self) -> bool:
        return self._seat.connected

    @property
    def superseded(self) -> bool:
        return self._seat.superseded

    def subscribe(self, callback: ViewCallback) -> None:
        self._seat.subscribe(callback)

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        await self._seat.join(info, status)

    async def leave(self) -> None:
        await self._seat.leave()


class StatingSeat(SeatAround):
    """A seat that adds to what its node says: facts when it joins, numbers with every heartbeat."""

    def __init__(
        self,
        seat: Membership,
        *,
        contract: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        gauges: Callable[[], Mapping[str, float]] = dict,
        counters: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        super().__init__(seat)
        self._gauges = gauges
        self._counters = counters
        self._contract = contract or {}
        self._labels = labels or {}

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        contract, labels = {**info.contract, **self._contract}, {**info.labels, **self._labels}

        def counted() -> NodeStatus:
            own = status()
            gauges = {**own.gauges, **self._gauges()}
            return structs.replace(
                own, gauges=gauges, counters={**own.counters, **self._counters()}
            )

        await super().join(structs.replace(info, contract=contract, labels=labels), counted)


class CountedSeat(SeatAround):
    """A seat whose heartbeats also say what the transfers of this process have counted."""

    def __init__(self, seat: OutsideSeat, transfer: TransferEngine) -> None:
        super().__init__(seat)
        self._outside = seat
        self._transfer = transfer

    @property
    def alive(self) -> bool:
        return self._outside.alive

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        def counted() -> NodeStatus:
            own, counts = status(), self._transfer.counters()._asdict()
            counters = {f"transfer_{name}": float(count) for name, count in counts.items()}
            return structs.replace(own, counters={**own.counters, **counters})

        await self._outside.join(info, counted)

    def abort(self) -> None:
        self._outside.abort()
