"""TCP ports and addresses: taking a port, and saying clearly when it is taken.

Owns the sockets it returns until the caller takes them over. Knows no HTTP.
"""

from __future__ import annotations

import errno
import socket

from launch.errors import ConfigError

BACKLOG = 2048


def url_host(host: str) -> str:
    """Return ``host`` as a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def listen_on(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the port is in use or the address is not of this machine; the message names
            ``option`` and the remedy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_explain(host, port, option, error)) from error
    except OverflowError as error:
        sock.close()
        raise ConfigError(f"{option} {port}: a port is a number from 0 to 65535") from error
    sock.setblocking(False)
    return sock


def _explain(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{option} {port}: in use on {host}: stop what listens there or name another port"
    if error.errno == errno.EACCES:
        return f"{option} {port}: not allowed for this user: name a port above 1023"
    return f"cannot listen on {host}:{port} ({error.strerror}): name an address of this machine"


def check_free(host: str, port: int, option: str) -> None:
    """Raise ``ConfigError`` when ``port`` cannot be taken now."""
    listen_on(host, port, option).close()


def free_port(host: str) -> int:
    """Return a port that was free a moment ago."""
    with listen_on(host, 0, "port") as sock:
        port: int = sock.getsockname()[1]
        return port
