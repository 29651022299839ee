"""The engine that a soak reads from and writes to: in this process, or in one of its own.

Run as ``python -m tests.transfer.soak_owner TRANSPORT NUM_ZONES`` it is the process: it prints the
token of the memory to read, then one for each zone to write, and obeys lines: ``renew I`` revokes
zone I and prints a token of a new region over the same memory, ``usage`` prints JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import psutil

from tests.transfer.bulk_harness import ROOT, pattern, shared_memory_files
from tests.transfer.soak_memory import ZONE_NBYTES
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.region import HostRegion

READ_NBYTES = 4 << 20
READ_SEED = 11
ANSWER = "answer: "  # libraries (UCX) log to stdout, too
SETTINGS = {  # small, so that operations are cut into many pieces, requests and windows
    "piece_nbytes": 32 << 10,
    "request_nbytes": 128 << 10,
    "window_nbytes": 512 << 10,
    "inline_copy_nbytes": 16 << 10,
}


class Usage(NamedTuple):
    """What a process holds. Threads of asyncio's own executor, which reads stdin, do not count."""

    rss_nbytes: int
    num_fds: int
    num_threads: int
    shm_files: list[str]


def own_usage() -> Usage:
    gc.collect()
    process = psutil.Process()
    return Usage(
        process.memory_info().rss,
        len(os.listdir("/proc/self/fd")),
        sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate()),
        shared_memory_files(),
    )


class Owner(Protocol):
    """Memory to read (``pattern(READ_NBYTES, READ_SEED)``) and zones to write."""

    @property
    def read_token(self) -> bytes: ...

    @property
    def zone_tokens(self) -> list[bytes]: ...

    async def renew(self, zone: int) -> None:
        """Revoke the zone's token, which ends whatever is still on its way, and take a new one."""
        ...

    async def usage(self) -> Usage: ...


class LocalOwner:
    """An owner on an engine of this process."""

    def __init__(self, engine: TransferEngine, num_zones: int) -> None:
        self._engine = engine
        self._read = engine.allocate(READ_NBYTES)
        self._read.view[:] = pattern(READ_NBYTES, READ_SEED).data
        self._memory = engine.allocate(num_zones * ZONE_NBYTES)
        self._zones = [self._register(zone) for zone in range(num_zones)]
        self.read_token = self._read.export("r")
        self.zone_tokens = [zone.export("rw") for zone in self._zones]

    def _register(self, zone: int) -> HostRegion:
        start = zone * ZONE_NBYTES
        region = self._engine.register(self._memory.view[start : start + ZONE_NBYTES])
        assert isinstance(region, HostRegion)
        return region

    async def renew(self, zone: int) -> None:
        self._zones[zone].revoke()
        self._zones[zone] = self._register(zone)
        self.zone_tokens[zone] = self._zones[zone].export("rw")

    async def usage(self) -> Usage:
        return own_usage()


class ProcessOwner:
    """An owner in a process of its own."""

    def __init__(self, transport: str, num_zones: int) -> None:
        self._arguments = [transport, str(num_zones)]
        self._num_zones = num_zones
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self.read_token = b""
        self.zone_tokens: list[bytes] = []

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.transfer.soak_owner", *self._arguments),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.read_token = bytes.fromhex(await self._line())
        self.zone_tokens = [bytes.fromhex(await self._line()) for _ in range(self._num_zones)]
        return self

    async def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := (await self._process.stdout.readline()).decode():
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        raise AssertionError("the owner's process has ended")

    async def _command(self, text: str) -> str:
        async with self._lock:
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(text.encode() + b"\n")
            return await self._line()

    async def renew(self, zone: int) -> None:
        self.zone_tokens[zone] = bytes.fromhex(await self._command(f"renew {zone}"))

    async def usage(self) -> Usage:
        return Usage(**json.loads(await self._command("usage")))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()  # the owner closes its engine and ends
        code = await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]
        assert code == 0 or error is not None, f"the owner's process ended with {code}"


def answer(text: str) -> None:
    print(ANSWER + text, flush=True)


async def main(transport: str, num_zones: int) -> None:
    engine = TransferEngine(TransferConfig.model_validate({"transport": transport, **SETTINGS}))
    await engine.start()
    owner = LocalOwner(engine, num_zones)
    for token in (owner.read_token, *owner.zone_tokens):
        answer(token.hex())
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if words[0] == "renew":
            await owner.renew(int(words[1]))
            answer(owner.zone_tokens[int(words[1])].hex())
        else:
            answer(json.dumps((await owner.usage())._asdict()))
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
