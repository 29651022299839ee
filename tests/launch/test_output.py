"""Nobody reads any more: lines are lost, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TextIO, cast

import httpx
import psutil
import pytest

from launch.output import LINES_MAX, _Behind, write_line
from launch.supervisor import ChildSpec, Supervisor
from tests.e2e.cluster import free_ports
from tests.until import until

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 90.0


def test_a_line_for_a_reader_that_has_gone_is_lost_and_the_next_ones_go_nowhere() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        assert write_line("heard", stream)
        os.close(reader)
        assert not write_line("lost", stream)
        assert write_line("into nothing", stream)
    assert not write_line("there is no stream", None)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_loses_a_line_and_keeps_the_file() -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        assert not write_line("lost", stream)
        assert not write_line("lost too", stream)
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat("/dev/full"))


PIPE_LINE = "x" * 1_000_000  # longer than a pipe holds


@contextlib.contextmanager
def pipe(*, blocking: bool) -> Iterator[tuple[IO[str], IO[str]]]:
    """Reader and writer; the reader is at the end when the writer is closed."""
    read, write = os.pipe()
    os.set_blocking(write, blocking)
    with open(read, encoding="utf-8") as reader, open(write, "w", encoding="utf-8") as writer:
        yield reader, writer


def test_a_line_is_written_whole_where_another_process_made_the_stream_non_blocking() -> None:
    with ThreadPoolExecutor(1) as pool, pipe(blocking=False) as (reader, writer):
        read = pool.submit(reader.read)
        assert all(write_line(f"{n}{PIPE_LINE}", cast("TextIO", writer)) for n in (1, 2))
        writer.close()
        assert read.result(TIMEOUT_S) == f"1{PIPE_LINE}\n2{PIPE_LINE}\n"


@pytest.mark.parametrize("blocking", [True, False])
def test_what_is_missing_is_counted_in_front_of_the_first_line_after_it(blocking: bool) -> None:
    with pipe(blocking=blocking) as (reader, writer):
        behind = _Behind(cast("TextIO", writer))
        behind.put(PIPE_LINE)
        assert reader.read(1) == "x", "the thread has it, and stands still in the middle of it"
        lines = [f"{n} {PIPE_LINE[:1000]}" for n in range(LINES_MAX)]
        for line in (*lines, *["lost"] * 3):
            behind.put(line)
        assert set(reader.readline()) == {"x", "\n"}
        until(lambda: not behind._lines.full(), "room for a line", TIMEOUT_S)
        behind.put("heard again")
        assert [reader.readline() for _ in lines] == [f"{line}\n" for line in lines]
        assert reader.readline() == "(3 lines are missing here: they were not read in time)\n"
        assert reader.readline() == "heard again\n"
        behind.flush(TIMEOUT_S)


def test_lines_that_are_lost_last_are_counted_at_the_end() -> None:
    with pipe(blocking=True) as (reader, writer):
        behind = _Behind(cast("TextIO", writer))
        behind.put(PIPE_LINE)
        assert reader.read(1) == "x", "the thread has it, and stands still in the middle of it"
        for n in range(LINES_MAX + 2):
            behind.put(f"{n}")
        assert set(reader.readline()) == {"x", "\n"}
        assert [reader.readline() for _ in range(LINES_MAX)][-1] == f"{LINES_MAX - 1}\n"
        assert reader.readline() == "(2 lines are missing here: they were not read in time)\n"
        behind.flush(TIMEOUT_S)
        behind.put("nothing is missing here")
        assert reader.readline() == "nothing is missing here\n"


def repeat(behind: _Behind, count: int) -> None:
    for _ in range(count):
        behind.put("line")


def test_every_line_is_written_or_counted_when_many_threads_say_something() -> None:
    num_each, num_threads = 3 * LINES_MAX, 4
    with (
        ThreadPoolExecutor(num_threads + 1) as pool,
        pipe(blocking=True) as (reader, writer),
    ):
        behind = _Behind(cast("TextIO", writer))
        read = pool.submit(reader.read)
        said = [pool.submit(repeat, behind, num_each) for _ in range(num_threads)]
        for future in said:
            future.result(TIMEOUT_S)
        behind.flush(TIMEOUT_S)
        writer.close()
        lines = read.result(TIMEOUT_S).splitlines()
    missing = [int(line[1:].split()[0]) for line in lines if line.startswith("(")]
    assert lines.count("line") + sum(missing) == num_each * num_threads
    assert lines.count("line") + len(missing) == len(lines)


_LOGGING = """
import logging, os, sys
from launch.progress import say
from launch.runtime import setup_logging
setup_logging("info")
for _ in range(3):
    logging.getLogger("x").info("a line")
    say("a line")
os.write(int(sys.argv[1]), b"done")
"""


def test_log_lines_that_nobody_reads_end_nothing() -> None:
    reader, writer = os.pipe()
    heard, told = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", _LOGGING, str(told)]
    done = subprocess.run(
        command, stdout=writer, stderr=writer, pass_fds=[told], cwd=ROOT, check=False
    )
    assert os.read(heard, 10) == b"done"
    assert done.returncode == 0, "also the flush at the end of the interpreter"
    for descriptor in (writer, heard, told):
        os.close(descriptor)


_CLOSED = """
import os, socket, sys
from launch.main import main
for descriptor in (0, 1, 2):
    os.close(descriptor)
sys.stdin = sys.stdout = sys.stderr = None
assert main(["version"]) == 0
assert main(["no-such-command"]) == 2
with socket.socket() as sock:
    assert sock.fileno() > 2, "a socket that prints are written to"
os.write(int(sys.argv[1]), b"done")
"""


def test_streams_that_are_closed_at_the_start_are_no_place_for_sockets() -> None:
    heard, told = os.pipe()
    command = [sys.executable, "-c", _CLOSED, str(told)]
    subprocess.run(command, pass_fds=[told], cwd=ROOT, check=True)
    assert os.read(heard, 10) == b"done"
    for descriptor in (heard, told):
        os.close(descriptor)


_STALLED = """
import asyncio, os, sys
from launch.output import LINES_MAX
from launch.runtime import run_role, setup_logging
from launch.supervisor import ChildSpec, Supervisor

class Group:
    def __init__(self, *specs):
        self.supervisor = Supervisor(specs)
    async def start(self):
        self.supervisor.start()
        os.write(int(sys.argv[1]), str(await self.supervisor.failed()).encode())
    async def failed(self):
        await asyncio.Event().wait()
    async def drain(self, timeout_s):
        await self.supervisor.stop(timeout_s)
    async def close(self):
        await self.supervisor.stop(0.0)

setup_logging("info")
talk = f"for n in range(2 * {LINES_MAX}): print('x' * 80)"
run_role(Group(ChildSpec("talker", [sys.executable, "-c", talk])), drain_timeout_s=1.0)
"""


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of what a test started, however it ended."""
    if process.poll() is None:  # else its number may be another's by now
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait(TIMEOUT_S)


def test_a_reader_that_stands_still_holds_up_neither_children_nor_their_supervisor() -> None:
    """As ``kvferry up 2>&1 | less`` does it; a signal still ends it."""
    heard, told = os.pipe()
    command = [sys.executable, "-c", _STALLED, str(told)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, pass_fds=[told], cwd=ROOT) as process:
        os.close(told)
        try:
            assert b"talker: it ended (exit code 0)" in os.read(heard, 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0, "although nobody has read anything"
            assert process.stderr is not None
            assert process.stderr.read().count(b"\n[talker] xxx") > 100, "what was written is whole"
        finally:
            os.close(heard)
            kill_with_children(process)


async def test_a_child_that_nobody_supervises_any_more_ends_the_cluster_loudly() -> None:
    def broken(name: str, line: str) -> None:
        raise RuntimeError(f"cannot show {line}")

    code = "import signal; print('up', flush=True); signal.pause()"
    supervisor = Supervisor([ChildSpec("a", [sys.executable, "-c", code])], show=broken)
    supervisor.start()
    async with asyncio.timeout(TIMEOUT_S):
        error = await supervisor.failed()
    assert "supervise-a: RuntimeError('cannot show up')" in str(error)
    await supervisor.stop(0.0)
    assert supervisor.pids == {}


# ---- real processes


def up(port: int, join_port: int, home: Path) -> subprocess.Popen[bytes]:
    """``kvferry up`` with both outputs in one pipe."""
    ports = ["--port", str(port), "--join-port", str(join_port)]
    options = ["--model", "fake", "--threads", "1", "--segment", "16MiB", *ports]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.main", "up", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=os.environ | {"KVFERRY_HOME": str(home)},
    )


def until_it_serves(process: subprocess.Popen[bytes], port: int) -> None:
    def serves() -> bool:
        assert process.poll() is None, f"ended with {process.returncode}"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
        return False

    until(serves, "it serves", TIMEOUT_S)


def node_of(process: subprocess.Popen[bytes], role: str) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            if role in child.cmdline():
                return child
    return None


def kill_and_see_it_come_back(process: subprocess.Popen[bytes], role: str) -> None:
    """Both the supervisor and the new child then have something to say; the others stay."""
    names = [name for name in ("gateway", "store", "prefill", "decode") if name != role]
    others = [node_of(process, name) for name in names]
    victim = node_of(process, role)
    assert victim is not None
    victim.kill()

    def is_back() -> bool:
        assert process.poll() is None, "it ended with its child"
        return node_of(process, role) not in (None, victim)

    until(is_back, "somebody starts it again", TIMEOUT_S)
    assert [node_of(process, name) for name in names] == others


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.parametrize("closed", ["before it serves", "while it serves"])
def test_up_and_its_children_go_on_when_nobody_reads_their_lines(
    closed: str, tmp_path: Path
) -> None:
    """As ``kvferry up 2>&1 | head`` does it."""
    port, join_port = free_ports(2)
    process = up(port, join_port, tmp_path)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if closed == "before it serves" or b"curl http" in line:
                break
        process.stdout.close()
        until_it_serves(process, port)
        if closed == "while it serves":  # only then is a death an accident that is made good
            kill_and_see_it_come_back(process, "decode")
            until_it_serves(process, port)
        body = {"model": "fake", "prompt": "Hello", "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json=body, timeout=TIMEOUT_S).status_code == 200
        children = psutil.Process(process.pid).children()
        assert len(children) == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert not [child for child in children if child.is_running()]
    finally:
        kill_with_children(process)


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.parametrize("kept", ["stdout", "stderr"])
def test_what_up_has_to_say_goes_where_somebody_reads(kept: str, tmp_path: Path) -> None:
    """One of the outputs is closed: what can be pasted goes to the other one."""
    reader, writer = os.pipe()
    os.close(reader)
    port, join_port = free_ports(2)
    options = ["--model", "fake", "--segment", "16MiB", "--transfer", "loopback"]
    ports = ["--port", str(port), "--join-port", str(join_port)]
    streams = {"stdout": writer, "stderr": writer} | {kept: subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-m", "launch.main", "up", *options, *ports],
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env=os.environ | {"KVFERRY_HOME": str(tmp_path)},
        **streams,
    ) as process:
        os.close(writer)
        try:
            stream = process.stdout or process.stderr
            assert stream is not None
            assert any(
                f"kvferry status --join tcp://127.0.0.1:{join_port}".encode() in x for x in stream
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            kill_with_children(process)
