"""KV events are published where the operator says, one node beside the other, or not at all."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvstore.events import EVENTS_LABEL, REPLAY_LABEL
from launch.cluster import plan, with_ports
from launch.config import JoinOptions, NodeOptions, UpOptions, option_of
from launch.errors import ConfigError
from launch.event_ports import EventNetwork, EventPorts, check_event_ports, port_options
from launch.http_client import post_json
from launch.inproc import InProcessCluster
from launch.main import main
from launch.node_role import NodeGroup
from launch.status import fetch

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


def told(argv: list[str]) -> tuple[int, int]:
    """The ports of a command line; 0 where it says none."""
    pairs = dict(itertools.pairwise(argv))
    names = ("--kv-events-port", "--kv-events-replay-port")
    first, second = (int(pairs.get(name, "0")) for name in names)
    return first, second


def free_range(count: int) -> int:
    """The first of some ports that were free a moment ago, outside of those given to anybody."""
    for port in range(20_000, 30_000, count):
        try:
            check_event_ports(NodeOptions.of(kv_events_port=port), count)
        except ConfigError:
            continue
        return port
    raise AssertionError("no free ports")


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_nodes_of_up_take_ports_in_the_order_of_stores_prefill_and_decode() -> None:
    options = UpOptions.of(
        **{"model": "fake", "store": 2, "prefill": 1, "decode": 2, "port": 1, "join_port": 2},
        kv_events_port=5557,
        kv_events_replay_port=5657,
    )
    specs = [spec for spec in plan(options) if spec.name != "gateway"]
    assert {spec.name: told(list(spec.argv)) for spec in specs} == {
        **{"store-1": (5557, 5657), "store-2": (5558, 5658), "prefill-1": (5559, 5659)},
        **{"decode-1": (5560, 5660), "decode-2": (5561, 5661)},
    }
    assert "--kv-events-port" not in plan(options)[0].argv, "a gateway publishes nothing"


def test_nodes_of_a_count_take_ports_in_their_order_and_free_ones_stay_free() -> None:
    group = NodeGroup("prefill", NodeOptions.of(model="fake", count=3, kv_events_port=5557))
    argvs = [list(child.spec.argv) for child in group._supervisor._children]
    assert [told(argv) for argv in argvs] == [(5557, 0), (5558, 0), (5559, 0)]
    assert port_options(NodeOptions.of(), 7) == {"kv_events_port": 0, "kv_events_replay_port": 0}


@pytest.mark.parametrize(
    ("events", "replay", "count", "words"),
    [
        (5557, 5557, 1, "--kv-events-replay-port 5557: port 5557 of --kv-events-port overlap"),
        (5557, 5558, 2, "ports 5557 to 5558 of --kv-events-port overlap .* 2 or more away"),
        (5560, 5557, 4, "--kv-events-replay-port 5557: ports 5560 to 5563 .* 4 or more away"),
        (65535, 0, 2, "--kv-events-port 65535: 2 nodes take 2 ports .* 65535 is the last"),
    ],
)
def test_ports_that_cannot_be_dealt_are_refused(
    events: int, replay: int, count: int, words: str
) -> None:
    options = NodeOptions.of(kv_events_port=events, kv_events_replay_port=replay)
    with pytest.raises(ConfigError, match=words):
        check_event_ports(options, count)


@pytest.mark.parametrize("option", ["--kv-events-port", "--kv-events-replay-port"])
@pytest.mark.parametrize("command", ["up", "store", "prefill", "decode"])
def test_a_port_in_use_is_one_line_before_anything_starts(
    command: str, option: str, busy_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"up": ["--port", "0"]}.get(command, ["--join", "tcp://127.0.0.1:9"])
    model = [] if command == "store" else ["--model", "fake"]
    assert main([command, *model, option, str(busy_port), *other]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{option} {busy_port}: in use on 127.0.0.1: stop what listens there or name" in line


async def test_a_port_that_is_taken_at_the_last_moment_is_refused_by_its_option(
    busy_port: int,
) -> None:
    network = EventNetwork(EventPorts(busy_port), allow_remote=False, secret=None)
    free = "tcp://127.0.0.1:0"
    with pytest.raises(ConfigError, match=f"--kv-events-port {busy_port}: cannot listen"):
        network.publish(free, free, lambda request: iter(()))
    await network.close()


@pytest.fixture
async def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InProcessCluster]:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    base = free_range(6)
    ports = {"kv_events_port": base, "kv_events_replay_port": base + 3}
    options = UpOptions.of(model="fake", port=0, segment="1MiB", transfer="loopback", **ports)
    cluster = InProcessCluster(with_ports(options))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


@pytest.mark.net
async def test_nodes_publish_and_answer_at_the_ports_that_were_chosen(
    live: InProcessCluster,
) -> None:
    view = await fetch(JoinOptions.of(join=live.join_url), TIMEOUT_S)
    found = {m.node_id: m.info.labels for m in view.members if EVENTS_LABEL in m.info.labels}
    base = live.options.kv_events_port
    for index, name in enumerate(("store-1", "prefill-1", "decode-1")):
        assert found[name][EVENTS_LABEL] == f"tcp://127.0.0.1:{base + index}"
        assert found[name][REPLAY_LABEL] == f"tcp://127.0.0.1:{base + 3 + index}"
    assert len(found) == 3


@pytest.mark.net
async def test_the_subscriber_of_the_docs_hears_every_kind_of_node(
    live: InProcessCluster, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "kv-events.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.S)
    program = tmp_path / "subscriber.py"
    program.write_text(snippet)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), live.url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            said = [(await process.stdout.readline()).decode().split() for _ in range(3)]
            assert sorted(words[0] for words in said) == ["decode-1", "prefill-1", "store-1"]
            heard: dict[str, list[str]] = {}
            reading = asyncio.create_task(_read(process.stdout, heard))
            number = 0
            while len(heard) < 3:  # a subscription takes a moment, and nobody says when it is there
                number += 1
                await _complete(live, number)
            reading.cancel()
        assert all(words[2] == "BlockStored" for words in heard.values())
        assert all(len(words[3]) == 12 for words in heard.values())
    finally:
        process.kill()
        await process.wait()


async def _read(stream: asyncio.StreamReader, heard: dict[str, list[str]]) -> None:
    while line := await stream.readline():
        words = line.decode().split()
        heard.setdefault(words[0], words)


async def _complete(cluster: InProcessCluster, number: int) -> None:
    body = {"model": "fake", "prompt": [number % 250] * 64, "max_tokens": 20}
    url = f"{cluster.url}/v1/completions"
    response = await asyncio.to_thread(post_json, url, body, headers={}, timeout_s=TIMEOUT_S)
    assert response is not None
    assert response.status == 200


@pytest.mark.parametrize("option", ["kv_events_port", "kv_events_replay_port"])
def test_a_port_that_the_gateway_will_take_is_refused_by_its_right_name(option: str) -> None:
    wanted = free_range(1)
    options = NodeOptions.of(**{option: wanted})
    said = f"{option_of(option)}: port {wanted} is that of --join-port"
    with pytest.raises(ConfigError, match=said):
        check_event_ports(options, 1, promised={"--port": 1, "--join-port": wanted})


def test_one_port_for_both_doors_of_the_gateway_is_refused() -> None:
    port = free_range(1)
    with pytest.raises(ConfigError, match=f"--join-port {port}: that is --port, too"):
        with_ports(UpOptions.of(model="fake", port=port, join_port=port))
