"""Real processes: what cannot work says so in one line, ends, and leaves nothing running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from launch import status
from launch.config import JoinOptions
from tests.launch.tiny_gguf import smollm_tokenizer
from tests.until import until

pytestmark = [pytest.mark.net, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 90.0


class Process:
    """One ``kvferry`` command and what it said so far."""

    def __init__(self, directory: Path, *argv: str) -> None:
        number = len(list(directory.glob("out-*")))
        self._out = directory / f"out-{number}"
        self._err = directory / f"err-{number}"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "launch.main", *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=os.environ | {"KVFERRY_HOME": str(directory / "home")},
            )

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def until(self, pattern: str) -> str:
        """Return the first group of ``pattern`` once the process has said it."""
        found: list[str] = []

        def said() -> bool:
            lives = self.popen.poll() is None  # before: what it said last counts
            if match := re.search(pattern, self.out + self.err):
                found.append(match[1] if match.groups() else match[0])
            assert found or lives, self.err
            return bool(found)

        until(said, lambda: f"to say {pattern!r}:\n{self.err}", TIMEOUT_S)
        return found[0]

    def wait(self) -> int:
        return self.popen.wait(TIMEOUT_S)

    def error_lines(self) -> list[str]:
        """The lines that tell a person what is wrong."""
        return [line for line in self.err.splitlines() if line.startswith("kvferry: error: ")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Process]]:
    """Start processes; end what is left of them, and of their children, after the test."""
    started: list[Process] = []

    class Started(Process):
        def __init__(self, *argv: str) -> None:
            super().__init__(tmp_path, *argv)
            started.append(self)

    yield Started
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.popen.pid).children(recursive=True):
                child.kill()
        process.popen.kill()
        process.popen.wait(TIMEOUT_S)


def wait_listed(join: str, node_id: str) -> None:
    """Wait until the registry at ``join`` lists the node."""

    def is_listed() -> bool:
        view = asyncio.run(status.fetch(JoinOptions.of(join=join), TIMEOUT_S))
        return any(member.node_id == node_id for member in view.members)

    until(is_listed, f"{node_id} joins", TIMEOUT_S)


def _commands_of_children(process: Process) -> list[str]:
    """Command lines of the processes that ``process`` started and that still live."""
    commands = []
    for other in psutil.process_iter(["ppid", "cmdline", "environ"]):
        environ = other.info["environ"] or {}
        if environ.get("KVFERRY_PARENT_PID") == str(process.popen.pid):
            commands.append(" ".join(other.info["cmdline"] or []))
    return commands


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("command", ["gateway", "up"])
@pytest.mark.parametrize("option", ["--port", "--join-port"])
def test_a_port_in_use_is_one_line(
    start: type[Process], busy_port: int, command: str, option: str
) -> None:
    other = ["--port", "0"] if option == "--join-port" else []
    process = start(command, "--model", "fake", option, str(busy_port), *other)
    assert process.wait() == 2
    (line,) = process.error_lines()
    assert f"{option} {busy_port}" in line
    assert process.out == ""


def test_a_secret_that_cannot_be_read_is_told_before_the_engine_is_loaded(
    start: type[Process],
) -> None:
    process = start("prefill", "--model", "fake", "--secret-file", "/no/such/file")
    assert process.wait() == 2
    (line,) = process.error_lines()
    assert "--secret-file /no/such/file" in line
    assert process.err.splitlines() == [line], "nothing of an engine"


@pytest.mark.parametrize("role", ["store", "decode"])
def test_a_join_that_nobody_answers_gives_up_in_one_line(
    start: type[Process], busy_port: int, role: str
) -> None:
    join = f"tcp://127.0.0.1:{busy_port}"  # something listens, but it is no registry
    model = ["--model", "fake"] if role == "decode" else []
    process = start(role, "--join", join, "--join-timeout", "1", *model)
    assert process.wait() == 1
    (line,) = process.error_lines()
    assert f"--join {join}" in line
    assert "kvferry gateway" in line


def test_status_of_a_cluster_that_is_not_there_is_one_line(
    start: type[Process], busy_port: int
) -> None:
    process = start("status", "--join", f"tcp://127.0.0.1:{busy_port}", "--timeout", "1")
    assert process.wait() == 1
    (line,) = process.error_lines()
    assert f"--join tcp://127.0.0.1:{busy_port}" in line
    assert line.endswith("or its secret differs")
    assert process.err.splitlines() == [line]


def test_status_reaches_a_cluster_with_its_secret_and_not_without(
    start: type[Process], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("open sesame")
    own = ["--secret-file", str(secret)]
    name = "a-name-that-is-longer-than-a-column-of-a-narrow-terminal-would-be-so-that-it-may-be-cut"
    gateway = start("gateway", "--model", "fake", "--port", "0", "--node-id", name, *own)
    join = gateway.until(r"--join (tcp://\S+)")
    status = start("status", "--join", join, *own)
    assert status.wait() == 0, status.err
    assert name in status.out
    stranger = start("status", "--join", join, "--timeout", "1")
    assert stranger.wait() != 0
    assert len(stranger.err.splitlines()) == 1, stranger.err
    gateway.popen.send_signal(signal.SIGTERM)
    assert gateway.wait() == 0, gateway.err
    assert gateway.err.splitlines()[-1].endswith("stopped")


def test_a_page_size_that_differs_is_refused_with_both_sides(start: type[Process]) -> None:
    gateway = start("gateway", "--model", "fake", "--port", "0")
    join = gateway.until(r"--join (tcp://\S+)")
    prefill = start("prefill", "--model", "fake", "--join", join, "--page-size", "16")
    prefill.until("serves over")
    decode = start("decode", "--model", "fake", "--join", join, "--page-size", "32")
    assert decode.wait() == 2
    (line,) = decode.error_lines()
    assert "page_size=16" in line
    assert "page_size=32" in line
    assert "kv_dtype" not in line, "only what differs"
    for process in (prefill, gateway):
        assert process.popen.poll() is None, "the others go on"
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0, process.err


def test_of_two_processes_with_one_node_id_the_second_ends_and_says_why(
    start: type[Process],
) -> None:
    gateway = start("gateway", "--model", "fake", "--port", "0")
    join = gateway.until(r"--join (tcp://\S+)")
    argv = ("store", "--join", join, "--node-id", "twin", "--segment", "16MiB")
    first = start(*argv)
    wait_listed(join, "twin")
    second = start(*argv)
    assert second.wait() == 2, second.err
    (line,) = second.error_lines()
    assert "node id twin is taken: the process at tcp://127.0.0.1:" in line
    assert "Give this process a --node-id of its own" in line
    for process in (first, gateway):
        assert process.popen.poll() is None, "the others go on"
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0, process.err


def test_up_serves_and_leaves_nothing_when_it_is_stopped(start: type[Process]) -> None:
    up = start("up", "--model", "fake", "--port", "0", "--threads", "1", "--segment", "16MiB")
    url = up.until(r"curl (http://\S+:\d+)/v1/completions")
    body = {"model": "fake", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    children = psutil.Process(up.popen.pid).children(recursive=True)
    assert len(children) == 4
    up.popen.send_signal(signal.SIGTERM)
    assert up.wait() == 0, up.err
    assert not [child for child in children if child.is_running()]


def test_up_ends_with_the_line_of_the_child_that_cannot_work(
    start: type[Process], tmp_path: Path
) -> None:
    """The gateway is content with the tokenizer; the engines are not with the architecture."""
    model = tmp_path / "model"
    model.mkdir()
    smollm_tokenizer().save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"architectures": ["AbacusForCausalLM"]}')
    (model / "model.safetensors").touch()
    up = start("up", "--model", str(model), "--port", "0", "--segment", "16MiB")
    assert up.wait() == 2
    (line,) = up.error_lines()
    assert re.match(r"kvferry: error: (prefill|decode)-1: ", line)
    assert "AbacusForCausalLM" in line
    assert up.out == ""
    assert _commands_of_children(up) == []


def test_up_with_every_role_in_one_process(start: type[Process]) -> None:
    up = start(
        "up", "--model", "fake", "--port", "0", "--transfer", "loopback", "--segment", "16MiB"
    )
    url = up.until(r"curl (http://\S+:\d+)/v1/completions")
    assert psutil.Process(up.popen.pid).children() == []
    body = {"model": "fake", "prompt": "x" * 100, "max_tokens": 4, "temperature": 0}
    headers = {"x-kvferry-trace": "1"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    trace = answer.json()["kvferry"]
    assert trace["transport"] == "loopback"
    assert trace["pages_pulled"] == 7
    up.popen.send_signal(signal.SIGINT)
    assert up.wait() == 0, up.err


def test_a_killed_node_of_up_comes_back(start: type[Process]) -> None:
    up = start("up", "--model", "fake", "--port", "0", "--threads", "1", "--segment", "16MiB")
    up.until(r"curl http")
    (victim,) = [
        child for child in psutil.Process(up.popen.pid).children() if "decode" in child.cmdline()
    ]
    victim.kill()
    up.until(r"decode-1 ended \(signal SIGKILL\)")
    up.until(r"(?s)SIGKILL.*\[decode-1\][^\n]* serves over")
    up.popen.send_signal(signal.SIGTERM)
    assert up.wait() == 0, up.err


def test_a_second_signal_stops_at_once(start: type[Process]) -> None:
    up = start("up", "--model", "fake", "--port", "0", "--threads", "1", "--segment", "16MiB")
    url = up.until(r"curl (http://\S+:\d+)/v1/completions")
    children = psutil.Process(up.popen.pid).children()
    body = {"model": "fake", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as stream:
        next(stream.iter_lines())
        up.popen.send_signal(signal.SIGTERM)
        up.until("a second signal stops at once")
        up.popen.send_signal(signal.SIGTERM)
        assert up.wait() == 130
    psutil.wait_procs(children, timeout=TIMEOUT_S)
    assert not [child for child in children if child.is_running()]
