"""What a bulk transfer engine can be told: transport, addresses and every named limit.

Knows no sockets. Refuses at construction what could not be served safely: an unknown transport, or
an address beyond this machine without a cluster secret.
"""

from __future__ import annotations

import ipaddress
import os

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from transfer.fault_rules import FaultRules
from transfer.fault_text import parse_rules

TRANSPORTS = ("auto", "loopback", "shm", "tcp", "ucx")

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
    return min(4, os.cpu_count() or 1)


class TransferConfig(BaseModel):
    """Settings of one ``TransferEngine``. Frozen; unknown fields are refused.

    Attributes:
        transport: ``auto``, ``loopback``, ``shm``, ``tcp`` or ``ucx``. ``shm`` and ``ucx`` also
            listen on tcp, for peers and regions that they do not reach; ``auto`` picks the best
            path for each peer.
        host: address to bind. Anything but this machine needs ``cluster_secret``.
        port: 0 takes a free one.
        advertise_host: what tokens say instead of ``host``; needed when ``host`` is a wildcard.
        cluster_secret: shared by all nodes; bulk connections prove it by an HMAC challenge.
            It authenticates; it does not encrypt.
        piece_nbytes: longest DATA frame; a copy within this host is uninterrupted for up to four
            times as much (``copy_pieces.py``).
        request_nbytes: longest payload of one request on the wire.
        window_nbytes: payload in flight with one peer; more waits its turn, pushes behind reads
            (``window.py``).
        max_ranges_per_request: ranges described by one request on the wire.
        max_operations_per_peer: operations one peer may have waiting or running.
        connections_per_peer: tcp streams to one peer. Between processes of one host more than one
            gains nothing: 64 pages of 360 KiB moved at 1.03, 1.05, 1.02 (read) and 1.14, 1.14, 1.14
            (write) times a plain blocking socket with 1, 2, 4 streams (medians of three runs,
            2026-11-29, two cores, both busy otherwise). More may help where one stream does not
            fill the path: long round trips, losses.
        ucx_port: port of the UCX listener; 0 takes the one beside tcp's, or a free one.
        connect_timeout_s: limit for connecting and the hello.
        copy_threads: threads that copy for ``shm`` and ``loopback``.
        inline_copy_nbytes: copies up to this size run in the event loop.
        bounce_nbytes: pinned memory of one slot, through which device memory reaches transports
            that do not take it as it is.
        bounce_slots: such slots for each device; made as they are needed.
        bounce_slots_per_peer: slots that operations with one peer may hold; two or more let the
            device copy while the wire moves.
        inject: rules of fault injection (``transfer/fault_text.py``); empty for none.
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
    ucx_port: int = Field(default=0, ge=0, le=65535)
    connect_timeout_s: float = Field(default=5.0, gt=0)
    copy_threads: int = Field(default_factory=_default_copy_threads, ge=1, le=64)
    inline_copy_nbytes: int = Field(default=512 * 1024, ge=0)
    bounce_nbytes: int = Field(default=4 * MIB, ge=4096, le=256 * MIB)
    bounce_slots: int = Field(default=16, ge=1, le=1024)
    bounce_slots_per_peer: int = Field(default=4, ge=1, le=1024)
    inject: str = ""

    @field_validator("transport")
    @classmethod
    def _known_transport(cls, value: str) -> str:
        if value not in TRANSPORTS:
            raise ValueError(f"unknown transport {value!r}; choose one of {', '.join(TRANSPORTS)}")
        return value

    @field_validator("inject")
    @classmethod
    def _rules_are_understood(cls, value: str) -> str:
        if value:
            parse_rules(value)
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
    def fault_rules(self) -> FaultRules:
        """The faults to inject; no rules when there are none."""
        return parse_rules(self.inject) if self.inject else FaultRules()

    @property
    def secret(self) -> bytes:
        """The cluster secret as bytes; empty when there is none."""
        return self.cluster_secret.get_secret_value().encode() if self.cluster_secret else b""

    @property
    def advertised(self) -> str:
        """The host that tokens carry."""
        return self.advertise_host or self.host
