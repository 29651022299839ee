"""The wire itself: one plain blocking TCP stream between two processes, the limit of the rest."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection

import numpy as np

from benchmarks.store.subject import Pages
from launch.doctor.plain_socket import PlainSocket, PlainSocketServer


class PlainStream:
    """``Subject``-like: a put sends the batch, a get fetches it. Keeps no keys."""

    name = "plain TCP stream"

    def __init__(self, page_nbytes: int, batch: int) -> None:
        self._nbytes = page_nbytes * batch
        self._pages = Pages(
            np.zeros(self._nbytes, np.uint8), np.zeros(self._nbytes, np.uint8), page_nbytes
        )

    def pages(self) -> Pages:
        return self._pages

    async def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._nbytes))
        self._process.start()
        port, key = await asyncio.to_thread(self._pipe.recv)
        self._socket = PlainSocket("127.0.0.1", port, key)

    async def put(self, keys: list[bytes]) -> None:
        nbytes = len(keys) * self._pages.page_nbytes
        self._socket.exchange("write", memoryview(self._pages.source)[:nbytes])

    async def get(self, keys: list[bytes]) -> None:
        nbytes = len(keys) * self._pages.page_nbytes
        self._socket.exchange("read", memoryview(self._pages.into)[:nbytes])

    async def clear(self) -> None:
        """It keeps nothing."""

    async def close(self) -> None:
        self._socket.close()
        self._pipe.send(None)
        await asyncio.to_thread(self._process.join)


def _serve(pipe: multiprocessing.connection.Connection, nbytes: int) -> None:
    server = PlainSocketServer("127.0.0.1", memoryview(bytearray(nbytes)))
    pipe.send((server.port, server.key))
    pipe.recv()  # the end
    server.close()
