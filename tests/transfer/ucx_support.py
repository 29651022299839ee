"""What the tests of ucx share: whether it is there, and a peer that says what it likes."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Self

import pytest

from tests.transfer.bulk_harness import LIMIT_S, POLL_S
from transfer.tcp_handshake import NONCE_NBYTES, ClientHandshake
from transfer.tcp_sockets import split_address
from transfer.token import Endpoint
from transfer.ucx_binding import Context, Flight, Worker, installed_binding, open_context
from transfer.ucx_codec import KEY_BITS, UCX_PROTOCOL_VERSION, Card, Control, Tag, decode_control
from transfer.ucx_codec import encode_control as encode
from transfer.ucx_lifeline import introduce_client

NEEDS_UCX = pytest.mark.skipif(
    installed_binding() is None, reason="needs UCX: pip install 'ucxx-cu12>=0.40'"
)


class RawPeer:
    """Has met an owner in order; from then on it sends what a test wants."""

    def __init__(self, sock: socket.socket, context: Context, worker: Worker, peer: Card) -> None:
        self.sock = sock
        self.key = peer.key
        self._context = context
        self._worker = worker

    @classmethod
    async def meet(cls, endpoint: Endpoint) -> Self:
        context = open_context(only_this_host=True)
        worker = context.open_worker()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(sock, split_address(endpoint.ucx))
        nonce = secrets.token_bytes(NONCE_NBYTES)
        handshake = ClientHandshake(b"", "raw", endpoint.incarnation, nonce)
        own = secrets.randbits(KEY_BITS)
        card = Card(UCX_PROTOCOL_VERSION, context.dialect, own, worker.address)
        peer = await introduce_client(sock, handshake, lambda: card, "the owner")
        worker.connect(peer.address)
        return cls(sock, context, worker, peer)

    def send(self, data: bytes, request: int = 0, piece: int = 0, key: int | None = None) -> Flight:
        tag = Tag(self.key if key is None else key, request, piece)
        return self._worker.send(data, tag.pack())

    def say(self, message: Control) -> Flight:
        return self.send(encode(message))

    async def hear(self) -> tuple[Tag, bytes]:
        """Return the next message."""
        async with asyncio.timeout(LIMIT_S):
            while (message := self._worker.probe()) is None:
                self._worker.progress()
                await asyncio.sleep(POLL_S)
        data = bytearray(message.nbytes)
        await self.settled(self._worker.receive(message, data))
        tag = message.tag
        return Tag(tag >> 32, tag >> 16 & 0xFFFF, tag & 0xFFFF), bytes(data)

    async def answer(self) -> Control:
        """Return the next control message."""
        tag, data = await self.hear()
        assert tag.request == 0, tag
        return decode_control(data)

    async def settled(self, flight: Flight) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not flight.completed:
                self._worker.progress()
                await asyncio.sleep(POLL_S)

    async def hung_up(self) -> None:
        """Wait until the owner has ended the connection."""
        async with asyncio.timeout(LIMIT_S):
            while self._is_connected():
                self._worker.progress()
                await asyncio.sleep(POLL_S)

    def _is_connected(self) -> bool:
        try:
            return bool(self.sock.recv(4096))
        except BlockingIOError:
            return True

    def close(self) -> None:
        self.sock.close()
        assert self._worker.break_off()
        self._worker.close()
        self._context.close()
