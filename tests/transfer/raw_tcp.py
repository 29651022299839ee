"""Both ends of a bulk tcp connection by hand: a client and a server that may say anything."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from transfer.engine import TransferEngine
from transfer.region import HostRegion
from transfer.tcp_codec import (
    HEADER_NBYTES,
    Header,
    Op,
    RequestBody,
    control_frame,
    decode_header,
    pack_spans,
)
from transfer.tcp_handshake import ClientHandshake, ServerHandshake
from transfer.tcp_sockets import split_address
from transfer.token import TOKEN_VERSION, Endpoint, Token, decode_token, encode_token

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close() resets


def request_frame(op: Op, token: bytes, spans: list[tuple[int, int]], request_id: int = 1) -> bytes:
    known = decode_token(token)
    body = RequestBody(known.region_id, known.capability, pack_spans(spans))
    return control_frame(op, request_id, body)


class RawClient:
    """A connection to an engine's tcp port, without any rule."""

    def __init__(self, engine: TransferEngine, *, receive_nbytes: int | None = None) -> None:
        self._address = split_address(engine.address)
        self._incarnation = engine.incarnation
        self._receive_nbytes = receive_nbytes
        self.sock = socket.socket()

    async def __aenter__(self) -> Self:
        if self._receive_nbytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_nbytes)
        self.sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self.sock, self._address)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.sock.close()

    async def send(self, data: bytes) -> None:
        """Send all, or as much as a peer that hangs up takes."""
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def frame(self) -> tuple[Header, bytes]:
        header = decode_header(await self._exactly(HEADER_NBYTES))
        return header, await self._exactly(header.body_nbytes)

    async def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await asyncio.get_running_loop().sock_recv(self.sock, count - len(data))
            if not part:
                raise ConnectionResetError("the engine hung up")
            data += part
        return data

    async def hello(self, secret: bytes = b"") -> None:
        handshake = ClientHandshake(secret, "raw", self._incarnation, b"n" * 16)
        await self.send(handshake.first())
        while not handshake.ready:
            await self.send(handshake.receive(*await self.frame()))

    async def until_cut_off(self) -> bytes:
        """Return what the engine says until it hangs up."""
        heard = b""
        with suppress(ConnectionError):
            while part := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16):
                heard += part
        return heard

    def end_sending(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()


Reply = Callable[["RawServer", asyncio.StreamWriter, Header, bytes], Awaitable[None]]
INCARNATION = "raw-server"


class RawServer:
    """Listens, shakes hands as an engine would, and leaves every request to ``reply``."""

    def __init__(self, reply: Reply, *, secret: bytes = b"", greeting: bytes | None = None) -> None:
        """``greeting`` takes the place of the handshake: it is sent instead, at once."""
        self._reply = reply
        self._secret = secret
        self._greeting = greeting
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Hang up on everybody: what nobody answers any more must not stay open."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    def token(self, nbytes: int) -> bytes:
        """Return a token for a region of this server."""
        endpoint = Endpoint(INCARNATION, "elsewhere", "elsewhere", tcp=f"127.0.0.1:{self.port}")
        return encode_token(Token(TOKEN_VERSION, endpoint, 1 << 16, nbytes, "rw", b"c" * 16, False))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._converse(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = ServerHandshake(self._secret, INCARNATION, b"s" * 16)
        if self._greeting is not None:
            writer.write(self._greeting)
            await reader.read()  # until the engine has had enough of it
            return
        while True:
            header = decode_header(await reader.readexactly(HEADER_NBYTES))
            body = await reader.readexactly(header.body_nbytes)
            if handshake.ready:
                await self._reply(self, writer, header, body)
            else:
                writer.write(handshake.receive(header, body))


def lend(engine: TransferEngine, nbytes: int, fill: int) -> HostRegion:
    """Return a region full of ``fill``."""
    region = engine.allocate(nbytes)
    region.view[:] = bytes([fill]) * nbytes
    return region
