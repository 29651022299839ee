"""Which transports exist, and which one reaches a peer: a pure decision.

Owns the interface between the engine and its transports, and the choice among them. Knows no
sockets.

::

    auto:      same process ─▶ loopback     same host, region in shared memory ─▶ shm
               both sides offer ucx (auto offers it where an RDMA device exists) ─▶ ucx   else tcp
    shm:       region in shared memory of this host ─▶ shm                                else tcp
    ucx:       the peer offers ucx ─▶ ucx                                                 else tcp
    loopback:  same process ─▶ loopback                                        else unreachable
    tcp:       tcp
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from transfer.interface import Priority, Range, Rights
from transfer.region import RegisteredRegion
from transfer.token import Endpoint, Token


class Move(NamedTuple):
    """One checked operation: ranges are merged, inside both regions and not empty."""

    right: Rights  # "r": remote to local; "w": local to remote
    token: Token
    ranges: Sequence[Range]
    region: RegisteredRegion
    deadline_s: float  # absolute, on the running loop
    priority: Priority = Priority.NOW


class Transport(Protocol):
    """One way to move bytes. Its own errors are translated inside of it."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    async def move(self, move: Move) -> None:
        """Move every byte, or raise a ``TransferError``; see ``interface.Transfer``."""
        ...

    def disrupt(self, endpoint: Endpoint) -> None:
        """Break every connection to ``endpoint`` at once, as a failing network would.

        For fault injection. Operations in flight fail as they would on a real break; the next one
        connects anew. Does nothing when there is no connection.
        """
        ...

    async def close(self) -> None: ...


def process_id() -> str:
    """Return an id that two engines share exactly if they share an address space."""
    return f"{os.getpid()}-{_PROCESS_NONCE}"


def host_id() -> str:
    """Return an id shared by processes that can open each other's abstract unix sockets.

    That needs the same kernel boot and the same network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()}/{process_id()}"
    return f"{boot}/{namespace}"


def choose(transport: str, here: Endpoint, token: Token) -> str | None:
    """Return the name of the transport for ``token``; None if the peer cannot be reached."""
    there = token.endpoint
    if transport in ("auto", "loopback") and there.loopback and there.process == here.process:
        return "loopback"
    if (
        transport in ("auto", "shm")
        and here.shm
        and there.shm
        and there.host == here.host
        and token.in_shared_memory
    ):
        return "shm"
    if transport in ("auto", "ucx") and here.ucx and there.ucx:
        return "ucx"
    if transport != "loopback" and there.tcp:
        return "tcp"
    return None


_PROCESS_NONCE = secrets.token_hex(8)
