"""Mooncake Store as a page store: a real master, a process that lends memory, a client here.

The client lends no memory, so that every page crosses between two processes, over Mooncake's tcp.
Its zero-copy batch calls are used on registered buffers; keys are hexadecimal, as it wants text.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import sys
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.store.subject import Pages

START_S = 30.0
POLL_S = 0.1
HOST = "127.0.0.1"
LENDER_BUFFER_NBYTES = 16 << 20


def open_store(master: str, *, segment_nbytes: int, buffer_nbytes: int) -> Any:
    """A connected ``MooncakeDistributedStore``.

    Raises:
        RuntimeError: the master refused.
    """
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", segment_nbytes, buffer_nbytes, "tcp", "", master)
    if code != 0:
        raise RuntimeError(f"Mooncake's setup answered {code}")
    return store


class MooncakeRival:
    """``Subject`` over Mooncake's Python binding. It verifies nothing on a get."""

    name = "Mooncake tcp"

    def __init__(self, page_nbytes: int, batch: int, segment_nbytes: int) -> None:
        nbytes = page_nbytes * batch
        self._segment_nbytes = segment_nbytes
        self._pages = Pages(np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8), page_nbytes)

    @staticmethod
    def missing() -> str | None:
        """Why it cannot be measured here, or None."""
        if importlib.util.find_spec("mooncake") is None or _master_program() is None:
            return "pip install mooncake-transfer-engine-non-cuda (and Debian's libraries for it)"
        return None

    def pages(self) -> Pages:
        return self._pages

    async def start(self) -> None:
        program = _master_program()
        assert program is not None, "missing() says so"
        port = _free_port()
        self._master = await asyncio.create_subprocess_exec(
            *(program, f"--rpc_port={port}", f"--rpc_address={HOST}"),
            *(f"--metrics_port={_free_port()}",),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await _until_open(port)
        master = f"{HOST}:{port}"
        self._lender = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.store.mooncake", master),
            str(self._segment_nbytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._lender.stdout is not None
        async with asyncio.timeout(START_S):
            while (line := await self._lender.stdout.readline()) != b"lends\n":
                if not line:
                    raise RuntimeError("the process that lends memory to Mooncake ended")
        self._store = open_store(master, segment_nbytes=0, buffer_nbytes=64 << 20)
        for array in (self._pages.source, self._pages.into):
            code = self._store.register_buffer(array.ctypes.data, array.nbytes)
            assert code == 0, code

    async def put(self, keys: list[bytes]) -> None:
        self._check(self._store.batch_put_from(*self._arguments(keys, self._pages.source)), 0)

    async def get(self, keys: list[bytes]) -> None:
        got = self._store.batch_get_into(*self._arguments(keys, self._pages.into))
        self._check(got, self._pages.page_nbytes)

    async def match_s(self, keys: list[bytes]) -> float:
        """Seconds of one ``batch_is_exist`` of ``keys``, all of which are there."""
        names = [key.hex() for key in keys]
        started_s = perf_counter()
        found = self._store.batch_is_exist(names)
        taken_s = perf_counter() - started_s
        self._check(found, 1)
        return taken_s

    async def clear(self) -> None:
        self._store.remove_all()

    async def close(self) -> None:
        self._store.close()
        assert self._lender.stdin is not None
        self._lender.stdin.close()
        await self._lender.wait()
        self._master.terminate()
        await self._master.wait()

    def _arguments(self, keys: list[bytes], array: Any) -> tuple[list[str], list[int], list[int]]:
        nbytes = self._pages.page_nbytes
        places = [array.ctypes.data + i * nbytes for i in range(len(keys))]
        return [key.hex() for key in keys], places, [nbytes] * len(keys)

    def _check(self, codes: list[int], wanted: int) -> None:
        if any(code != wanted for code in codes):
            raise RuntimeError(f"Mooncake answered {set(codes)}, not {wanted}")


def _master_program() -> str | None:
    from pathlib import Path

    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def _until_open(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except OSError:
                await asyncio.sleep(POLL_S)
                continue
            writer.close()
            return


def _lend(master: str, segment_nbytes: int) -> None:
    store = open_store(master, segment_nbytes=segment_nbytes, buffer_nbytes=LENDER_BUFFER_NBYTES)
    print("lends", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    _lend(sys.argv[1], int(sys.argv[2]))
