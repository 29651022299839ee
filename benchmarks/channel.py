"""Control channels over ZeroMQ between two processes: how long a request takes, and what it costs.

    python -m benchmarks.channel [--loop uvloop|asyncio] [--requests 3000]

Three rows: small requests one after the other; the same with 64 under way; and requests of 256 KiB,
as long as a ``match`` of 8192 keys. CPU time is that of whole processes, ZeroMQ's threads included,
so it hardly depends on what else the machine does; the times do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvloop

from benchmarks.machine import describe
from transfer.channel import Caller, Channel, Hello, Service
from transfer.identity import Role, new_identity
from transfer.zmq_network import ZmqNetwork

WARM_UP = 300
IN_FLIGHT = 64
LONG_NBYTES = 256 << 10
DEADLINE_S = 60.0


class Ask(msgspec.Struct, frozen=True, tag="bench.ask"):
    payload: bytes = b""
    answer_nbytes: int = 0


class Told(msgspec.Struct, frozen=True, tag="bench.told"):
    payload: bytes = b""


class Cpu(msgspec.Struct, frozen=True, tag="bench.cpu"):
    """Asks for the CPU time of the process so far, in seconds."""


class CpuTold(msgspec.Struct, frozen=True, tag="bench.cpu_told"):
    cpu_s: float


async def _tell(message: Ask, _: Caller) -> Told:
    return Told(bytes(message.answer_nbytes))


async def _cpu(_message: Cpu, _caller: Caller) -> CpuTold:
    return CpuTold(time.process_time())


async def serve() -> None:
    """Print the address; answer until standard input closes."""
    network = ZmqNetwork()
    service = Service()
    service.on(Ask, _tell)
    service.on(Cpu, _cpu)
    listener = await network.listen(
        service, Hello(identity=new_identity(Role.STORE)), "tcp://127.0.0.1:0"
    )
    print(listener.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await network.close()


def _soon() -> float:
    return asyncio.get_running_loop().time() + DEADLINE_S


async def _one_by_one(channel: Channel, message: Ask, count: int) -> list[float]:
    """Send ``count`` requests; return the seconds that each has taken."""
    times = []
    for _ in range(count):
        started_s = time.perf_counter()
        await channel.request(message, Told, deadline_s=_soon())
        times.append(time.perf_counter() - started_s)
    return times


async def _together(channel: Channel, message: Ask, count: int) -> list[float]:
    each = [_one_by_one(channel, message, count // IN_FLIGHT) for _ in range(IN_FLIGHT)]
    return [time_s for times in await asyncio.gather(*each) for time_s in times]


async def _row(name: str, channel: Channel, work: Callable[[], Awaitable[list[float]]]) -> None:
    theirs_s = (await channel.request(Cpu(), CpuTold, deadline_s=_soon())).cpu_s
    ours_s, started_s = time.process_time(), time.perf_counter()
    times = sorted(await work())
    wall_s, ours_s = time.perf_counter() - started_s, time.process_time() - ours_s
    theirs_s = (await channel.request(Cpu(), CpuTold, deadline_s=_soon())).cpu_s - theirs_s
    count = len(times)
    p50_us, p99_us = (times[count * percent // 100] * 1e6 for percent in (50, 99))
    print(
        f"{name:22} p50 {p50_us:6.0f} us   p99 {p99_us:6.0f} us   {count / wall_s:7.0f} /s   "
        f"CPU per request: caller {ours_s / count * 1e6:5.1f} us, "
        f"server {theirs_s / count * 1e6:5.1f} us"
    )


async def measure(address: str, num_requests: int) -> None:
    network = ZmqNetwork()
    hello = Hello(identity=new_identity(Role.OBSERVER))
    channel = await network.connect(address, hello, deadline_s=_soon())
    small, long = Ask(), Ask(os.urandom(LONG_NBYTES), LONG_NBYTES // 32)
    await _one_by_one(channel, small, WARM_UP)
    await _row("one by one", channel, lambda: _one_by_one(channel, small, num_requests))
    await _row("64 under way", channel, lambda: _together(channel, small, 4 * num_requests))
    await _row(
        "256 KiB, one by one", channel, lambda: _one_by_one(channel, long, num_requests // 8)
    )
    await network.close()


def run(work: Any, loop: str) -> None:
    if loop == "uvloop":
        uvloop.run(work)
    else:
        asyncio.run(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run(serve(), args.loop)
        return
    command = (sys.executable, "-m", "benchmarks.channel", "--serve", "--loop", args.loop)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            print(f"{describe()}, {args.loop}")
            run(measure(server.stdout.readline().strip(), args.requests), args.loop)
        finally:
            server.stdin.close()


if __name__ == "__main__":
    main()
