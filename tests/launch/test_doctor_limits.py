"""The limits themselves: the plain socket keeps strangers out, ucx_perftest is always ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.doctor import perftest
from launch.doctor.grid import Case
from launch.doctor.limits import Memcpy, NoLimit, Perftest, Socket
from launch.doctor.perftest import (
    MESSAGES_MAX,
    MESSAGES_MIN,
    PerftestFailed,
    Program,
    find_program,
    num_messages,
    run,
    seconds_per_message,
)
from launch.doctor.plain_socket import ORDER, PlainSocket, PlainSocketServer

CASE = Case(64, 4)
CSV = (
    "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n"
    " 500,4.386,4.441,27.5,879.58,879.58,225173,225173\n"
)


@pytest.fixture
def server() -> Iterator[PlainSocketServer]:
    """A server of 256 bytes that count from 0."""
    made = PlainSocketServer("127.0.0.1", memoryview(bytearray(range(256))))
    yield made
    made.close()


def test_plain_socket_moves_bytes_both_ways(server: PlainSocketServer) -> None:
    client = PlainSocket("127.0.0.1", server.port, server.key)
    memory = bytearray(256)
    client.exchange("read", memoryview(memory))
    assert memory == bytes(range(256))
    memory.reverse()
    client.exchange("write", memoryview(memory))
    again = bytearray(256)
    client.exchange("read", memoryview(again))
    assert again == bytes(range(255, -1, -1))
    client.close()


def test_who_does_not_know_the_key_is_hung_up_on_and_the_doctor_still_served(
    server: PlainSocketServer,
) -> None:
    stranger = PlainSocket("127.0.0.1", server.port, bytes(len(server.key)))
    with pytest.raises(OSError):
        stranger.exchange("read", memoryview(bytearray(8)))
    stranger.close()
    client = PlainSocket("127.0.0.1", server.port, server.key)
    client.exchange("read", memoryview(bytearray(8)))
    client.close()


def test_a_stranger_that_breaks_off_leaves_the_server_to_the_doctor(
    server: PlainSocketServer,
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        now = struct.pack("ii", 1, 0)  # close() resets the connection
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
    client = PlainSocket("127.0.0.1", server.port, server.key)
    client.exchange("read", memoryview(bytearray(8)))
    client.close()


def test_closing_hangs_up_on_one_who_comes_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted, closing = threading.Event(), threading.Event()

    def greeted(self: PlainSocketServer, connection: socket.socket) -> bool:
        accepted.set()
        assert closing.wait(30)
        return original(self, connection)

    class Joined:
        """The server's thread; joining it is what ``close`` does last."""

        def join(self) -> None:
            closing.set()
            thread.join()

    original = PlainSocketServer._greeted
    monkeypatch.setattr(PlainSocketServer, "_greeted", greeted)
    server = PlainSocketServer("127.0.0.1", memoryview(bytearray(256)))
    thread = server._thread
    monkeypatch.setattr(server, "_thread", Joined())
    client = PlainSocket("127.0.0.1", server.port, server.key)
    assert accepted.wait(30)
    server.close()  # the client stays, and is hung up on
    with pytest.raises(OSError):
        client.exchange("read", memoryview(bytearray(8)))
    client.close()


def test_an_order_beyond_the_memory_is_hung_up_on(server: PlainSocketServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(server.key + ORDER.pack(b"r", 257))
        assert connection.recv(1) == b""


def test_interrupt_ends_an_exchange_that_nobody_answers() -> None:
    errors: list[OSError] = []

    def wait() -> None:
        try:
            client.exchange("read", memoryview(bytearray(8)))
        except OSError as error:
            errors.append(error)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = PlainSocket("127.0.0.1", silent.getsockname()[1], b"key")
        thread = threading.Thread(target=wait)
        thread.start()
        client.interrupt()
        thread.join()
        client.close()
    assert errors


async def test_memcpy_copies_the_pages_of_the_case_to_their_places() -> None:
    source, target = bytearray(range(256)), bytearray(256)
    limit = Memcpy(memoryview(source), memoryview(target))
    seconds = await limit.sample("read", CASE)
    assert seconds is not None
    assert seconds > 0
    for remote, local, nbytes in CASE.ranges():
        assert target[local : local + nbytes] == source[remote : remote + nbytes]
    assert len(await limit.latencies(CASE, 3)) == 3


async def test_socket_limit_times_both_ways_and_ends_its_thread_when_cancelled(
    server: PlainSocketServer,
) -> None:
    limit = Socket(
        PlainSocket("127.0.0.1", server.port, server.key), memoryview(bytearray(CASE.nbytes))
    )
    for op in limit.ops:
        assert await limit.sample(op, CASE)
    assert len(await limit.latencies(CASE, 3)) == 3
    task = asyncio.create_task(limit.latencies(CASE, 1 << 40))  # for ever
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    limit.close()


async def test_no_limit_says_why_and_has_no_samples() -> None:
    limit = NoLimit("not installed")
    assert await limit.sample("read", CASE) is None
    assert await limit.latencies(CASE, 3) == []
    assert limit.note == "not installed"


def test_perftest_output_is_read_by_its_column_names() -> None:
    assert seconds_per_message(CSV, "tag_bw") == pytest.approx(27.5e-6)
    assert seconds_per_message(CSV, "tag_lat") == pytest.approx(4.386e-6)
    warned = "[1.2] UCX  WARN something\n" + CSV
    assert seconds_per_message(warned, "tag_bw") == pytest.approx(27.5e-6)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "iterations,overall_lat\n",
        "iterations,other\n1,2\n",
        "iterations,overall_lat\n1,fast\n",
        "iterations,overall_lat\n1,0.0\n",
        "iterations,overall_lat\n1\n",
        "UCX ERROR no usable transports\n",
    ],
)
def test_output_that_is_not_understood_is_an_error_not_a_figure(output: str) -> None:
    with pytest.raises(PerftestFailed):
        seconds_per_message(output, "tag_bw")


def test_messages_are_enough_for_a_figure_and_bounded() -> None:
    assert num_messages(Case(8, 1)) == MESSAGES_MAX
    assert num_messages(Case(64 << 20, 1)) == MESSAGES_MIN
    assert MESSAGES_MIN < num_messages(Case(368_640, 64)) < MESSAGES_MAX


def fake_program(directory: Path, client: str) -> Program:
    """A program that serves until it is killed, and runs ``client`` (Python) when told a host."""
    path = directory / "ucx_perftest"
    path.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\n"
        f"if sys.argv[1] == '-p':\n    signal.pause()\n{client}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Program(path, None)


async def test_client_tries_again_until_the_server_listens(tmp_path: Path) -> None:
    count = tmp_path / "tries"
    program = fake_program(
        tmp_path,
        f"with open({str(count)!r}, 'a') as file:\n    file.write('x')\n"
        f"if os.path.getsize({str(count)!r}) < 3:\n    sys.exit('connect: Connection refused')\n"
        f"print({CSV!r})",
    )
    assert await run(program, "tag_bw", 64, 10) == pytest.approx(27.5e-6)
    assert count.read_text() == "xxx"


async def test_a_failing_program_is_told_in_its_own_words(tmp_path: Path) -> None:
    program = fake_program(tmp_path, "sys.exit('UCX  ERROR no usable transports')")
    with pytest.raises(PerftestFailed, match="no usable transports"):
        await run(program, "tag_bw", 64, 10)
    limit = Perftest(program)
    assert await limit.sample("read", CASE) is None
    assert "no usable transports" in limit.note
    shutil.rmtree(tmp_path)
    assert await limit.latencies(CASE, 1) == []  # not even tried again


async def test_a_program_that_hangs_is_ended_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perftest, "TIMEOUT_S", 0.5)
    program = fake_program(tmp_path, "signal.pause()")
    with pytest.raises(PerftestFailed, match=r"more than 0\.5 s"):
        await run(program, "tag_bw", 64, 10)
    assert not [child for child in psutil.Process().children() if child.is_running()]


async def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PerftestFailed, match="No such file"):
        await run(Program(tmp_path / "gone", None), "tag_bw", 64, 10)


@pytest.mark.net
@pytest.mark.skipif(find_program() is None, reason="libucx is not installed")
async def test_the_real_program_gives_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "UCX_TLS", "tcp")
    program = find_program()
    assert program is not None
    limit = Perftest(program)
    seconds = await limit.sample("read", Case(1 << 20, 1))
    assert limit.note == ""
    assert seconds is not None
    assert seconds > 0
