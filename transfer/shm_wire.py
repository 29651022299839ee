"""Messages of the shm transport over its unix socket (SOCK_SEQPACKET: one message, one packet).

Owns the packet format and the passing of file descriptors. Knows no regions. ::

    peer                                        owner
    HelloPacket {protocol, incarnation}    ─▶
                                           ◀─   WelcomePacket {incarnation} + control page fd
    MapPacket {number, region, capability} ─▶
                                           ◀─   PlacePacket {number, file, offset ...} + memory fd
                                           ◀─   RefusalPacket {number, status, text}

The connection stays open for as long as the peer uses the memory: its end tells of a dead owner.
"""

from __future__ import annotations

import array
import os
import socket
import struct

import msgspec

from transfer.errors import FrameInvalid

SHM_PROTOCOL_VERSION = 1
MAX_PACKET_NBYTES = 4096
_UCRED = struct.Struct("3i")


class HelloPacket(msgspec.Struct, frozen=True, tag="hello"):
    protocol: int
    incarnation: str


class WelcomePacket(msgspec.Struct, frozen=True, tag="welcome"):
    protocol: int
    incarnation: str


class MapPacket(msgspec.Struct, frozen=True, tag="map"):
    number: int
    region_id: int
    capability: bytes


class PlacePacket(msgspec.Struct, frozen=True, tag="place"):
    """Where a region is: ``nbytes`` from ``offset`` of file ``file_id``."""

    number: int
    file_id: int
    file_nbytes: int
    offset: int
    nbytes: int
    rights: str


class RefusalPacket(msgspec.Struct, frozen=True, tag="refusal"):
    number: int
    status: int
    text: str


Packet = HelloPacket | WelcomePacket | MapPacket | PlacePacket | RefusalPacket
_DECODER: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)


def send_packet(sock: socket.socket, packet: Packet, fd: int | None = None) -> None:
    """Send one packet; ``OSError`` if the other side is gone or does not read."""
    data = msgspec.msgpack.encode(packet)
    ancillary = []
    if fd is not None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([data], ancillary)


def receive_packet(sock: socket.socket) -> tuple[Packet | None, list[int]]:
    """Return one packet and its descriptors; None at the end of the stream.

    Raises:
        FrameInvalid: not a packet; its descriptors are closed.
    """
    data, fds, _, _ = socket.recv_fds(sock, MAX_PACKET_NBYTES, 4)
    if not data:
        return None, fds
    try:
        return _DECODER.decode(data), fds
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        for fd in fds:
            os.close(fd)
        raise FrameInvalid(f"not a packet of the shm transport: {error}") from error


def is_same_user(sock: socket.socket) -> bool:
    """True if the process at the other end runs as our user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    return bool(uid == os.geteuid())
