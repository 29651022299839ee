"""``ucx_perftest``, which UCX ships: what its own tagged messages reach here. The limit of ucx.

Owns finding the program, one server and one client process for each figure, and what their output
means. The client connects over 127.0.0.1; the program itself offers no choice of the address that
its server binds, so it listens for less than a second, and only here. Both get this process's
environment: ``UCX_TLS`` and ``UCX_NET_DEVICES`` mean the same as for the transport.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from launch.doctor.grid import MIB, Case
from launch.ports import free_port

HOST = "127.0.0.1"
TIMEOUT_S = 30.0  # of one figure
CONNECT_TRIES_MAX = 100
CONNECT_RETRY_S = 0.05  # the server says that it listens into a buffer: trying is how to know
REFUSED = "Connection refused"
SAMPLE_NBYTES = 64 * MIB  # messages are repeated until so much has moved
MESSAGES_MIN, MESSAGES_MAX = 16, 10_000
LATENCY_MESSAGES = 1000

Test = Literal["tag_bw", "tag_lat"]


class PerftestFailed(Exception):
    """The program is missing, failed, or took too long; the message says which."""


class Program(NamedTuple):
    """The program, and where its libraries are when they are not the system's."""

    path: Path
    library_dir: Path | None

    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.library_dir is not None:
            before = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(self.library_dir), before]))
        return environment


def find_program() -> Program | None:
    """Return the program of the Python package ``libucx``, else that of PATH, else None."""
    spec = importlib.util.find_spec("libucx")
    if spec is not None and spec.origin is not None:
        root = Path(spec.origin).parent
        path = root / "bin" / "ucx_perftest"
        if os.access(path, os.X_OK):
            return Program(path, root / "lib")
    found = shutil.which("ucx_perftest")
    return Program(Path(found), None) if found else None


def arguments(test: Test, nbytes: int, messages: int) -> list[str]:
    """Return the client's arguments: final numbers only, as CSV."""
    count = ["-n", str(messages), "-w", str(max(1, messages // 10))]
    return [HOST, "-t", test, "-s", str(nbytes), *count, "-f", "-v"]


def num_messages(case: Case) -> int:
    """Return how many messages of a page make a steady figure in bounded time."""
    wanted = max(case.batch, SAMPLE_NBYTES // case.page_nbytes)
    return max(MESSAGES_MIN, min(MESSAGES_MAX, wanted))


def seconds_per_message(output: str, test: Test) -> float:
    """Return the seconds of one message: of all of them together, or a latency's median.

    Raises:
        PerftestFailed: the output is not what this version of the parser knows.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    heads = [i for i, line in enumerate(lines) if line.startswith("iterations,")]
    if not heads or heads[-1] + 1 >= len(lines):
        raise PerftestFailed(f"ucx_perftest printed no figures: {_last_line(output)}")
    names, values = lines[heads[-1]].split(","), lines[heads[-1] + 1].split(",")
    wanted = "overall_lat" if test == "tag_bw" else "50.0_percentile_lat"
    try:
        microseconds = float(dict(zip(names, values, strict=True))[wanted])
    except (KeyError, ValueError) as error:
        raise PerftestFailed(f"ucx_perftest printed no {wanted}: {lines[heads[-1]]}") from error
    if microseconds <= 0:
        raise PerftestFailed(f"ucx_perftest says {wanted} is {microseconds}")
    return microseconds / 1e6


async def run(program: Program, test: Test, nbytes: int, messages: int) -> float:
    """Return the seconds of one message between two new processes of this machine.

    No process outlives it, also when cancelled.

    Raises:
        PerftestFailed: it failed, or took longer than ``TIMEOUT_S``.
    """
    port = ["-p", str(free_port(HOST))]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            server = await _start(program, port)
            try:
                return await _client(program, test, [*arguments(test, nbytes, messages), *port])
            finally:
                await _end(server)
    except TimeoutError:
        raise PerftestFailed(f"ucx_perftest took more than {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise PerftestFailed(f"{program.path}: {error.strerror}") from error


async def _client(program: Program, test: Test, argv: Sequence[str]) -> float:
    for _ in range(CONNECT_TRIES_MAX):
        client = await _start(program, argv)
        try:
            output = (await client.communicate())[0].decode(errors="replace")
        finally:
            await _end(client)
        if client.returncode == 0:
            return seconds_per_message(output, test)
        if REFUSED not in output:
            raise PerftestFailed(f"ucx_perftest failed: {_last_line(output)}")
        await asyncio.sleep(CONNECT_RETRY_S)
    raise PerftestFailed("the server of ucx_perftest never listened")


async def _start(program: Program, argv: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        program.path,
        *argv,
        env=program.environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the doctor, which ends it
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process if it still runs, and release its pipe."""
    if process.returncode is None:
        process.kill()
    await process.communicate()


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1].strip() if lines else "no output"
