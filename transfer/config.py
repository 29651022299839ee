"""What a bulk transfer engine can be told: transport, addresses and every named limit.

Knows no sockets. Refuses at construction what could not be served safely: an unknown transport, or
an address beyond this machine without a cluster secret.
"""

from __future__ import annotations

import ipaddress
import os

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

TRANSPORTS = ("auto", "loopback", "shm", "tcp")

MIB = 1 << 20


def is_local_host(host: str) -> bool:
    """True if ``host`` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    return host in ("", "0.0.0.0", "::", "*")


def _default_copy_threads() -> int:
    return max(1, min(4, (os.cpu_count() or 1) // 2))


class TransferConfig(BaseModel):
    """Settings of one ``TransferEngine``. Frozen; unknown fields are refused.

    Attributes:
        transport: ``auto``, ``loopback``, ``shm`` or ``tcp``. ``shm`` also listens on tcp, for
            regions that are not in shared memory; ``auto`` picks the best path for each peer.
        host: address to bind. Anything but this machine needs ``cluster_secret``.
        port: 0 takes a free one.
        advertise_host: what tokens say instead of ``host``; needed when ``host`` is a wildcard.
        cluster_secret: shared by all nodes; bulk connections prove it by an HMAC challenge.
            It authenticates; it does not encrypt.
        piece_nbytes: longest DATA frame and longest uninterrupted copy.
        request_nbytes: longest payload of one request on the wire.
        window_nbytes: payload in flight on one connection; more waits its turn.
        max_ranges_per_request: ranges described by one request on the wire.
        max_operations_per_peer: operations one peer may have waiting or running.
        connections_per_peer: tcp streams to one peer.
        connect_timeout_s: limit for connecting and the hello.
        copy_threads: threads that copy for ``shm`` and ``loopback``.
        inline_copy_nbytes: copies up to this size run in the event loop.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    transport: str = "auto"
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    advertise_host: str | None = None
    cluster_secret: SecretStr | None = None
    piece_nbytes: int = Field(default=MIB, ge=4096, le=64 * MIB)
    request_nbytes: int = Field(default=16 * MIB, ge=4096)
    window_nbytes: int = Field(default=64 * MIB, ge=4096)
    max_ranges_per_request: int = Field(default=1024, ge=1, le=4096)
    max_operations_per_peer: int = Field(default=4096, ge=1)
    connections_per_peer: int = Field(default=1, ge=1, le=16)
    connect_timeout_s: float = Field(default=5.0, gt=0)
    copy_threads: int = Field(default_factory=_default_copy_threads, ge=1, le=64)
    inline_copy_nbytes: int = Field(default=256 * 1024, ge=0)

    @field_validator("transport")
    @classmethod
    def _known_transport(cls, value: str) -> str:
        if value not in TRANSPORTS:
            raise ValueError(f"unknown transport {value!r}; choose one of {', '.join(TRANSPORTS)}")
        return value

    @model_validator(mode="after")
    def _reachable_safely(self) -> TransferConfig:
        if not is_local_host(self.host) and not self.secret:
            raise ValueError(
                f"refusing to listen on {self.host!r} without a cluster secret: everyone who "
                "reaches that address could read and write memory. Set cluster_secret, or bind "
                "127.0.0.1"
            )
        if _is_wildcard(self.host) and self.advertise_host is None:
            raise ValueError(
                f"host {self.host!r} is a wildcard: set advertise_host to the address at which "
                "peers reach this machine"
            )
        return self

    @property
    def secret(self) -> bytes:
        """The cluster secret as bytes; empty when there is none."""
        return self.cluster_secret.get_secret_value().encode() if self.cluster_secret else b""

    @property
    def advertised(self) -> str:
        """The host that tokens carry."""
        return self.advertise_host or self.host
