"""Sockets of the tcp transport: listening, connecting, tuning.

The only place where ``OSError`` of tcp becomes a ``TransferError``. Knows no frames.
"""

from __future__ import annotations

import asyncio
import socket

from transfer.errors import FrameInvalid, PeerLost, PeerUnreachable
from transfer.tcp_liveness import KEEPALIVE_IDLE_S
from transfer.tcp_resolver import Address, Resolver

# Between processes of one host the bytes in flight are a cost, not a need: they leave the cache of
# the processor, and a sender that never blocks does the receiver's share of the kernel's work too.
SAME_HOST_SEND_NBYTES = 1 << 20  # the kernel doubles what it is asked for
# Between hosts the kernel sizes the buffer by the path; only what waits behind it is bounded.
UNSENT_NBYTES = 1 << 20
LISTEN_BACKLOG = 128
PORT_MAX = 65_535


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.

    Raises:
        FrameInvalid: it is not one (addresses come in tokens, from peers).
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > PORT_MAX:
        raise FrameInvalid(f"{address!r} is no address; expected host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening, non-blocking socket.

    Raises:
        PeerUnreachable: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise PeerUnreachable(
            f"cannot listen on {join_address(host, port)}: {error.strerror}; choose another "
            "port (0 takes a free one) or host"
        ) from error
    sock.setblocking(False)
    return sock


async def connect(address: str, resolver: Resolver) -> socket.socket:
    """Return a connected, tuned, non-blocking socket; cancellation closes it.

    Raises:
        PeerUnreachable: refused, no route, or the name does not resolve.
        FrameInvalid: not an address.
    """
    problem: OSError | None = None
    for target in await resolver.resolve(*split_address(address)):
        try:
            return await _connect_one(target)
        except OSError as error:
            problem = error
    raise PeerUnreachable(f"nothing answers at {address}: {problem}") from problem


async def _connect_one(target: Address) -> socket.socket:
    sock = socket.socket(target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (target.host, target.port))
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Set up a connected socket.

    No Nagle delay; the kernel probes an idle peer and gives up when a probe is not answered; what
    the kernel queues to send is bounded, so that an urgent frame does not stand behind megabytes.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
    if is_same_host(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_SEND_NBYTES // 2)
    elif hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_NBYTES)


def is_same_host(sock: socket.socket) -> bool:
    """True if a connected socket leads back to this host."""
    try:
        same: bool = sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # it is closed already
        return False
    return same


def lost(error: OSError, peer: str) -> PeerLost:
    """Translate an error of an established connection."""
    return PeerLost(f"connection to {peer} broke: {error.strerror or error}")
