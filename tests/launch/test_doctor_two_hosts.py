"""The doctor between two hosts, made of two network namespaces and a virtual cable."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HERE, THERE = "10.98.0.1", "10.98.0.2"


def _has_namespaces() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    return tools and not subprocess.run(["unshare", "-rn", "true"], check=False).returncode


# Run as root of a fresh user and network namespace: the far host is a namespace below it, whose
# `kvferry doctor --serve` starts once it is told that the cable is plugged in.
SCRIPT = f"""
set -e
export KVFERRY_SECRET=a-secret-of-two-hosts
ip link set lo up
mkfifo "$1/go" "$1/said"
unshare -n sh -c 'read line < "$0/go"; exec "$1" -m launch.main doctor --serve \
    --host {THERE} --port 8200 > "$0/said"' "$1" "$2" &
far=$!
trap 'kill $far' EXIT
ip link add near type veth peer name far
while [ "$(readlink /proc/$far/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do :; done
ip link set far netns $far
ip address add {HERE}/24 dev near
ip link set near up
nsenter -t $far -n ip address add {THERE}/24 dev far
nsenter -t $far -n ip link set far up
nsenter -t $far -n ip link set lo up
echo go > "$1/go"
read line < "$1/said"
"$2" -m launch.main doctor --peer {THERE}:8200 --json --pages 4KiB --batch 3 --rounds 1 \
    --transfer tcp --transfer shm --require tcp
"""


@pytest.mark.net
@pytest.mark.skipif(not _has_namespaces(), reason="needs user and network namespaces")
def test_two_hosts_measure_tcp_beside_a_plain_socket_and_find_no_shared_memory(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-c", SCRIPT, "two_hosts", str(tmp_path), sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    tcp = [row for row in found if row["transport"] == "tcp"]
    assert [row["op"] for row in tcp] == ["read", "read", "write", "read"]
    assert all(row["verified"] for row in tcp)
    assert {row["limit"] for row in tcp} == {"plain socket", "plain socket + xxh3-128"}
    (shm,) = [row for row in found if row["transport"] == "shm"]
    assert shm["available"] is False
    assert "tcp does" in shm["reason"]
