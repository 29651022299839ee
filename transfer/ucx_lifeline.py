"""The socket beside a ucx connection: how its ends meet, and whether the other one is still there.

Owns one tcp connection to the peer. On it both sides prove the cluster secret and tell how their
workers are reached (no UCX listener: it would accept anyone, on every address, and connecting to a
dead one takes seconds). It stays open for the life of the ucx connection, for what UCX alone does
not tell in time:

* the peer's process ended: the kernel closes the socket at once, whatever UCX uses for payload;
* the peer is frozen: it does not answer while something of it is awaited. A slow peer does: the
  answer is one byte, given by the peer's I/O thread, and does not queue behind payload;
* the peer closes in order: it says goodbye first.

::

    hello (tcp_handshake) ─▶ cards ─▶ open ──PING / PONG──▶ open ──GOODBYE, end of stream──▶ closed
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import msgspec

from transfer.errors import FrameInvalid, PeerClosed, PeerLost, TransferError
from transfer.tcp_codec import HEADER_NBYTES, Header, decode_header
from transfer.tcp_handshake import ClientHandshake, ServerHandshake
from transfer.tcp_sockets import lost
from transfer.ucx_codec import MAX_CARD_NBYTES, Card, decode_card

_LOG = logging.getLogger(__name__)

PING, PONG, GOODBYE = b"\x01", b"\x02", b"\x03"
MAX_SIGNALS = 4096  # read at a time; a peer that sends more is answered later
GOODBYE_LIMIT_S = 0.25
_CARD_NBYTES = struct.Struct("<I")


async def introduce_client(
    sock: socket.socket, handshake: ClientHandshake, make_card: Callable[[], Card], name: str
) -> Card:
    """Say who we are, check who is there, swap cards. The connecting side.

    On both sides, nothing of UCX is made for a peer before it has proven the secret.

    Raises:
        TransferError: the peer is not the one that was named, does not fit, or went away.
    """
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, handshake.first())
        while not handshake.ready:
            answer = handshake.receive(*await _receive_frame(sock, name))
            await loop.sock_sendall(sock, answer)
        return await _swap_cards(sock, make_card(), name)
    except OSError as error:
        raise lost(error, name) from error


async def introduce_server(
    sock: socket.socket, handshake: ServerHandshake, make_card: Callable[[], Card], name: str
) -> Card:
    """The accepting side.

    Raises:
        TransferError: as ``introduce_client``; to be reported to the peer.
    """
    loop = asyncio.get_running_loop()
    try:
        while not handshake.ready:
            answer = handshake.receive(*await _receive_frame(sock, name))
            await loop.sock_sendall(sock, answer)
        return await _swap_cards(sock, make_card(), name)
    except OSError as error:
        raise lost(error, name) from error


async def refuse(sock: socket.socket, answer: bytes) -> None:
    """Send ``answer`` and wait until the peer has hung up, so that it is not cut short."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        await loop.sock_sendall(sock, answer)
        while await loop.sock_recv(sock, MAX_SIGNALS):
            pass


async def _receive_frame(sock: socket.socket, name: str) -> tuple[Header, bytes]:
    header = decode_header(await _receive_exactly(sock, HEADER_NBYTES, name))
    return header, await _receive_exactly(sock, header.body_nbytes, name)


async def _swap_cards(sock: socket.socket, card: Card, name: str) -> Card:
    data = msgspec.msgpack.encode(card)
    assert len(data) <= MAX_CARD_NBYTES, f"a worker address of {len(card.address)} bytes"
    await asyncio.get_running_loop().sock_sendall(sock, _CARD_NBYTES.pack(len(data)) + data)
    (nbytes,) = _CARD_NBYTES.unpack(await _receive_exactly(sock, _CARD_NBYTES.size, name))
    if nbytes > MAX_CARD_NBYTES:
        raise FrameInvalid(f"a ucx card of {nbytes} bytes from {name}")
    return decode_card(await _receive_exactly(sock, nbytes, name), card.dialect)


async def _receive_exactly(sock: socket.socket, nbytes: int, name: str) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        some = await loop.sock_recv(sock, nbytes - len(data))
        if not some:
            raise PeerLost(f"{name} hung up during the hello")
        data += some
    return data


class Lifeline:
    """The open socket. Calls ``on_end(error)`` once, when the peer is gone."""

    def __init__(
        self, sock: socket.socket, name: str, on_end: Callable[[TransferError], None]
    ) -> None:
        self.name = name
        self.unanswered = 0  # pings since the peer last gave a sign of life
        self.finishing = False
        self._sock = sock
        self._on_end = on_end
        self._goodbye = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock, self.look)

    def ping(self) -> None:
        self.unanswered += 1
        self._signal(PING)

    def look(self) -> None:
        """Read what the peer has signalled; ends the connection if it is gone."""
        while not self._closed:
            try:
                signals = self._sock.recv(MAX_SIGNALS)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(lost(error, self.name))
                return
            self._on_signals(signals)

    def _on_signals(self, signals: bytes) -> None:
        if not signals:
            self._end(PeerLost(f"{self.name} is gone without a goodbye"))
            return
        self.unanswered = 0
        if GOODBYE in signals:
            self._goodbye = True
            self._end(PeerClosed(f"{self.name} closed in order"))
        elif PING in signals:
            self._signal(PONG)

    def _signal(self, signal: bytes) -> None:
        """Send one byte; a peer that does not read its signals does not get more of them."""
        if not self._closed:
            try:
                self._sock.send(signal)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._end(lost(error, self.name))

    def _end(self, error: TransferError) -> None:
        if not self._closed:
            self._on_end(error)
            assert self._closed, "the owner of the lifeline lets go of it"

    async def say_goodbye(self) -> None:
        """Tell the peer, and wait until it has hung up; at most ``GOODBYE_LIMIT_S``."""
        self.finishing = True
        self._signal(GOODBYE)
        try:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                await self._ended
        except TimeoutError:
            _LOG.info("%s did not take the goodbye in time", self.name)

    def let_go(self) -> socket.socket:
        """Stop using the socket and return it; whoever asked hangs up."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        if not self._ended.done():
            self._ended.set_result(None)
        return self._sock
