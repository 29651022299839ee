"""Engines for the bulk tests: checked for leaks, or run in a process of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.interface import Range, deadline_after
from transfer.region import HostRegion

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def pattern(nbytes: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that no shift, swap or repetition leaves unchanged."""
    period = 65_521  # prime: no power-of-two shift maps it onto itself
    some = np.random.default_rng(seed).integers(0, 256, min(nbytes, period), dtype=np.uint8)
    return np.resize(some, nbytes)


def ones(region: HostRegion) -> None:
    """Fill a region with ones."""
    np.frombuffer(region.view, np.uint8).fill(1)


def snapshot(region: HostRegion) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array(np.frombuffer(region.view, np.uint8))


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until ``condition`` holds; memory that others write has no event."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def soon() -> float:
    return deadline_after(20.0)


def whole(nbytes: int) -> list[Range]:
    return [Range(0, 0, nbytes)]


def shared_memory_files() -> list[str]:
    return sorted(os.listdir("/dev/shm"))


def kvferry_sockets() -> list[str]:
    """Abstract unix sockets of all engines on this host."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.rpartition("@")[2] for line in lines if "@kvferry/" in line]


def open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sorted(found)


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kvferry")]


class Engines:
    """Makes engines of one transport and closes them all."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._made: list[TransferEngine] = []

    async def make(self, **settings: Any) -> TransferEngine:
        engine = self.unstarted(**settings)
        await engine.start()
        return engine

    def unstarted(self, **settings: Any) -> TransferEngine:
        """Return an engine that ``close`` closes, but that the test starts."""
        engine = TransferEngine(TransferConfig(**{"transport": self.transport, **settings}))
        self._made.append(engine)
        return engine

    async def close(self) -> None:
        for engine in self._made:
            await engine.close()


@asynccontextmanager
async def checked_engines(transport: str) -> AsyncIterator[Engines]:
    """Yield a factory; afterwards no thread and no socket may be left.

    Every engine of a test must come from the factory: one that lives on would still hold its end of
    a connection whose other end was just closed, for as long as its I/O thread takes to notice.
    Shared memory lives as long as somebody holds a view of it; ``test_shm`` checks that it goes.
    """
    threads, files = engine_threads(), open_files()
    engines = Engines(transport)
    try:
        yield engines
    finally:
        await engines.close()
    assert engine_threads() == threads
    left = [name for name in open_files() if name not in files]
    assert not [name for name in left if "memfd" not in name], left


class PeerProcess:
    """An engine in another process, with one region full of ``pattern(nbytes, seed=7)``."""

    def __init__(self, transport: str, nbytes: int, *options: str) -> None:
        self._arguments = (transport, str(nbytes), *options)
        self._process: asyncio.subprocess.Process | None = None
        self.token = b""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.transfer.bulk_peer",
            *self._arguments,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.token = bytes.fromhex(await self.line())
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        data = await self._process.stdout.readline()
        assert data, "the peer process ended early"
        return data.decode().strip()

    async def command(self, text: str) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        return await self.line()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped: the signal alone takes its time."""
        self.signal(signal.SIGSTOP)
        stats = Path(f"/proc/{self.pid}/task")
        await until(
            lambda: all(
                (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                for task in stats.iterdir()
            )
        )

    async def kill(self) -> None:
        assert self._process is not None
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            await self.kill()
        transport = self._process._transport  # type: ignore[attr-defined]
        transport.close()
