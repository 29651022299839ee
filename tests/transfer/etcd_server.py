"""A real etcd for tests, in a directory of its own, on free ports of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from transfer.etcd.address import EtcdAddress, parse_address

START_TIMEOUT_S = 20.0
POLL_S = 0.05
BINARY = shutil.which("etcd")
IN_CI = bool(os.environ.get("CI"))

needs_etcd = pytest.mark.skipif(
    BINARY is None and not IN_CI,
    reason="no `etcd` on this machine: apt-get install etcd-server (in CI this is a failure)",
)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


class EtcdServer:
    """One etcd, its data and its process."""

    def __init__(self, directory: Path, *, tls: bool = False) -> None:
        self.directory = directory
        self.tls = tls  # with a certificate that etcd makes for itself
        self.port, self._peer_port = _free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None
        self._num_names = 0

    def take_another_name(self) -> None:
        """Be another cluster's from now on: what the one before wrote is not seen any more."""
        self._num_names += 1

    @property
    def endpoint(self) -> str:
        return f"http{'s' * self.tls}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"etcd{'s' * self.tls}://127.0.0.1:{self.port}/test-{self._num_names}"

    @property
    def cacert(self) -> str:
        """The file with the certificate that clients trust."""
        return str(self.directory / "data" / "fixtures" / "client" / "cert.pem")

    @property
    def address(self) -> EtcdAddress:
        return parse_address(self.url)

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert BINARY is not None, "no `etcd` on this machine: apt-get install etcd-server"
        peer = f"http://127.0.0.1:{self._peer_port}"
        argv = [BINARY, "--data-dir", str(self.directory / "data"), "--name", "test"]
        argv += ["--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        argv += ["--initial-cluster", f"test={peer}", *(["--auto-tls"] if self.tls else [])]
        with (self.directory / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert time.monotonic() < deadline, (self.directory / "etcd.log").read_text()[-4000:]
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            body = {"key": "Lw=="}
            url = f"{self.endpoint}/v3/kv/range"
            answer = httpx.post(url, json=body, trust_env=False, verify=False)
            return answer.status_code == 200
        return False

    def stand_still(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once; the data stay. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def lose_everything(self) -> None:
        """End it and delete its data."""
        self.kill()
        shutil.rmtree(self.directory / "data")

    def lock(self, *, password: str) -> None:
        """From now on only the user ``root`` is let in."""
        self.call("auth/user/add", name="root", password=password)
        self.call("auth/user/grant", user="root", role="root")
        self.call("auth/enable")

    def call(self, path: str, **body: object) -> dict[str, object]:
        """One request by hand."""
        answer = httpx.post(f"{self.endpoint}/v3/{path}", json=body, trust_env=False)
        assert answer.status_code == 200, answer.text
        result: dict[str, object] = answer.json()
        return result


@contextlib.contextmanager
def running_etcd(directory: Path, *, tls: bool = False) -> Iterator[EtcdServer]:
    """Start an etcd, and end it."""
    server = EtcdServer(directory, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.kill()
