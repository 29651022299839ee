"""The side of shm that maps a peer's memory: one connection to one owner, and what it granted.

Owns the mappings. The connection lives on the I/O loop; a ``Grant`` is used from copy threads. A
grant may be used while the owner lives (``alive``), is open (control word 0) and has not revoked
the region (its control word): ``ShmAccess`` checks all three around each piece.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import socket
from typing import NamedTuple

from transfer.copier import Access
from transfer.error_codes import error_of
from transfer.errors import (
    FrameInvalid,
    PeerLost,
    PeerUnreachable,
    RegionRevoked,
    Stale,
    TransferError,
)
from transfer.shm_memory import ControlView, EngineState, gone_error, use_huge_pages
from transfer.shm_wire import (
    SHM_PROTOCOL_VERSION,
    HelloPacket,
    MapPacket,
    Packet,
    PlacePacket,
    RefusalPacket,
    WelcomePacket,
    is_same_user,
    receive_packet,
    send_packet,
)


class ShmUnavailable(PeerUnreachable):
    """No owner that can share memory with us answers at the address; tcp may still reach it."""


class Grant(NamedTuple):
    """One mapped region, as one capability allows it."""

    region_id: int
    view: memoryview
    rights: str
    file_id: int


class ShmPeer:
    """A connection to one incarnation of one owner. Made by ``open_peer``."""

    def __init__(self, sock: socket.socket, control: ControlView) -> None:
        self._sock = sock
        self.control = control
        self.alive = True
        self._files: dict[int, memoryview] = {}
        self._grants: dict[tuple[int, bytes], Grant] = {}
        self._replies: dict[int, asyncio.Future[Grant]] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._on_readable)

    def known_grant(self, region_id: int, capability: bytes) -> Grant | None:
        """Return what is mapped already. Thread-safe."""
        return self._grants.get((region_id, capability))

    async def map(self, region_id: int, capability: bytes) -> Grant:
        """Ask the owner for a region. On the I/O loop."""
        if not self.alive:
            raise PeerLost("the owner of the shared memory is gone")
        number = next(self._numbers)
        reply: asyncio.Future[Grant] = self._loop.create_future()
        self._replies[number] = reply
        try:
            send_packet(self._sock, MapPacket(number, region_id, capability))
            grant = await reply
        except OSError as error:
            raise PeerLost(f"the owner of the shared memory is gone: {error}") from error
        finally:
            self._replies.pop(number, None)
        grant = grant._replace(region_id=region_id)
        self._grants[region_id, capability] = grant
        self._sweep()
        return grant

    def _sweep(self) -> None:
        """Unmap what its owner has revoked."""
        for key in [k for k in self._grants if not self.control.holds(k[0])]:
            del self._grants[key]
        used = {grant.file_id for grant in self._grants.values()}
        for file_id in [f for f in self._files if f not in used]:
            del self._files[file_id]

    def _on_readable(self) -> None:
        try:
            packet, fds = receive_packet(self._sock)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, FrameInvalid) as error:
            self.close(PeerLost(f"the owner of the shared memory is gone: {error}"))
            return
        try:
            if packet is None:
                self.close(self._gone())
            else:
                self._on_packet(packet, fds)
        finally:
            for fd in fds:
                os.close(fd)  # a mapping keeps the memory, not the descriptor

    def _on_packet(self, packet: Packet, fds: list[int]) -> None:
        number = packet.number if isinstance(packet, PlacePacket | RefusalPacket) else 0
        reply = self._replies.get(number)
        if reply is None or reply.done():
            return
        if isinstance(packet, RefusalPacket):
            reply.set_exception(
                error_of(packet.status, packet.text.encode())
                or FrameInvalid("refused with success")
            )
        elif isinstance(packet, PlacePacket) and fds:
            try:
                reply.set_result(self._place(packet, fds[0]))
            except (OSError, ValueError) as error:
                reply.set_exception(FrameInvalid(f"cannot map the owner's memory: {error}"))

    def _place(self, packet: PlacePacket, fd: int) -> Grant:
        whole = self._files.get(packet.file_id)
        if whole is None:
            mapped = mmap.mmap(fd, packet.file_nbytes)
            use_huge_pages(mapped, packet.file_nbytes)
            whole = memoryview(mapped)
            self._files[packet.file_id] = whole
        view = whole[packet.offset : packet.offset + packet.nbytes]
        if view.nbytes != packet.nbytes:
            raise ValueError("the place lies outside of its file")
        return Grant(0, view, packet.rights, packet.file_id)

    def _gone(self) -> TransferError:
        if self.control.state == EngineState.CLOSED:
            return gone_error(EngineState.CLOSED)
        return PeerLost("the owner of the shared memory is gone")

    def check(self, region_id: int) -> None:
        """Raise unless the region may be touched. Thread-safe."""
        state = self.control.state
        if state != EngineState.OPEN:
            raise gone_error(state)
        if not self.alive:
            raise PeerLost("the owner of the shared memory is gone")
        if not self.control.holds(region_id):
            raise RegionRevoked("the region was revoked by its owner")

    def close(self, error: TransferError) -> None:
        """On the I/O loop. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        self._grants.clear()
        self._files.clear()


class ShmAccess(Access):
    """Checks the owner's words before and after each piece."""

    def __init__(self, peer: ShmPeer, region_id: int) -> None:
        self._peer = peer
        self._region_id = region_id

    def enter(self) -> None:
        self._peer.check(self._region_id)

    def leave(self) -> None:
        self._peer.check(self._region_id)


async def open_peer(name: str, own_incarnation: str, expected: str) -> ShmPeer:
    """Connect to an owner and map its control page. On the I/O loop.

    Raises:
        ShmUnavailable: nobody, or another user, answers there, or there is no descriptor left.
        Stale: another incarnation answers.
    """
    loop = asyncio.get_running_loop()
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ShmUnavailable(f"no socket to share memory through: {error}") from error
    try:
        try:
            await loop.sock_connect(sock, "\0" + name)
            if not is_same_user(sock):
                raise ShmUnavailable(f"abstract socket {name!r} belongs to another user")
            send_packet(sock, HelloPacket(SHM_PROTOCOL_VERSION, own_incarnation))
            packet, fds = await _first_packet(loop, sock)
        except OSError as error:
            raise ShmUnavailable(f"nobody shares memory at {name!r}: {error}") from error
        try:
            return ShmPeer(sock, _accept_welcome(packet, fds, expected))
        finally:
            for fd in fds:
                os.close(fd)
    except BaseException:
        sock.close()
        raise


def _accept_welcome(packet: Packet | None, fds: list[int], expected: str) -> ControlView:
    if packet is None:
        raise ShmUnavailable("the owner of the shared memory hung up")
    if not isinstance(packet, WelcomePacket) or len(fds) != 1:
        raise FrameInvalid("no welcome from the owner of the shared memory")
    if packet.protocol != SHM_PROTOCOL_VERSION:
        raise ShmUnavailable(
            f"shm protocol versions differ: {SHM_PROTOCOL_VERSION} here, {packet.protocol} there"
        )
    if packet.incarnation != expected:
        raise Stale(
            f"the address answers as incarnation {packet.incarnation}, the token names "
            f"{expected}: the peer restarted"
        )
    try:
        return ControlView(fds[0])
    except (OSError, ValueError) as error:
        raise ShmUnavailable(f"cannot map the owner's control page: {error}") from error


async def _first_packet(
    loop: asyncio.AbstractEventLoop, sock: socket.socket
) -> tuple[Packet | None, list[int]]:
    readable: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, on_readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    return receive_packet(sock)
