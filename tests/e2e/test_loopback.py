"""``kvferry up --transfer loopback``: every role in one process, the same answers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import complete, tokens_of
from tests.e2e.cluster import POLL_S, ROOT, START_TIMEOUT_S, STOP_TIMEOUT_S, free_ports
from tests.e2e.reference import expected, prompt_of

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.shared_processes]

LENGTHS = [1, 15, 16, 17, 32, 33, 300, 511, 512, 513]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, join_port = free_ports(2)
    log = tmp_path_factory.mktemp("loopback") / "log"
    argv = [sys.executable, "-m", "launch.main", "up", "--model", "fake"]
    argv += ["--transfer", "loopback", "--port", str(port), "--join-port", str(join_port)]
    argv += ["--prefill", "2", "--decode", "2", "--store", "2"]
    with log.open("wb") as out:
        popen = subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT
        )
    try:
        _wait_ready(popen, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
        assert _children(popen.pid) == [], "loopback means one process"
    finally:
        popen.send_signal(signal.SIGTERM)
        code = popen.wait(STOP_TIMEOUT_S)
    assert code == 0, log.read_text()


def _wait_ready(popen: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert popen.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(POLL_S)
    raise AssertionError(log.read_text())


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_tokens_equal_the_reference_for_every_length(url: str) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        assert tokens_of(complete(url, prompt, 40)) == expected(prompt, 40), length


def test_pages_cross_the_store_between_the_roles(url: str) -> None:
    trace = complete(url, prompt_of(300, seed=1), 8)["kvferry"]
    assert trace["transport"] == "loopback"
    assert trace["pages_pulled"] == 19
    assert trace["prefill_node"] != trace["decode_node"]
