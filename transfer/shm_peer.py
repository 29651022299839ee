"""The side of shm that maps a peer's memory: one connection to one owner, and what it granted.

Owns the connection. It lives on the I/O loop; a ``Grant`` is used from copy threads, a piece at a
time, and each piece is bracketed by ``ShmAccess``::

    enter   presence: the owner's revoke() waits for us from now on
            owner alive, its engine open, the region's word unchanged?   no ─▶ out, and an error
    (copy one piece)
    leave   presence: out
            the same questions again: a piece whose memory was given up meanwhile did not happen
"""

from __future__ import annotations

import asyncio
import itertools
import socket

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
from transfer.shm_control import ControlView, EngineState, gone_error
from transfer.shm_mappings import Grant, Mappings
from transfer.shm_presence import Presence
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

MAX_MAP_REQUESTS = 1024  # without an answer; the kernel takes a few hundred that are not read
_DEAF = "the owner does not answer map requests"
_Wanted = tuple[int, bytes]  # region id and capability


class ShmUnavailable(PeerUnreachable):
    """No owner that can share memory with us answers at the address; tcp may still reach it."""


class RegionNotShared(ShmUnavailable):
    """This one region cannot be mapped (any more); others of the same owner can."""


class ShmPeer:
    """A connection to one incarnation of one owner. Made by ``open_peer``."""

    def __init__(self, sock: socket.socket, control: ControlView, presence: Presence) -> None:
        self._sock = sock
        self._control = control
        self.presence = presence
        self.mappings = Mappings()
        self.alive = True
        self._ended_by: TransferError = PeerLost("the owner of the shared memory is gone")
        self._requests: dict[int, _Wanted] = {}
        self._replies: dict[_Wanted, asyncio.Future[Grant]] = {}  # one for each request
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._on_readable)

    async def map(self, region_id: int, capability: bytes) -> Grant:
        """Ask the owner for a region; who asks for the same one meanwhile shares the answer.

        On the I/O loop. A request whose askers were all cancelled maps the region all the same.

        Raises:
            ShmUnavailable: the region cannot be mapped, or the owner does not read its requests.
            TransferError: the owner refused, or is gone.
        """
        if not self.alive:
            raise self._end()
        grant = self.mappings.get(region_id, capability)
        if grant is not None:
            return grant
        wanted = (region_id, capability)
        if wanted not in self._replies:
            self._ask(wanted)
        return await asyncio.shield(self._replies[wanted])

    def _ask(self, wanted: _Wanted) -> None:
        if len(self._requests) >= MAX_MAP_REQUESTS:
            raise ShmUnavailable(_DEAF)
        number = next(self._numbers)
        try:
            send_packet(self._sock, MapPacket(number, *wanted))
        except BlockingIOError:
            raise ShmUnavailable(_DEAF) from None
        except OSError as error:
            raise PeerLost(f"the owner of the shared memory is gone: {error}") from error
        self._requests[number] = wanted
        self._replies[wanted] = self._loop.create_future()

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
            close_all(fds)  # a mapping keeps the memory, not the descriptor

    def _on_packet(self, packet: Packet, fds: list[int]) -> None:
        if isinstance(packet, WithdrawnPacket):
            if not self._control.holds(packet.region_id):
                self.mappings.forget(packet.region_id)
        elif isinstance(packet, PlacePacket | RefusalPacket):
            self._on_reply(packet, fds)
        else:
            self.close(PeerLost(f"{type(packet).__name__} out of order from the owner"))

    def _on_reply(self, packet: PlacePacket | RefusalPacket, fds: list[int]) -> None:
        wanted = self._requests.pop(packet.number, None)
        if wanted is None:
            return  # nobody asked
        reply, region_id = self._replies.pop(wanted), wanted[0]
        try:
            if isinstance(packet, RefusalPacket):
                raise _refusal(packet)
            grant = self.mappings.add(*wanted, packet, _only(fds))
        except TransferError as error:
            _fail(reply, error)
            return
        except OSError as error:
            _fail(reply, ShmUnavailable(f"cannot map the owner's memory: {error}"))
            return
        if not self._control.holds(region_id):  # revoked before the owner knew of this mapping
            self.mappings.forget(region_id)
        reply.set_result(grant)

    def _gone(self) -> TransferError:
        if self._control.state == EngineState.CLOSED:
            return gone_error(EngineState.CLOSED)
        return PeerLost("the owner of the shared memory is gone")

    def _end(self) -> TransferError:
        """Return why this side closed the connection; a new error for each operation."""
        return type(self._ended_by)(*self._ended_by.args)

    def check(self, region_id: int) -> None:
        """Raise unless the region may be touched. Thread-safe."""
        control = self._control
        state = control.state
        if state != EngineState.OPEN:
            raise gone_error(state)
        if not self.alive:
            raise self._end()
        if not control.holds(region_id):
            if control.moved(region_id):
                raise RegionNotShared("the region is not in shared memory any more")
            raise RegionRevoked("the region was revoked by its owner")

    def close(self, error: TransferError) -> None:
        """On the I/O loop. Idempotent."""
        if self._sock.fileno() < 0:
            return
        self._ended_by = error
        self.alive = False
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for reply in self._replies.values():
            _fail(reply, error)
        self._requests.clear()
        self._replies.clear()
        self.mappings.clear()
        self.presence.close()


def _only(fds: list[int]) -> int:
    """Return the descriptor that comes with a welcome or a place."""
    if not fds:  # the kernel drops what a process has no room for
        raise ShmUnavailable("no descriptor came with the answer; is the limit on open files hit?")
    if len(fds) > 1:
        raise FrameInvalid(f"one descriptor comes with an answer, not {len(fds)}")
    return fds[0]


def _fail(reply: asyncio.Future[Grant], error: TransferError) -> None:
    reply.set_exception(error)
    reply.exception()  # whoever asked may have gone


def _refusal(packet: RefusalPacket) -> TransferError:
    if packet.status == NOT_SHARED:
        return RegionNotShared(packet.text)
    error = error_of(packet.status, packet.text.encode())
    return error or FrameInvalid("the owner refused with success")


class ShmAccess(Access):
    """Keeps the owner from giving up the memory for the time of one piece."""

    def __init__(self, peer: ShmPeer, region_id: int) -> None:
        self._peer = peer
        self._region_id = region_id

    def enter(self) -> None:
        inside = self._peer.presence.enter(self._region_id)
        try:
            self._peer.check(self._region_id)
        except TransferError:
            if inside:
                self._peer.presence.leave(self._region_id)
            raise
        if not inside:
            raise ShmUnavailable("the kernel has no lock left for one more piece")

    def leave(self) -> None:
        """Out first: leaving orders what was copied before the second look at the words."""
        self._peer.presence.leave(self._region_id)
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
        return ShmPeer(sock, *_accept_welcome(packet, fds, expected))
    except BaseException:
        sock.close()
        raise


def _accept_welcome(
    packet: Packet | None, fds: list[int], expected: str
) -> tuple[ControlView, Presence]:
    """Return the control page, and our presence through its file. Takes over ``fds``."""
    try:
        _check_welcome(packet, expected)
        fd = _only(fds)
        view = ControlView(fd)
    except (OSError, ValueError) as error:
        close_all(fds)
        raise ShmUnavailable(f"cannot map the owner's control page: {error}") from error
    except TransferError:
        close_all(fds)
        raise
    return view, Presence(fd)


def _check_welcome(packet: Packet | None, expected: str) -> None:
    if packet is None:
        raise ShmUnavailable("the owner of the shared memory hung up")
    if not isinstance(packet, WelcomePacket):
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
