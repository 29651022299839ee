"""Where etcd is and how to get in: ``etcd://host:2379[,host:2379...]/name``.

Owns the address and its parsing. ``name`` is the cluster's: several clusters share one etcd, each
under its own keys. ``etcds://`` speaks TLS. Who and with which certificates is ``EtcdAccess``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

DEFAULT_PORT = 2379
MAX_ENDPOINTS = 16
FORM = "etcd://HOST:2379/NAME, or etcds:// for TLS, several as HOST:2379,HOST:2379"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:/\s\[\]@,?#%\\]+)(?::(\d{1,5}))?")


class EtcdAccess(NamedTuple):
    """Who asks. Paths are of PEM files; the password is never printed."""

    user: str | None = None
    password: str | None = None
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None

    def __repr__(self) -> str:
        return f"EtcdAccess(user={self.user!r}, cacert={self.cacert!r}, cert={self.cert!r})"


class EtcdAddress(NamedTuple):
    """The members of one etcd cluster, and the name of ours in it."""

    endpoints: tuple[str, ...]  # http://host:port
    name: str

    @property
    def prefix(self) -> bytes:
        """What all keys of this cluster start with."""
        return f"/kvferry/{self.name}/".encode()

    @property
    def secure(self) -> bool:
        """True where TLS is spoken."""
        return self.endpoints[0].startswith("https")

    def __str__(self) -> str:
        hosts = ",".join(endpoint.split("//")[1] for endpoint in self.endpoints)
        return f"{'etcds' if self.secure else 'etcd'}://{hosts}/{self.name}"


def is_etcd(url: str) -> bool:
    return url.startswith(("etcd://", "etcds://"))


def parse_address(url: str) -> EtcdAddress:
    """Return the address that ``url`` writes.

    Raises:
        ValueError: it is none; the message says how to write one.
    """
    scheme, _, rest = url.partition("://")
    hosts, slash, name = rest.partition("/")
    if scheme not in ("etcd", "etcds") or not slash or not _NAME.fullmatch(name):
        raise ValueError(f"write {FORM}; NAME is the cluster's, of letters, digits, '.', '_', '-'")
    protocol = "https" if scheme == "etcds" else "http"
    endpoints = tuple(f"{protocol}://{_host_and_port(host)}" for host in hosts.split(","))
    if len(endpoints) > MAX_ENDPOINTS:
        raise ValueError(f"{len(endpoints)} hosts: name {MAX_ENDPOINTS} at most")
    return EtcdAddress(endpoints, name)


def _host_and_port(text: str) -> str:
    match = _ENDPOINT.fullmatch(text)
    port = DEFAULT_PORT if match is None or match[2] is None else int(match[2])
    if match is None or not 0 < port < 65536:
        raise ValueError(f"{text!r} is no host: write {FORM}")
    return f"{match[1]}:{port}"
