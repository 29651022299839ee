"""What each command can be told: one frozen model per command, the only place of its defaults.

Owns names, types, bounds and defaults; ``--help`` shows what is here, because the command line is
declared from the same fields. Knows no packages: ``roles.py`` translates to their configs.

``argv`` turns options back into a command line, which is how ``up`` and ``--count`` start others.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from launch.errors import ConfigError
from launch.model_store import DEFAULT_MODEL

DEFAULT_PORT = 8000
JOIN_PORT_OFFSET = 100  # the join port lies so far above the HTTP port unless it is named
DEFAULT_JOIN = f"tcp://127.0.0.1:{DEFAULT_PORT + JOIN_PORT_OFFSET}"

TransferName = Literal["auto", "loopback", "shm", "tcp", "ucx"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "torch", "flashinfer"]
LogLevel = Literal["debug", "info", "warning", "error"]

INJECT_HELP = "Faults to inject into transfers, for tests; needs KVFERRY_ALLOW_INJECT=1."
SECRET_FILE_HELP = "File with the cluster secret [env: KVFERRY_SECRET, the secret itself]."

_JOIN = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5})")


class Options(BaseModel):
    """What every role takes. ``secret_file`` holds the cluster secret; ``KVFERRY_SECRET`` may hold
    the secret itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node_id: str | None = Field(None, description="Name of this node; random by default.")
    host: str = Field("127.0.0.1", description="Address to listen on; needs a secret beyond this.")
    advertise_host: str | None = Field(None, description="Address others reach it at.")
    secret_file: str | None = Field(None, description=SECRET_FILE_HELP)
    drain_timeout: float = Field(30.0, ge=0, description="Seconds to finish work on SIGTERM.")
    log_level: LogLevel = Field("info", description="Least level of log lines.")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build from command line values.

        Raises:
            ConfigError: the first value that is wrong, with its option and the remedy.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            option = "--" + str(first["loc"][0]).replace("_", "-")
            reason = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{option} {first['input']}: {reason}") from error

    def argv(self, *names_left_out: str) -> list[str]:
        """Return the options that differ from their defaults, as command line arguments."""
        arguments: list[str] = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default and name not in names_left_out:
                arguments += [f"--{name.replace('_', '-')}", str(value)]
        return arguments


class JoinOptions(Options):
    """What every role but the gateway takes."""

    join: str = Field(DEFAULT_JOIN, description="Where the gateway's registry listens.")
    join_timeout: float = Field(60.0, gt=0, description="Seconds to wait for an answer there.")
    transfer: TransferName = Field("auto", description="Transport of KV pages.")
    inject: str | None = Field(None, description=INJECT_HELP)

    @field_validator("join")
    @classmethod
    def _join_is_tcp(cls, value: str) -> str:
        match = _JOIN.fullmatch(value)
        if value.startswith("etcd://"):
            raise ValueError("etcd membership is not in this version: write tcp://HOST:PORT")
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError("write tcp://HOST:PORT, for example " + DEFAULT_JOIN)
        return value

    def refuse_loopback(self) -> None:
        """Refuse the transport inside of one process, for a process that is to reach others.

        Raises:
            ConfigError: ``--transfer loopback``.
        """
        if self.transfer == "loopback":
            raise ConfigError(
                "--transfer loopback: reaches nothing outside of this process: choose ucx, shm or "
                "tcp, or start every role in one process with `kvferry up --transfer loopback`"
            )


class StoreOptions(JoinOptions):
    """``kvferry store``."""

    segment: str = Field("1GiB", description="Memory it contributes to the store.")


class ComputeOptions(Options):
    """What prefill and decode processes take, whoever starts them."""

    model: str = Field(DEFAULT_MODEL, description="Known name, model directory, or `fake`.")
    page_size: int = Field(16, ge=1, le=1024, description="Tokens of one KV page.")
    num_pages: int | None = Field(None, ge=2, description="Pages of the local pool.")
    kv_memory: str | None = Field(
        None, description="Size of the local pool; 512MiB on a CPU, what is free on a GPU."
    )
    device: Device = Field("auto", description="Where to compute.")
    dtype: Dtype = Field("auto", description="float32 on a CPU, bfloat16 on a GPU.")
    attention: Attention = Field("auto", description="Attention back end.")
    threads: int | None = Field(None, ge=1, description="Compute threads; its cores by default.")
    chunk_size: int = Field(512, ge=1, description="Prompt tokens computed in one step at most.")
    fake_step_delay: float = Field(0.0, ge=0, description="Fake model: seconds added to a step.")
    fake_token_delay: float = Field(0.0, ge=0, description="Fake model: seconds added per token.")


class NodeOptions(JoinOptions, ComputeOptions):
    """``kvferry prefill`` and ``kvferry decode``."""

    cores: str | None = Field(None, description="Cores to use: 0,1 or 0-3.")
    gpus: str | None = Field(None, description="GPUs: with --count N, dealt out to N processes.")
    count: int = Field(1, ge=1, le=256, description="Processes to start, each a node.")


class GatewayOptions(Options):
    """``kvferry gateway``."""

    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    join_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description=f"Port nodes join at; HTTP port + {JOIN_PORT_OFFSET} by default.",
    )
    model: str = Field(DEFAULT_MODEL, description="Known name, model directory, or `fake`.")
    admin_token: str | None = Field(None, description="Opens /admin beyond loopback.")

    @property
    def registry_port(self) -> int:
        """The port of the registry; free when the HTTP port is free to choose.

        Raises:
            ConfigError: no port is left above the HTTP port.
        """
        if self.join_port is not None:
            return self.join_port
        if self.port + JOIN_PORT_OFFSET > 65535:
            raise ConfigError(f"--port {self.port}: leaves no join port: name one (--join-port)")
        return self.port + JOIN_PORT_OFFSET if self.port else 0


class UpOptions(ComputeOptions):
    """``kvferry up``: a whole cluster on this machine."""

    prefill: int = Field(1, ge=0, le=64, description="Prefill processes.")
    decode: int = Field(1, ge=1, le=64, description="Decode processes.")
    store: int = Field(1, ge=0, le=64, description="Store processes.")
    transfer: TransferName = Field(
        "auto", description="Transport of KV pages; loopback: one process."
    )
    inject: str | None = Field(None, description=INJECT_HELP)
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    join_port: int | None = Field(None, ge=0, le=65535, description="Port nodes join at.")
    segment: str = Field("1GiB", description="Memory of each store process.")
    gpus: str | None = Field(None, description="GPUs, dealt out to prefill and decode processes.")
    start_timeout: float = Field(900.0, gt=0, description="Seconds until everything must serve.")
