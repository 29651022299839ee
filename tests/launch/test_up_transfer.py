"""``kvferry up --transfer NAME`` runs the whole system on that path, and its pages move over it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.until import until

pytestmark = [pytest.mark.net, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 90.0
NO_UCX = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="no ucxx")


def up(transport: str, said: Path) -> subprocess.Popen[str]:
    """Start it; its log lines go to ``said``."""
    argv = ["up", "--model", "fake", "--port", "0", "--segment", "16MiB", "--transfer", transport]
    with said.open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "launch.main", *argv],
            cwd=ROOT,
            env={**os.environ, "UCX_TLS": "tcp"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def serving_at(process: subprocess.Popen[str], said: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"serves fake at (http://[\d.:]+\d)", line):
            return match[1]
    raise AssertionError(said.read_text())


def descriptors(url: str) -> float:
    """What decode's transfers took, as soon as a heartbeat has told the gateway."""
    wanted = re.compile(r'^kvferry_transfer_ranges_sent_total{.*role="decode".*} (\S+)$', re.M)
    found = 0.0

    def is_told() -> bool:
        nonlocal found
        text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
        found = sum(float(value) for value in wanted.findall(text))
        return found > 0

    until(is_told, "a heartbeat tells what decode's transfers took", TIMEOUT_S)
    return found


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp", pytest.param("ucx", marks=NO_UCX)])
def test_the_whole_system_moves_its_pages_over_the_transport_it_was_told(
    transport: str, tmp_path: Path
) -> None:
    process = up(transport, tmp_path / "said")
    try:
        url = serving_at(process, tmp_path / "said")
        body = {"model": "fake", "prompt": "Hello " * 40, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(
            f"{url}/v1/completions",
            json=body,
            headers={"x-kvferry-trace": "1"},
            timeout=TIMEOUT_S,
        ).json()
        assert len(answer["choices"][0]["text"]) > 0
        assert answer["kvferry"]["transport"] == transport
        assert answer["kvferry"]["pages_pulled"] > 0
        assert descriptors(url) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()
