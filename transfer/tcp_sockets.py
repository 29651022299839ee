"""Sockets of the tcp transport: made, tuned, asked whether the peer is still there.

The only place where ``OSError`` of tcp becomes a ``TransferError``. Knows no frames.

Liveness. A peer that *vanished* (power, cable) must be noticed within ``LIVENESS_S``; one that is
merely *slow* (SIGSTOP, full receive buffer) must never be cut off. TCP_USER_TIMEOUT cannot do
that: Linux also counts a receiver that keeps answering zero-window probes. So: keepalive covers a
connection with nothing in flight, and ``peer_vanished`` judges TCP_INFO while something is: the
kernel of a stopped process still acknowledges, that of a dead machine does not.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from typing import NamedTuple

from transfer.errors import FrameInvalid, PeerLost, PeerUnreachable

LIVENESS_S = 2.0
LIVENESS_CHECK_S = 0.25
LISTEN_BACKLOG = 128
PORT_MAX = 65_535
_TCP_INFO = struct.Struct("<8B13I")


class TcpInfo(NamedTuple):
    """What the kernel knows of a connection (linux/tcp.h, struct tcp_info)."""

    retransmits: int
    probes: int
    unacked: int
    last_ack_s: float


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


async def connect(address: str) -> socket.socket:
    """Return a connected, tuned, non-blocking socket; cancellation closes it.

    Raises:
        PeerUnreachable: refused, no route, or the name does not resolve.
        FrameInvalid: not an address.
    """
    loop = asyncio.get_running_loop()
    host, port = split_address(address)
    try:
        family, target = await _resolve(loop, host, port)
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            tune(sock)
            await loop.sock_connect(sock, target)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: not a name at all
        raise PeerUnreachable(f"nothing answers at {address}: {error}") from error
    return sock


async def _resolve(
    loop: asyncio.AbstractEventLoop, host: str, port: int
) -> tuple[int, tuple[str, int]]:
    """Names are resolved in a thread; literal addresses are not."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, target = found[0]
        return family, (str(target[0]), int(target[1]))
    return (socket.AF_INET6 if version == 6 else socket.AF_INET), (host, port)


def tune(sock: socket.socket) -> None:
    """No Nagle delay; the kernel probes an idle peer each second and gives up after the first."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Return the kernel's view; None where it is not available."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO.size)
    except OSError:
        return None
    if len(raw) < _TCP_INFO.size:
        return None
    fields = _TCP_INFO.unpack(raw)
    return TcpInfo(
        retransmits=fields[2], probes=fields[3], unacked=fields[12], last_ack_s=fields[20] / 1000
    )


def peer_vanished(info: TcpInfo) -> bool:
    """True if the peer's kernel has owed us an answer for ``LIVENESS_S``.

    Without an unanswered retransmission or probe, silence only means that nothing was sent.
    """
    return (info.retransmits > 0 or info.probes > 0) and info.last_ack_s >= LIVENESS_S


def lost(error: OSError, peer: str) -> PeerLost:
    """Translate an error of an established connection."""
    return PeerLost(f"connection to {peer} broke: {error.strerror or error}")
