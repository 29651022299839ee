"""A real Mooncake cluster of one master and one process that contributes memory, for tests.

Owns the processes it started; ends them by id. Everything listens on ports that were free.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.cluster import free_ports

START_TIMEOUT_S = 30.0
CLIENT_TTL_S = 3  # the master forgets a process that is silent for so long
DISCARD_S = 1  # and a reservation that is not committed for so long

_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
store.close()
"""


def library_missing() -> str | None:
    """Why no cluster can be started here; None when one can."""
    if importlib.util.find_spec("mooncake") is None:
        return "the Mooncake library is not installed"
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, check=False
    )
    return None if done.returncode == 0 else done.stderr.decode().strip().splitlines()[-1]


def require_library() -> None:
    """Skip where the library does not load; in continuous integration that is a failure."""
    missing = library_missing()
    if missing is not None and os.environ.get("CI"):
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(missing)


@dataclass
class MooncakeCluster:
    """Use ``running``."""

    directory: Path
    segment_nbytes: int
    port: int = 0
    metrics_port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def master(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"mooncake://{self.master}"

    def start_master(self) -> None:
        """Start a master, on the same port as the one before."""
        if not self.port:
            self.port, self.metrics_port = free_ports(2)
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        program = Path(spec.origin).parent / "mooncake_master"
        arguments = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "rpc_thread_num": 2,
            "client_ttl": CLIENT_TTL_S,
            "put_start_discard_timeout_sec": DISCARD_S,
        }
        argv = [str(program), *(f"--{name}={value}" for name, value in arguments.items())]
        with (self.directory / "master.log").open("ab") as log:
            self.processes["master"] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._wait_for_port()

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.processes["master"].poll() is None, self.logs()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise AssertionError(f"no master\n{self.logs()}")

    def start_owner(self) -> None:
        """Start the process whose memory holds the objects."""
        with (self.directory / "owner.log").open("ab") as log:
            owner = subprocess.Popen(
                [sys.executable, "-c", _OWNER, self.master, str(self.segment_nbytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.processes["owner"] = owner
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"0\n", self.logs()

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def logs(self) -> str:
        paths = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in paths)


@contextlib.contextmanager
def running(directory: Path, *, segment_nbytes: int = 256 << 20) -> Iterator[MooncakeCluster]:
    """Start a cluster, leave nothing running."""
    cluster = MooncakeCluster(directory, segment_nbytes)
    try:
        cluster.start_master()
        cluster.start_owner()
        yield cluster
    finally:
        for name in list(cluster.processes):
            cluster.kill(name)
