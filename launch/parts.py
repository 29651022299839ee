"""What every role process is built on: identity, channels, bulk transport, seat in the cluster.

Owns the construction from options and the order in which these end. Knows no roles.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from launch.config import EventOptions, JoinOptions, Options, UpOptions
from launch.errors import ConfigError, LaunchError, StartError
from launch.event_ports import EventNetwork, EventPorts, ports_of
from launch.ports import url_host
from launch.runtime import broken, config_errors
from launch.seat import CountedSeat, no_answer, outside_seat
from transfer.config import TransferConfig, is_local_host
from transfer.engine import TransferEngine
from transfer.errors import Unauthorized
from transfer.etcd import is_etcd
from transfer.fault_text import parse_rules
from transfer.identity import Identity, Role, new_identity
from transfer.zmq_network import ZmqNetwork

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "KVFERRY_SECRET"
MIN_SECRET_NCHARS = 16  # whoever hears a handshake can try short ones at leisure
WILDCARDS = ("0.0.0.0", "::", "*")
ALLOW_INJECT_VARIABLE = "KVFERRY_ALLOW_INJECT"


def read_secret(options: Options) -> str | None:
    """Return the cluster secret, from the file or the environment.

    Raises:
        ConfigError: the file cannot be read or is empty, or ``--host`` needs a (longer) secret.
    """
    secret = os.environ.get(SECRET_VARIABLE)
    if options.secret_file is not None:
        try:
            secret = Path(options.secret_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"--secret-file {options.secret_file}: {reason}: name a file that holds the secret"
            ) from error
        if not secret:
            raise ConfigError(f"--secret-file {options.secret_file}: empty: write a secret into it")
    if not secret and not is_local_host(options.host):
        raise ConfigError(
            f"--host {options.host}: reachable from other machines, which needs a cluster secret: "
            f"give every process the same --secret-file (or {SECRET_VARIABLE})"
        )
    if secret and len(secret) < MIN_SECRET_NCHARS and not is_local_host(options.host):
        raise ConfigError(
            f"--host {options.host}: a cluster secret of {len(secret)} characters can be guessed "
            f"from what it protects: use {MIN_SECRET_NCHARS} or more (openssl rand -hex 32)"
        )
    return secret or None


def make_network(secret: str | None, events: EventPorts | None = None) -> ZmqNetwork:
    """Return the channels of one process; those of a node, if it publishes at ``events``."""
    if events is None:
        return ZmqNetwork(allow_remote=secret is not None, secret=secret)
    return EventNetwork(events, allow_remote=secret is not None, secret=secret)


def transfer_config(options: JoinOptions | UpOptions, secret: str | None) -> TransferConfig:
    """Return the checked configuration of bulk transport.

    Raises:
        ConfigError: the transport, the addresses and the secret do not fit together, or faults
            are to be injected without permission or by a bad rule.
    """
    _check_inject(options.inject)
    if options.host in WILDCARDS and options.advertise_host is None:
        raise ConfigError(
            f"--host {options.host}: every address of this machine, and none that others reach: "
            "give one of them, or --advertise-host with the one that others are to use"
        )
    with config_errors(f"--transfer {options.transfer}"):
        return TransferConfig.model_validate(
            {
                "transport": options.transfer,
                "host": options.host,
                "advertise_host": options.advertise_host,
                "cluster_secret": secret,
                "inject": options.inject or "",
            }
        )


def _check_inject(rules: str | None) -> None:
    if not rules:
        return
    if os.environ.get(ALLOW_INJECT_VARIABLE) != "1":
        raise ConfigError(
            f"--inject {rules}: breaks transfers on purpose and is not allowed here: set "
            f"{ALLOW_INJECT_VARIABLE}=1 in the environment of a test system, or leave --inject out"
        )
    with config_errors(f"--inject {rules}"):
        parse_rules(rules)


def make_transfer(options: JoinOptions, secret: str | None) -> TransferEngine:
    with config_errors(f"--transfer {options.transfer}"):
        return TransferEngine(transfer_config(options, secret))


def control_bind(options: Options, port: int = 0) -> str:
    """Return where a control channel listens."""
    return f"tcp://{url_host(options.host)}:{port}"


class Parts:
    """The parts of one joined process. ``start`` before the node, ``close`` after it.

    Attributes:
        identity: who the process is now. After the others have seen it leave (etcd ended its lease
            while it stood still) it comes back as another incarnation, see ``on_renewed``.
    """

    def __init__(self, role: Role, options: JoinOptions) -> None:
        secret = read_secret(options)
        self.options = options
        self.identity = new_identity(role, options.node_id)
        events = ports_of(options) if isinstance(options, EventOptions) else None
        self.network = make_network(secret, events)
        self.transfer = make_transfer(options, secret)
        seat = outside_seat(options.join, self.network, self.identity, renewed=self._renew)
        self.membership = CountedSeat(seat, self.transfer)
        self._on_renewed: list[Callable[[Identity], None]] = []

    def on_renewed(self, callback: Callable[[Identity], None]) -> None:
        """Call ``callback`` with the new identity before anybody else can learn of it."""
        self._on_renewed.append(callback)

    def _renew(self, identity: Identity) -> None:
        text = "%s was away for longer than its lease: it comes back as another incarnation"
        logger.warning(text, identity.node_id)
        self.identity = identity
        self.network.renew(identity)
        for callback in self._on_renewed:
            callback(identity)

    async def start(self) -> None:
        await self.transfer.start()

    async def joined(self, start: Coroutine[Any, Any, None]) -> None:
        """Run the start of a node, which joins the cluster.

        Raises:
            StartError: no registry answered in time.
            ConfigError: etcd does not let this user in.
            HelloRefused: the cluster's contract differs.
        """
        try:
            async with asyncio.timeout(self.options.join_timeout):
                await start
        except TimeoutError:
            wait_s = self.options.join_timeout
            raise StartError(no_answer(self.options.join, wait_s, starts=True)) from None
        except Unauthorized as error:
            if not is_etcd(self.options.join):
                raise
            raise ConfigError(f"--join {self.options.join}: {error}") from error

    async def failed(self, checks: Mapping[str, Callable[[], bool]]) -> LaunchError:
        """Return when the process is of no use any more: a new one starts with new parts.

        ``checks`` are the role's own: what is broken when it is False → "alive?".
        """
        mine = {
            "the transfer I/O thread died": lambda: self.transfer.is_healthy,
            "nobody keeps the seat in the cluster any more": lambda: self.membership.alive,
        }
        return await broken({**checks, **mine}, self._superseded)

    def _superseded(self) -> LaunchError | None:
        """A ``ConfigError``, so that no supervisor starts this process again to fight its twin."""
        if not self.membership.superseded:
            return None
        return ConfigError(
            f"--node-id {self.identity.node_id}: another process joined {self.options.join} under "
            "this node id and took the seat: give each process its own --node-id"
        )

    async def close(self) -> None:
        await self.membership.leave()
        await self.transfer.close()
        await self.network.close()

    def abort(self) -> None:
        self.membership.abort()
        self.transfer.abort()
        self.network.abort()
