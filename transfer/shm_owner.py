"""The side of shm that owns memory: hands file descriptors to peers of the same user.

Owns the abstract unix socket and its connections. Runs on the I/O loop only. Once a peer has mapped
a region the owner takes no part; it revokes through the control page.
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
from transfer.region import RegionTable
from transfer.shm_memory import ControlPage
from transfer.shm_wire import (
    SHM_PROTOCOL_VERSION,
    HelloPacket,
    MapPacket,
    PlacePacket,
    RefusalPacket,
    WelcomePacket,
    is_same_user,
    receive_packet,
    send_packet,
)

_LOG = logging.getLogger(__name__)
LISTEN_BACKLOG = 128


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
        self._peers: dict[socket.socket, bool] = {}  # value: said hello

    def serve(self, listener: socket.socket) -> None:
        """Accept on a listening, non-blocking socket; takes it over."""
        self._acceptor = Acceptor(listener, self._accept, num_open=lambda: len(self._peers))

    def _accept(self, sock: socket.socket, _: object) -> None:
        if not is_same_user(sock):
            _LOG.warning("refused a shared-memory peer of another user")
            sock.close()
            return
        self._peers[sock] = False
        asyncio.get_running_loop().add_reader(sock, self._on_readable, sock)

    def _on_readable(self, sock: socket.socket) -> None:
        try:
            packet, fds = receive_packet(sock)
            for fd in fds:
                os.close(fd)  # an owner hands descriptors out and takes none
            if packet is None:
                self._drop(sock)
            elif isinstance(packet, HelloPacket) and not self._peers[sock]:
                self._peers[sock] = True
                welcome = WelcomePacket(SHM_PROTOCOL_VERSION, self._incarnation)
                send_packet(sock, welcome, self._control.fd)
            elif isinstance(packet, MapPacket) and self._peers[sock]:
                self._on_map(sock, packet)
            else:
                raise FrameInvalid(f"{type(packet).__name__} out of order")
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, FrameInvalid) as error:
            _LOG.info("dropping a shared-memory peer: %s", error)
            self._drop(sock)

    def _on_map(self, sock: socket.socket, packet: MapPacket) -> None:
        try:
            region = self._regions.authorize(packet.region_id, packet.capability, None)
            place = self._regions.shared_place(region)
            if place is None:
                raise FrameInvalid("the region is not in shared memory")
        except (Unauthorized, RegionRevoked, FrameInvalid) as error:
            send_packet(sock, RefusalPacket(packet.number, status_of(error), str(error)))
            return
        rights: Rights | None = region.rights_of(packet.capability)
        assert rights is not None, "authorized without rights"
        answer = PlacePacket(
            packet.number, place.file_id, place.file_nbytes, place.offset, region.nbytes, rights
        )
        try:
            send_packet(sock, answer, place.fd)
        finally:
            os.close(place.fd)

    def _drop(self, sock: socket.socket) -> None:
        if self._peers.pop(sock, None) is not None:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()

    def release(self) -> None:
        """Close every socket."""
        if self._acceptor is not None:
            self._acceptor.close()
        for sock in list(self._peers):
            self._drop(sock)
