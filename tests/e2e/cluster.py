"""A real cluster of real processes, for tests: every role is a ``kvferry`` subprocess.

Owns the processes it started (ends them by id, never by name) and their logs. The model is the
fake one, whose every token depends on every KV byte, so a single wrong byte shows in the answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05

ROOT = Path(__file__).resolve().parents[2]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


@dataclass
class Proc:
    """One role process."""

    name: str
    role: str
    popen: subprocess.Popen[bytes]
    log: Path
    argv: list[str]

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(STOP_TIMEOUT_S)

    def signal(self, number: int) -> None:
        os.kill(self.popen.pid, number)


@dataclass
class Cluster:
    """Processes of one test. Use ``running`` to make one."""

    directory: Path
    transport: str
    model: str
    options: dict[str, list[str]] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    procs: dict[str, Proc] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port, self.join_port = free_ports(2)
        self._count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def join(self) -> str:
        return f"tcp://127.0.0.1:{self.join_port}"

    def start(self, role: str, *extra: str) -> Proc:
        """Start one process of ``role``; returns at once."""
        self._count += 1
        name = f"{role}-{self._count}"
        argv = [sys.executable, "-m", "launch.main", role]
        if role == "gateway":
            argv += ["--port", str(self.port), "--join-port", str(self.join_port)]
        else:
            argv += ["--join", self.join, "--transfer", self.transport]
        if role != "store":
            argv += ["--model", self.model]
        if role in ("prefill", "decode"):
            argv += ["--threads", "1"]
        argv += [*self.options.get(role, []), *extra]
        return self._spawn(name, role, argv)

    def restart(self, proc: Proc) -> Proc:
        """Start a process again with the same command line."""
        self._count += 1
        return self._spawn(f"{proc.role}-{self._count}", proc.role, proc.argv)

    def _spawn(self, name: str, role: str, argv: list[str]) -> Proc:
        log = self.directory / f"{name}.log"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                argv,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=os.environ | {"KVFERRY_HOME": str(self.directory / "home")} | self.env,
            )
        proc = Proc(name, role, popen, log, argv)
        self.procs[name] = proc
        return proc

    def wait_for(self, roles: dict[str, int], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until exactly these many members are alive and the gateway is ready."""
        deadline = time.monotonic() + timeout_s
        seen: Any = None
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                seen = self.members()
                ready = httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
                if seen == {role: n for role, n in roles.items() if n} and (
                    ready or not roles.get("decode")
                ):
                    return
            time.sleep(POLL_S)
        raise AssertionError(f"not ready: wanted {roles}, saw {seen}\n{self.logs()}")

    def proc_of(self, role: str, pid: str | None = None) -> Proc:
        """The process with this id, or any live one of ``role``."""
        live = [p for p in self.procs.values() if p.role == role and p.alive]
        return next(p for p in live if pid is None or str(p.popen.pid) == pid)

    def pid_of(self, node_id: str) -> str:
        """The process id that a member states."""
        body = httpx.get(f"{self.url}/admin/cluster", timeout=5).json()
        pid: str = next(m["labels"]["pid"] for m in body["members"] if m["node_id"] == node_id)
        return pid

    def heal(self) -> None:
        """Continue what was stopped, start again what has ended."""
        for name, proc in list(self.procs.items()):
            if proc.alive:
                proc.signal(signal.SIGCONT)
            else:
                del self.procs[name]
                self.restart(proc)

    def wait_until_it_says_something(self, proc: Proc) -> None:
        """Wait for the first line of a process, so that a start order is a real order."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not proc.log.stat().st_size:
            assert proc.alive, self.logs()
            assert time.monotonic() < deadline, f"{proc.name} says nothing"
            time.sleep(POLL_S)

    def members(self) -> dict[str, int]:
        """Number of members by role whose processes live (a dead one is listed for a moment)."""
        body = httpx.get(f"{self.url}/admin/cluster", timeout=2).json()
        live = {str(p.popen.pid) for p in self.procs.values() if p.alive}
        return dict(Counter(m["role"] for m in body["members"] if m["labels"].get("pid") in live))

    def logs(self) -> str:
        return "\n".join(
            f"--- {p.name} (exit {p.popen.poll()})\n{p.log.read_text(errors='replace')[-4000:]}"
            for p in self.procs.values()
        )

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what is left; nodes before the gateway."""
        order = sorted(self.procs.values(), key=lambda p: p.role == "gateway")
        for proc in order:
            if proc.alive:
                proc.signal(signal.SIGCONT)
                proc.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for proc in order:
            try:
                proc.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                proc.kill()


@contextlib.contextmanager
def running(
    directory: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    store: int = 1,
    transport: str = "tcp",
    model: str = "fake",
    options: dict[str, list[str]] | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[Cluster]:
    """Start a cluster, wait until it is ready, and leave nothing running."""
    cluster = Cluster(directory, transport, model, options or {}, env or {})
    try:
        cluster.start("gateway")
        roles = {"store": store, "prefill": prefill, "decode": decode}
        for role, count in roles.items():
            for _ in range(count):
                cluster.start(role)
        cluster.wait_for(roles)
        yield cluster
    except BaseException as error:
        error.add_note(cluster.logs())
        raise
    finally:
        cluster.stop()
