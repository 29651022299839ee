"""Redis as a page store: ``redis-server`` in a process of its own, over a unix socket."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.store.resp import RespClient
from benchmarks.store.subject import Pages

START_S = 20.0
POLL_S = 0.02


class RedisStore:
    """``Subject`` over a zero-copy client. Redis keeps no checksums: a get verifies nothing."""

    name = "Redis unix socket"

    def __init__(self, page_nbytes: int, batch: int) -> None:
        nbytes = page_nbytes * batch
        self._pages = Pages(np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8), page_nbytes)

    @staticmethod
    def missing() -> str | None:
        """Why it cannot be measured here, or None."""
        if shutil.which("redis-server") is None:
            return "no redis-server found: apt-get install redis-server"
        return None

    def pages(self) -> Pages:
        return self._pages

    async def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "redis.sock")
        self._process = await asyncio.create_subprocess_exec(
            *("redis-server", "--port", "0", "--unixsocket", path, "--save", ""),
            *("--appendonly", "no", "--dir", self._folder.name, "--loglevel", "warning"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(START_S):
            while not os.path.exists(path):  # noqa: ASYNC240 - one stat
                if self._process.returncode is not None:
                    raise RuntimeError(f"redis-server ended with {self._process.returncode}")
                await asyncio.sleep(POLL_S)
        self._client = RespClient(path)

    async def put(self, keys: list[bytes]) -> None:
        pages = self._pages
        items = [(key, pages.page(pages.source, i)) for i, key in enumerate(keys)]
        self._client.set_many(items)

    async def get(self, keys: list[bytes]) -> None:
        pages = self._pages
        self._client.get_many([(key, pages.page(pages.into, i)) for i, key in enumerate(keys)])

    async def clear(self) -> None:
        self._client.flush()

    async def close(self) -> None:
        self._client.close()
        self._process.terminate()
        await self._process.wait()
        self._folder.cleanup()
