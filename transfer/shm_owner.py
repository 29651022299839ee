"""The side of shm that owns memory: hands file descriptors to peers of the same user.

Owns the abstract unix socket and its connections. Runs on the I/O loop only. Once a peer has mapped
a region the owner takes no part (a stopped owner is still readable); it revokes through the control
page, and then tells the peers that they can unmap.

::

    accepted ──hello──▶ known ──map, map, ...──▶ gone
        └──── HELLO_LIMIT_S, out of order, not a packet, does not read its answers ────▲

Bounds: at most ``MAX_UNKNOWN_PEERS`` connections that have not said hello, ``MAX_ACCEPTED`` in all
(``acceptor``), one packet of a connection for each turn of the loop. Descriptors that a peer sends
are closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from transfer.acceptor import Acceptor
from transfer.error_codes import status_of
from transfer.errors import FrameInvalid, PeerUnreachable, RegionRevoked, Unauthorized
from transfer.interface import Rights
from transfer.region import RegionTable, RegisteredRegion, SharedPlace
from transfer.shm_control import ControlPage
from transfer.shm_wire import (
    NOT_SHARED,
    SHM_PROTOCOL_VERSION,
    HelloPacket,
    MapPacket,
    Packet,
    PlacePacket,
    RefusalPacket,
    WelcomePacket,
    WithdrawnPacket,
    close_all,
    is_same_user,
    receive_packet,
    send_packet,
)

_LOG = logging.getLogger(__name__)
LISTEN_BACKLOG = 128
HELLO_LIMIT_S = 5.0
MAX_UNKNOWN_PEERS = 128


def listen_abstract(name: str) -> socket.socket:
    """Return a listening abstract socket; it has no file and dies with the process.

    Raises:
        PeerUnreachable: the name is taken.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        sock.bind("\0" + name)
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        raise PeerUnreachable(f"cannot listen on abstract socket {name!r}: {error}") from error
    return sock


class ShmOwner:
    """Answers hellos and map requests."""

    def __init__(self, incarnation: str, regions: RegionTable, control: ControlPage) -> None:
        self._incarnation = incarnation
        self._regions = regions
        self._control = control
        self._acceptor: Acceptor | None = None
        self._unknown: dict[socket.socket, asyncio.TimerHandle] = {}  # value: patience
        self._peers: dict[socket.socket, set[int]] = {}  # value: regions that it has mapped
        self._mappers: dict[int, set[socket.socket]] = {}  # the same, by region

    def serve(self, listener: socket.socket) -> None:
        """Accept on a listening, non-blocking socket; takes it over."""
        self._acceptor = Acceptor(listener, self._accept, num_open=lambda: self.num_connections)

    @property
    def num_connections(self) -> int:
        return len(self._unknown) + len(self._peers)

    def _accept(self, sock: socket.socket, _: object) -> None:
        if not is_same_user(sock):
            _LOG.warning("refused a shared-memory peer of another user")
            sock.close()
            return
        if len(self._unknown) >= MAX_UNKNOWN_PEERS:
            _LOG.error("refused a shared-memory peer: %d have not said hello", len(self._unknown))
            sock.close()
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._on_readable, sock)  # first: OSError leaves nothing behind
        self._unknown[sock] = loop.call_later(HELLO_LIMIT_S, self._drop, sock, "no hello")

    def _on_readable(self, sock: socket.socket) -> None:
        try:
            packet, fds = receive_packet(sock)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, FrameInvalid) as error:
            self._drop(sock, str(error))
            return
        close_all(fds)  # an owner hands descriptors out and takes none
        if packet is None:
            self._drop(sock, "it hung up")
            return
        try:
            self._on_packet(sock, packet)
        except (OSError, FrameInvalid) as error:  # BlockingIOError: it does not read its answers
            self._drop(sock, str(error))

    def _on_packet(self, sock: socket.socket, packet: Packet) -> None:
        if isinstance(packet, HelloPacket) and sock in self._unknown:
            self._on_hello(sock, packet)
        elif isinstance(packet, MapPacket) and sock in self._peers:
            self._on_map(sock, packet)
        else:
            raise FrameInvalid(f"{type(packet).__name__} out of order")

    def _on_hello(self, sock: socket.socket, hello: HelloPacket) -> None:
        if hello.protocol != SHM_PROTOCOL_VERSION:
            raise FrameInvalid(
                f"shm protocol versions differ: {SHM_PROTOCOL_VERSION} here, {hello.protocol} there"
            )
        self._unknown.pop(sock).cancel()
        self._peers[sock] = set()
        fd = self._control.open_for_peer()
        try:
            send_packet(sock, WelcomePacket(SHM_PROTOCOL_VERSION, self._incarnation), fd)
        finally:
            os.close(fd)

    def _on_map(self, sock: socket.socket, packet: MapPacket) -> None:
        try:
            region = self._regions.authorize(packet.region_id, packet.capability, None)
        except (Unauthorized, RegionRevoked) as error:
            send_packet(sock, RefusalPacket(packet.number, status_of(error), str(error)))
            return
        rights = region.rights_of(packet.capability)
        assert rights is not None, "authorized without rights"
        self._send_place(sock, packet.number, region, rights)

    def _send_place(
        self, sock: socket.socket, number: int, region: RegisteredRegion, rights: Rights
    ) -> None:
        self._peers[sock].add(region.region_id)  # first: a revocation from now on is told
        self._mappers.setdefault(region.region_id, set()).add(sock)
        place = self._place_of(region, rights)
        if place is None:
            self._forget(sock, region.region_id)
            text = "the region is not in shared memory"
            send_packet(sock, RefusalPacket(number, NOT_SHARED, text))
            return
        answer = PlacePacket(
            number, place.file_id, place.file_nbytes, place.offset, region.nbytes, rights
        )
        try:
            send_packet(sock, answer, place.fd)
        finally:
            os.close(place.fd)

    def _place_of(self, region: RegisteredRegion, rights: Rights) -> SharedPlace | None:
        try:
            return self._regions.shared_place(region, writable="w" in rights)
        except OSError as error:
            _LOG.error("cannot share memory with a peer: %s", error)
            return None

    def _forget(self, sock: socket.socket, region_id: int) -> None:
        self._peers[sock].discard(region_id)
        mappers = self._mappers.get(region_id, set())
        mappers.discard(sock)
        if not mappers:
            self._mappers.pop(region_id, None)

    def is_mapped(self, region_id: int) -> bool:
        """True if a peer may have the region mapped. Thread-safe."""
        return region_id in self._mappers

    def tell_withdrawn(self, region_id: int) -> None:
        """Let the peers unmap a region that was revoked."""
        for sock in self._mappers.pop(region_id, ()):
            self._peers[sock].discard(region_id)
            try:
                send_packet(sock, WithdrawnPacket(region_id))
            except OSError as error:
                self._drop(sock, str(error))

    def _drop(self, sock: socket.socket, reason: str) -> None:
        if sock in self._peers:
            for region_id in list(self._peers[sock]):
                self._forget(sock, region_id)
            del self._peers[sock]
        elif sock in self._unknown:
            self._unknown.pop(sock).cancel()
        else:
            return
        _LOG.info("a shared-memory peer is gone: %s", reason)
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()

    def release(self) -> None:
        """Close every socket."""
        if self._acceptor is not None:
            self._acceptor.close()
        for sock in [*self._unknown, *self._peers]:
            self._drop(sock, "this engine ends")
