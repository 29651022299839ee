"""What ``kvferry doctor`` can be told.

Owns names, bounds and defaults; the command line is declared from them (``cli_options``). Imports
neither numpy nor sockets: ``kvferry --help`` loads it.
"""

from __future__ import annotations

import math
import re
from typing import Literal, get_args

from pydantic import Field, field_validator

from launch.config import LogLevel, Options

Transport = Literal["loopback", "shm", "tcp", "ucx"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

DEFAULT_DOCTOR_PORT = 8200
ROUNDS_MAX = 1000
NAMES = ", ".join(TRANSPORTS)

HELP = """Verify and time every transfer path beside its physical limit.

Exit codes: 0 measured; 1 it could not run, or a transport broke while it was measured; 2 a wrong
option; 3 bytes arrived wrong, or a transport of --require is missing or broke, or --min-ratio is
not reached; 130 interrupted.
"""

UNUSED = ("node_id", "drain_timeout")  # of ``Options``: the doctor joins nothing and owes nothing

_PEER = re.compile(r"(?:tcp://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5})")


class DoctorOptions(Options):
    """``kvferry doctor``."""

    log_level: LogLevel = Field("warning", description="Least level of log lines.")
    transfer: tuple[Transport, ...] = Field(
        TRANSPORTS, description=f"What to measure: all (default), or some of {NAMES}; repeatable."
    )
    require: tuple[Transport, ...] = Field(
        (),
        description="Exit 3 unless this transport is there and right; it is measured beside those "
        "of --transfer, named there or not; repeatable.",
    )
    min_ratio: float | None = Field(
        None,
        description="Exit 3 if a required transport (without --require: any that was measured) is "
        "below this share of its limit in a row of at least 8 MiB a batch (in any row, where none "
        "is that large).",
    )
    as_json: bool = Field(False, description="Print one JSON object a row.")
    full: bool = Field(False, description="The whole grid: many minutes.")
    pages: tuple[str, ...] = Field(
        (), description="Size of a page, such as 368640 or 5MiB; repeatable."
    )
    batch: tuple[int, ...] = Field((), description="Pages moved by one operation; repeatable.")
    rounds: int = Field(
        5, ge=1, le=ROUNDS_MAX, description="Interleaved rounds; medians are shown."
    )
    stalled_peer: bool = Field(
        False, description="Throughput of three peers beside a stopped fourth."
    )
    serve: bool = Field(False, description="Be the other side, until Ctrl-C.")
    port: int = Field(
        DEFAULT_DOCTOR_PORT, ge=0, le=65535, description="Port of --serve; 0 takes a free one."
    )
    peer: str | None = Field(None, description="HOST:PORT of `kvferry doctor --serve` elsewhere.")

    @field_validator("transfer", mode="before")
    @classmethod
    def _all_is_every_transport(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return TRANSPORTS if "all" in value or not value else tuple(dict.fromkeys(value))

    @field_validator("min_ratio")
    @classmethod
    def _ratio_is_positive(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < math.inf:
            raise ValueError("use a share of the limit of more than 0, such as 0.5")
        return value

    @field_validator("peer")
    @classmethod
    def _peer_is_host_and_port(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = _PEER.fullmatch(value)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError("write HOST:PORT, as `kvferry doctor --serve` prints it there")
        return f"{match[1]}:{match[2]}"

    @property
    def measured(self) -> tuple[str, ...]:
        """The transports to measure: what is required is, named or not."""
        return tuple(dict.fromkeys((*self.transfer, *self.require)))

    @property
    def peer_host(self) -> str:
        """Host of ``--peer``, without brackets."""
        assert self.peer is not None, "there is no --peer"
        return self.peer.rpartition(":")[0].strip("[]")
