"""Messages of the shm transport over its unix socket (SOCK_SEQPACKET: one message, one packet).

Owns the packet format and the passing of file descriptors. Knows no regions. ::

    peer                                        owner
    HelloPacket {protocol, incarnation}    ─▶
                                           ◀─   WelcomePacket {incarnation} + control page fd
    MapPacket {number, region, capability} ─▶
                                           ◀─   PlacePacket {number, file, offset ...} + memory fd
                                           ◀─   RefusalPacket {number, status, text}
                                           ◀─   WithdrawnPacket {region}, for what was mapped

The connection stays open for as long as the peer uses the memory: its end tells of a dead owner. A
``WithdrawnPacket`` only says that the memory can be unmapped; what revokes is the control page.
"""

from __future__ import annotations

import array
import os
import socket
import struct

import msgspec

from transfer.decoding import decode_foreign
from transfer.errors import FrameInvalid
from transfer.interface import Rights

SHM_PROTOCOL_VERSION = 2
MAX_PACKET_NBYTES = 4096
MAX_PACKET_FDS = 4  # the kernel closes what a peer sends beyond
NOT_SHARED = 255  # status of a refusal: the region exists, but cannot be mapped
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
    rights: Rights


class RefusalPacket(msgspec.Struct, frozen=True, tag="refusal"):
    number: int
    status: int
    text: str


class WithdrawnPacket(msgspec.Struct, frozen=True, tag="withdrawn"):
    region_id: int


Packet = HelloPacket | WelcomePacket | MapPacket | PlacePacket | RefusalPacket | WithdrawnPacket
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
    flags = socket.MSG_CMSG_CLOEXEC
    data, fds, _, _ = socket.recv_fds(sock, MAX_PACKET_NBYTES, MAX_PACKET_FDS, flags)
    if not data:
        return None, fds
    try:
        return decode_foreign(data, _DECODER.decode, "a packet of the shm transport"), fds
    except FrameInvalid:
        close_all(fds)
        raise


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def is_same_user(sock: socket.socket) -> bool:
    """True if the process at the other end runs as our user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    return bool(uid == os.geteuid())
