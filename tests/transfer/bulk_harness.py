"""Engines for the bulk tests: checked for leaks, or run in a process of their own."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.interface import Range, deadline_after
from transfer.region import HostRegion

MIB = 1 << 20
POLL_S = 0.001
LIMIT_S = 20.0  # for anything that has to happen
QUIET_LIMIT_S = 5.0  # for what the other end of a connection closes on its own thread
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
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def until_none(found: Callable[[], list[str]], what: str) -> None:
    """Let the loop run until ``found`` has nothing to name; AssertionError with what it has."""
    with suppress(TimeoutError):
        async with asyncio.timeout(QUIET_LIMIT_S):
            while found():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    assert not (left := found()), f"{what} after {QUIET_LIMIT_S} s: {left}"


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """Make ``gc.collect`` look only at what the body creates: it is asked again and again there."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def until_freed(*memory: weakref.ref[Any]) -> None:
    """Wait until nobody holds what the references name. Reference cycles do not count."""

    def is_free() -> bool:
        gc.collect()
        return all(ref() is None for ref in memory)

    await until(is_free)


def soon() -> float:
    return deadline_after(LIMIT_S)


def whole(nbytes: int) -> list[Range]:
    return [Range(0, 0, nbytes)]


def shared_memory_files() -> list[str]:
    """Named shared memory that this process holds or that nobody holds: not that of others.

    Tests of other processes come and go meanwhile, with memory of their own.
    """
    names = set(os.listdir("/dev/shm"))
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
    return sorted(names.difference(*map(_held_shared_memory, others))) if names else []


def _held_shared_memory(pid: str) -> set[str]:
    """Named shared memory that a process has open or mapped; empty if it is gone."""
    root = Path(f"/proc/{pid}")
    held: list[str] = []
    with suppress(OSError):
        held += (root / "maps").read_text().splitlines()
    with suppress(OSError):
        for fd in os.listdir(root / "fd"):
            with suppress(OSError):
                held.append(os.readlink(root / "fd" / fd))
    return {line.partition("/dev/shm/")[2] for line in held if "/dev/shm/" in line}


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


def mapped_shared_memory() -> list[str]:
    """Named shared memory that this process maps; memfds have no name and go with their views."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line})


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

    def lent(self) -> list[str]:
        """Answers by reference of engines that run, which no peer has said to have taken."""
        running = [engine for engine in self._made if engine.is_healthy]
        return [
            name for engine in running for name in (*_lent_regions(engine), *_lent_reads(engine))
        ]

    async def close(self) -> None:
        for engine in self._made:
            await engine.close()


def _lent_regions(engine: TransferEngine) -> Iterator[str]:
    for region in list(engine._regions._regions.values()):
        if isinstance(region, HostRegion) and region.loans.num_out:
            yield f"region {region.region_id}, {region.loans.num_out} times"


def _lent_reads(engine: TransferEngine) -> Iterator[str]:
    """Those of revoked regions, too."""
    served = [] if engine._tcp is None else list(engine._tcp._server._links)
    for link in served:
        for request_id, lent in (*link._lending.items(), *link._lent.items()):
            if lent.is_out:
                yield f"read {request_id} of {link.link.name}"


class Leftovers:
    """What this process holds now that ``before`` did not: threads, descriptors, named memory."""

    def __init__(self) -> None:
        self._before = self._held()

    @staticmethod
    def _held() -> Counter[str]:
        files = [name for name in open_files() if "memfd" not in name]
        return Counter([*engine_threads(), *files, *mapped_shared_memory()])

    def found(self) -> list[str]:
        return sorted((self._held() - self._before).elements())

    async def none_left(self) -> None:
        """Wait until nothing is left; AssertionError with the names of what is."""
        await until_none(self.found, "left behind")


_OPENED_BEFORE: set[str] = set()


async def open_once(transport: str) -> None:
    """Start and stop an engine, the first time: what a transport's library opens for the life of
    the process (UCX: its event thread) is then there before anything is counted."""
    if transport not in _OPENED_BEFORE:
        _OPENED_BEFORE.add(transport)
        engine = TransferEngine(TransferConfig(transport=transport))
        await engine.start()
        await engine.close()


@asynccontextmanager
async def checked_engines(transport: str) -> AsyncIterator[Engines]:
    """Yield a factory; afterwards no thread, no socket and no named shared memory may be left.
    Nor may an engine that still runs wait for word of what it has lent: its peers have received
    everything, or are gone.

    Every engine of a test comes from the factory. The far end of a connection notices on its own
    I/O thread that it was closed, so what is left is asked for again until ``QUIET_LIMIT_S``.
    Memfds live as long as somebody holds a view of them; ``test_shm`` checks that they go.
    """
    await open_once(transport)
    leftovers = Leftovers()
    engines = Engines(transport)
    try:
        yield engines
        await until_none(engines.lent, "lent")
    finally:
        await engines.close()
    await leftovers.none_left()


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

    async def order(self, text: str) -> None:
        """Send a command; ``line`` returns the answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        await self._process.stdin.drain()

    async def command(self, text: str) -> str:
        await self.order(text)
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
