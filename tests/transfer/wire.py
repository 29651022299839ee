"""A tcp wire that can be stalled, cut and left half-open, between a user and an owner.

Owns a listener and, for each connection, the two directions between it and the real address. Knows
no frames. Runs on the loop of the test.

::

    user ──▶ wire.address ──▶ owner's address
             stall(): bytes of both directions wait      resume(): and go on
             cut():   both sides are reset               lose_owner(): only the owner's side is
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from transfer.tcp_sockets import join_address, split_address
from transfer.token import decode_token, encode_token

CHUNK_NBYTES = 64 * 1024


class Wire:
    """Carries every connection to the owner that ``token`` names."""

    def __init__(self, token: bytes) -> None:
        self._token = decode_token(token)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._owners: list[asyncio.StreamWriter] = []
        self._users: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self

    @property
    def token(self) -> bytes:
        """The token whose address is this wire's."""
        address = join_address(*self._server.sockets[0].getsockname())
        endpoint = replace(self._token.endpoint, tcp=address)
        return encode_token(replace(self._token, endpoint=endpoint))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        host, port = split_address(self._token.endpoint.tcp)
        self._users.append(writer)
        there, back = await asyncio.open_connection(host, port)
        self._owners.append(back)
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.get_running_loop().create_task(self._pump(source, target))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK_NBYTES):
                await self._flowing.wait()
                target.write(data)
                await target.drain()
        except ConnectionError:
            return
        if target not in self._users:
            target.close()

    def stall(self) -> None:
        """Let nothing more through; the sockets stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Reset both sides of every connection."""
        self.lose_owner()
        for writer in self._users:
            writer.transport.abort()
        self._users.clear()

    def lose_owner(self) -> None:
        """Reset the owner's side of every connection; the user's side stays open and silent."""
        for writer in self._owners:
            writer.transport.abort()
        self._owners.clear()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
