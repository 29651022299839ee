"""What each command can be told: one frozen model per command, the only place of its defaults.

Owns names, types, bounds and defaults; ``--help`` shows what is here, because the command line is
declared from the same fields. Knows no packages (but how an address of etcd
and a node id are written): ``roles.py`` translates to their configs.

``argv`` turns options back into a command line, which is how ``up`` and ``--count`` start others.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from launch.errors import ConfigError
from launch.model_store import DEFAULT_MODEL
from launch.option_words import refusal
from transfer.etcd import is_etcd, parse_address
from transfer.identity import check_node_id

DEFAULT_PORT = 8000
JOIN_PORT_OFFSET = 100  # the join port lies so far above the HTTP port unless it is named
DEFAULT_JOIN = f"tcp://127.0.0.1:{DEFAULT_PORT + JOIN_PORT_OFFSET}"

TransferName = Literal["auto", "loopback", "shm", "tcp", "ucx"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "torch", "flashinfer"]
LogLevel = Literal["debug", "info", "warning", "error"]
Eviction = Literal["lru", "lfu", "slru", "fifo", "heat"]

OPTION_NAMES = {"as_json": "--json"}  # where an option is not called as its field
ETCD_FORM = "etcd://HOST:2379/NAME"
MOONCAKE_FORM = "mooncake://MASTER:PORT"
STORES_MAX = 64  # that one `up` starts
INJECT_HELP = "Faults to inject into transfers, for tests; needs KVFERRY_ALLOW_INJECT=1."
SECRET_FILE_HELP = "File with the cluster secret [env: KVFERRY_SECRET, the secret itself]."

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5})")


def option_of(field: str) -> str:
    """Return how the option of a field is written."""
    return OPTION_NAMES.get(field, f"--{field.replace('_', '-')}")


def checked_join(value: str) -> str:
    """Return ``value``; ValueError, with how to write one, when it is no address to join at."""
    if is_etcd(value):
        parse_address(value)
        return value
    match = _TCP.fullmatch(value)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"write tcp://HOST:PORT, for example {DEFAULT_JOIN}, or {ETCD_FORM}")
    return value


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

    @field_validator("node_id")
    @classmethod
    def _node_id_is_a_name(cls, value: str | None) -> str | None:
        if value is not None:
            check_node_id(value)
        return value

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build from command line values.

        Raises:
            ConfigError: the first value that is wrong, with its option and the remedy.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            option = option_of(str(error.errors()[0]["loc"][0]))
            raise ConfigError(refusal(option, error, cls.model_fields)) from error

    def argv(self, *names_left_out: str) -> list[str]:
        """Return the options that differ from their defaults, as command line arguments."""
        arguments: list[str] = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value == field.default or name in names_left_out:
                continue
            for one in value if isinstance(value, tuple) else (value,):
                arguments += [option_of(name), str(one)]
        return arguments


class JoinOptions(Options):
    """What every role but the gateway takes."""

    join: str = Field(DEFAULT_JOIN, description=f"The gateway's registry, or {ETCD_FORM}.")
    join_timeout: float = Field(60.0, gt=0, description="Seconds to wait for an answer there.")
    transfer: TransferName = Field("auto", description="Transport of KV pages.")
    inject: str | None = Field(None, description=INJECT_HELP)

    @field_validator("join")
    @classmethod
    def _join_is_an_address(cls, value: str) -> str:
        return checked_join(value)

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


class PageStoreOptions(Options):
    """What store processes take, whoever starts them; checked by ``store_settings.py``."""

    segment: str = Field("1GiB", description="Memory of each store process.")
    ssd: str | None = Field(
        None, description="PATH:SIZE, a directory for pages that memory has no room for."
    )
    policy: Eviction = Field("lru", description="Which page goes first, of equal priority.")
    replicas: int = Field(1, ge=1, le=8, description="Store nodes that hold each page.")
    quota: tuple[str, ...] = Field(
        (),
        description="NAMESPACE=FRACTION of the memory that others cannot take; repeatable. "
        "`kvferry namespace` prints the name.",
    )
    high_watermark: float = Field(
        0.95, gt=0, le=1, description="Fraction of the memory above which pages are evicted."
    )
    low_watermark: float = Field(0.9, ge=0, le=1, description="Fraction down to which they are.")


class EventOptions(Options):
    """Where nodes publish their KV events. With several nodes these are the ports of the first;
    each further one takes the next (``event_ports.py``)."""

    kv_events_port: int = Field(
        0, ge=0, le=65535, description="Port of KV events (ZeroMQ PUB); 0 takes a free one."
    )
    kv_events_replay_port: int = Field(
        0, ge=0, le=65535, description="Port of requests for old ones; 0 takes a free one."
    )


class StoreOptions(JoinOptions, PageStoreOptions, EventOptions):
    """``kvferry store``."""


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


class NodeOptions(JoinOptions, ComputeOptions, EventOptions):
    """``kvferry prefill`` and ``kvferry decode``."""

    store: str | None = Field(
        None, description=f"{MOONCAKE_FORM}; the cluster's own store nodes by default."
    )
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
    join: str | None = Field(
        None, description=f"{ETCD_FORM}; with tcp:// or nothing it keeps the registry itself."
    )
    join_timeout: float = Field(60.0, gt=0, description="Seconds to wait for etcd.")
    model: str = Field(DEFAULT_MODEL, description="Known name, model directory, or `fake`.")
    admin_token: str | None = Field(None, description="Opens /admin beyond loopback.")

    @field_validator("join")
    @classmethod
    def _join_is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else checked_join(value)

    @property
    def etcd(self) -> str | None:
        """Where the members are kept, if not in this process."""
        return self.join if self.join is not None and is_etcd(self.join) else None

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


class UpOptions(ComputeOptions, PageStoreOptions, EventOptions):
    """``kvferry up``: a whole cluster on this machine. ``ssd`` holds a directory per store."""

    prefill: int = Field(1, ge=0, le=64, description="Prefill processes.")
    decode: int = Field(1, ge=1, le=64, description="Decode processes.")
    store: int | str = Field(
        1,
        description=f"Store processes, or {MOONCAKE_FORM}: an engine that exists, and no process.",
    )
    transfer: TransferName = Field(
        "auto", description="Transport of KV pages; loopback: one process."
    )
    inject: str | None = Field(None, description=INJECT_HELP)
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    join_port: int | None = Field(None, ge=0, le=65535, description="Port nodes join at.")
    gpus: str | None = Field(None, description="GPUs, dealt out to prefill and decode processes.")
    start_timeout: float = Field(900.0, gt=0, description="Seconds until everything must serve.")

    @field_validator("store", mode="before")
    @classmethod
    def _store_is_a_number_or_an_address(cls, value: int | str) -> int | str:
        if "://" in str(value):
            return value  # page_store.py reads it
        if re.fullmatch(r"\d{1,4}", str(value)) and int(value) <= STORES_MAX:
            return int(value)
        raise ValueError(f"give a number of processes from 0 to {STORES_MAX}, or {MOONCAKE_FORM}")

    @property
    def num_stores(self) -> int:
        """Store processes to start."""
        return self.store if isinstance(self.store, int) else 0

    @property
    def engine(self) -> str | None:
        """Address of the engine that keeps the pages, if it is not the cluster's own stores."""
        return self.store if isinstance(self.store, str) else None
