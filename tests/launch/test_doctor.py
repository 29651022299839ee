"""``kvferry doctor`` as people and scripts run it: real processes on tiny grids."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.doctor import command as command_module
from launch.doctor import stall
from launch.doctor.options import UNUSED, DoctorOptions
from launch.doctor.peer import child_argv
from launch.doctor.rows import Row
from launch.doctor.session import Session
from launch.main import main
from transfer.shm_memory import shared_memory_available
from transfer.zmq_network import ZmqNetwork

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--pages", "4KiB", "--batch", "3", "--rounds", "1"]
TIMEOUT_S = 90
MANY = [word for batch in range(1, 1000) for word in ("--batch", str(batch))]
LONG = ["--json", "--transfer", "tcp", "--pages", "4KiB", *MANY]  # its first row comes soon


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "launch.main", "doctor", *argv]


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "KVFERRY_SECRET"}
    return {**kept, **extra}


def doctor(*argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; output is captured."""
    return subprocess.run(
        command(*argv),
        cwd=ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def running(*argv: str, **extra: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A doctor that is still running, and its first line; ended afterwards."""
    process = subprocess.Popen(
        command(*argv),
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def served_at(line: str) -> str:
    match = re.search(r"--peer (\S+:\d+)`", line)
    assert match is not None, line
    return match[1]


@pytest.mark.net
@pytest.mark.skipif(not shared_memory_available(), reason="no memfd")
def test_every_transport_of_this_machine_is_verified_and_held_against_its_limit() -> None:
    done = doctor("--json", *TINY, "--require", "loopback", "--require", "shm", "--require", "tcp")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = rows(done)
    for name, limit in (("loopback", "memcpy"), ("shm", "memcpy"), ("tcp", "plain socket")):
        mine = [row for row in found if row["transport"] == name]
        assert [(row["op"], row["checksum"]) for row in mine] == [
            ("read", None),
            ("read", "xxh3-128"),
            ("write", None),
            ("read", None),
        ]
        assert all(row["verified"] and row["ratio"] > 0 for row in mine)
        assert all(row["limit"].startswith(limit) for row in mine)
        assert [row["p50_us"] is None for row in mine] == [True, True, True, False]
        assert mine[-1]["p50_us"] <= mine[-1]["p99_us"]
    others = [row for row in found if row["transport"] == "ucx"]
    assert others, "ucx is measured, or it is said why not"
    assert all("ratio" in row or (row["reason"] and row["remedy"]) for row in others)


@pytest.mark.net
def test_a_ratio_that_is_not_reached_ends_with_3_and_both_numbers() -> None:
    arguments = ["--transfer", "loopback", *TINY, "--require", "loopback", "--min-ratio", "1e6"]
    done = doctor(*arguments)
    assert done.returncode == 3
    assert re.fullmatch(
        r"kvferry: error: --require loopback: 3 of 3 rows fall short of --min-ratio 1e\+06, the "
        r"worst is loopback \w+.*, 3 x 4096 bytes: ratio [\d.]+ \([\d.]+ of [\d.]+ GB/s of .*\)\n",
        done.stderr,
    )
    assert "loopback" in done.stdout  # the table is shown all the same


@pytest.mark.net
def test_two_processes_with_the_same_secret_measure_tcp_and_refuse_loopback() -> None:
    with running("--serve", "--port", "0", KVFERRY_SECRET="a-secret-of-two-processes") as (_, line):
        address = served_at(line)
        done = doctor(
            *("--peer", address, "--json", *TINY),
            *("--transfer", "tcp", "--transfer", "loopback", "--require", "tcp"),
            KVFERRY_SECRET="a-secret-of-two-processes",
        )
    assert done.returncode == 0, done.stderr
    found = rows(done)
    assert {row["limit"] for row in found[:-1] if not row["checksum"]} == {"plain socket"}
    assert all(row["verified"] for row in found[:-1])
    assert found[-1]["transport"] == "loopback"
    assert found[-1]["available"] is False
    assert "--peer" in found[-1]["remedy"]


@pytest.mark.net
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("required", "code"), [([], 1), (["--require", "tcp"], 3)])
def test_a_peer_that_dies_or_freezes_while_it_is_measured_is_a_failure(
    number: signal.Signals, required: list[str], code: int
) -> None:
    with running("--serve", "--port", "0") as (peer, line):
        arguments = ["--peer", served_at(line), *LONG, "--transfer", "shm", *required]
        with running(*arguments) as (process, row):
            assert json.loads(row)["verified"]
            peer.send_signal(number)
            out, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code
    assert "the other side went away" in error
    tcp, shm = map(json.loads, out.splitlines()[-2:])  # readline took some of those before
    assert (tcp["transport"], tcp["available"], tcp["failed"]) == ("tcp", False, True)
    assert (shm["transport"], shm["failed"], shm["reason"]) == ("shm", True, "not tried any more")
    assert "the other side went away" in tcp["remedy"]


@pytest.mark.net
def test_a_child_that_dies_while_it_is_measured_is_a_failure() -> None:
    with running(*LONG) as (process, _):
        (peer,) = psutil.Process(process.pid).children()
        peer.kill()
        error = process.communicate(timeout=TIMEOUT_S)[1]
    assert process.returncode == 1
    assert error.startswith("kvferry: error: tcp: failed: ")
    assert "the other side went away" in error


@pytest.mark.net
@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="needs ucxx")
def test_stdout_is_json_only_whatever_ucx_logs_and_the_remedy_names_the_variable() -> None:
    more = {"UCX_TLS": "nonsense", "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stdout"}
    (found,) = rows(doctor("--json", "--transfer", "ucx", *TINY, **more))
    assert (found["available"], found["failed"]) == (False, False)
    assert "UCX_TLS" in found["remedy"]
    assert "pip install" not in found["remedy"]


@pytest.mark.net
def test_ctrl_c_ends_the_doctor_and_its_peer() -> None:
    with running(*LONG) as (process, line):
        assert json.loads(line)["transport"] == "tcp"
        (peer,) = psutil.Process(process.pid).children()
        assert "--serve" in peer.cmdline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=TIMEOUT_S)[1] == "kvferry: error: interrupted\n"
        assert process.returncode == 130
        psutil.wait_procs([peer], timeout=TIMEOUT_S)
        assert not peer.is_running()


INTERRUPTED = """
import os, signal, sys
from launch.doctor import command
from launch.main import main

measure = command.measure

async def interrupted(*told):
    found = measure(*told)
    yield await anext(found)
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    async for finding in found:
        yield finding

command.measure = interrupted
sys.exit(main(["doctor", "--transfer", "loopback", *sys.argv[2:]]))
"""


@pytest.mark.net
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_rows_that_were_measured_are_shown_when_it_is_interrupted(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, name, "--pages", "4KiB", *MANY],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr == "kvferry: error: interrupted\n"
    heading, *shown = done.stdout.splitlines()
    assert heading.split()[:4] == ["transport", "op", "page", "batch"]
    assert shown[0].split()[:5] == ["loopback", "read", "4", "KiB", "1"]


@pytest.mark.net
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_peer_does_not_outlive_a_doctor_that_is_killed(number: signal.Signals) -> None:
    with running(*LONG) as (process, _):
        (peer,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        process.wait(TIMEOUT_S)
        psutil.wait_procs([peer], timeout=TIMEOUT_S)
        assert not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE


@pytest.mark.net
@pytest.mark.slow
async def test_three_peers_are_timed_alone_and_beside_one_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stall, "SAMPLE_S", 0.05)
    timed, stopped = stall._seconds_of_all, []
    before = set(psutil.Process().children())  # servers of other tests

    async def watched(sessions: Sequence[Session]) -> float:
        peers = set(psutil.Process().children()) - before
        states = [peer.status() for peer in peers]
        stopped.append((len(states), states.count(psutil.STATUS_STOPPED)))
        return await timed(sessions)

    monkeypatch.setattr(stall, "_seconds_of_all", watched)
    network = ZmqNetwork()
    try:
        row = await stall.measure_stalled("tcp", network, DoctorOptions(rounds=2), None)
    finally:
        await network.close()
    assert stopped == [(3, 0), (4, 1)] * 2
    assert isinstance(row, Row)
    assert (row.transport, row.op, row.verified) == ("tcp", "stalled_peer", True)
    assert row.ratio is not None
    assert row.ratio > 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--transfer", "pigeon"], ["--transfer pigeon", "loopback"]),
        (["--require", "sim"], ["--require sim", "tcp"]),
        (["--rounds", "0"], ["--rounds 0", "1"]),
        (["--min-ratio", "-1"], ["--min-ratio -1", "more than 0, such as 0.5"]),
        (["--min-ratio", "nan"], ["--min-ratio nan", "more than 0, such as 0.5"]),
        (["--pages", "0"], ["--pages 0", "more than 0, like 368640"]),
        (["--pages", "5MiB", "--batch", "256"], ["--batch 256", "512"]),
        (["--pages", "12"], ["--pages 12", "multiple of 8"]),
        (["--peer", "nowhere"], ["--peer nowhere", "kvferry doctor --serve"]),
        (["--peer", "192.0.2.1:8200"], ["--peer 192.0.2.1:8200", "secret"]),
        (["--peer", "127.0.0.1:1", "--stalled-peer"], ["--stalled-peer", "--peer"]),
        (["--serve", "--peer", "127.0.0.1:1"], ["--serve", "--peer 127.0.0.1:1", "leave one out"]),
        (["--serve", "--host", "0.0.0.0"], ["--host 0.0.0.0", "--secret-file"]),
        (["--serve", "--port", "70000"], ["--port 70000", "65535"]),
    ],
)
def test_a_wrong_option_is_one_line_with_the_remedy(
    argv: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVFERRY_SECRET", raising=False)
    assert main(["doctor", *argv]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("kvferry: error: ")
    for word in words:
        assert word in line


def test_help_says_the_exit_codes_and_the_variable_of_the_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    beside = "measured beside those of --transfer"
    for word in ("3 bytes arrived wrong", "KVFERRY_SECRET", "--min-ratio", "--peer", beside):
        assert word in text


def test_all_means_every_transport_and_what_is_required_is_measured() -> None:
    every = ("loopback", "shm", "tcp", "ucx")
    assert DoctorOptions.of(transfer=["all"]).measured == every
    assert DoctorOptions.of(transfer=[]).measured == every
    assert DoctorOptions.of(transfer=["tcp"], require=["shm"]).measured == ("tcp", "shm")


def test_help_shows_the_defaults_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in DoctorOptions.model_fields.items():
        option = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
        assert (f"{option} " in text) is (name not in UNUSED)
        if isinstance(field.default, str | int) and not isinstance(field.default, bool):
            assert f"default: {field.default}]" in text


def test_options_of_every_kind_reach_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[DoctorOptions] = []
    monkeypatch.setattr(command_module, "run", given.append)
    assert main(["doctor"]) == 0
    words = "--json --transfer tcp --transfer shm --pages 8 --batch 3 --batch 4 --min-ratio 0.5"
    assert main(["doctor", *words.split(), "--peer", "127.0.0.1:82"]) == 0
    assert given == [
        DoctorOptions(),
        DoctorOptions(
            as_json=True,
            transfer=("tcp", "shm"),
            pages=("8",),
            batch=(3, 4),
            min_ratio=0.5,
            peer="127.0.0.1:82",
        ),
    ]


def test_the_child_is_told_the_secret_file_and_never_the_address() -> None:
    options = DoctorOptions.of(secret_file="secret", host="127.0.0.1")
    argv = child_argv(options)
    assert argv[argv.index("--secret-file") + 1] == "secret"
    assert argv[argv.index("--port") + 1] == "0"
    assert "--host" not in argv
