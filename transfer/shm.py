"""Transport between processes of one host: the peer maps the memory and copies by itself.

Owns the peers' connections; ``shm_owner`` and ``shm_peer`` are its two sides. The first use of a
region costs one exchange over a unix socket; after it, a move is a memory copy in pieces, each
between two kernel locks (``shm_presence``) and two looks at the control page (``shm_control``).

Revoking, closing and aborting return when no peer is inside of the memory any more, which takes
one piece. A peer that was stopped in the middle of a piece is not waited for longer than
``REVOKE_PATIENCE_S``: a revoked region's memory is then left behind for it (``shm_memory``), so
that it never touches what the owner puts there next. ``close`` leaves the loop free meanwhile;
revoking blocks its caller, who may do it on another thread: it is safe from any.

The owner takes no part in a move: one that is stopped or busy is read and written all the same, and
only the first use of a region waits for it. One that was killed ends its unix socket: operations on
its memory raise ``PeerLost`` within a piece, and the memory is unmapped.

A region that was left behind, was registered rather than allocated, or cannot be mapped for want of
anything raises ``ShmUnavailable``: the engine reaches it by tcp.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from transfer.config import TransferConfig
from transfer.copier import Copier, Copy
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerClosed,
    PeerLost,
    PeerUnreachable,
    TransferError,
    Unauthorized,
)
from transfer.io_thread import IoThread
from transfer.region import RegionTable
from transfer.shm_control import ControlPage, EngineState
from transfer.shm_mappings import Grant
from transfer.shm_owner import ShmOwner, listen_abstract
from transfer.shm_peer import ShmAccess, ShmPeer, open_peer
from transfer.token import Endpoint
from transfer.transports import Move


class ShmTransport:
    """Hands out this engine's shared memory and maps that of others."""

    name = "shm"

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        regions: RegionTable,
        io: IoThread,
        copier: Copier,
        address: str,
    ) -> None:
        """Listen at ``address``; nobody is served before ``start``.

        Raises:
            PeerUnreachable: the address is taken, or there is no descriptor or memory left.
        """
        self.address = address
        self._incarnation = incarnation
        self._connect_timeout_s = config.connect_timeout_s
        self._io = io
        self._copier = copier
        self._listener, self._control = _listen(address)
        regions.attach(self._control)
        self._owner = ShmOwner(incarnation, regions, self._control)
        self._control.on_withdrawn = self._on_withdrawn
        self._peers: dict[tuple[str, str], ShmPeer] = {}  # filled on the I/O loop only
        self._opening: dict[tuple[str, str], asyncio.Task[ShmPeer]] = {}

    async def start(self) -> None:
        self._io.call(self._owner.serve, self._listener)

    async def move(self, move: Move) -> None:
        """Map the region if need be, then copy.

        Raises:
            ShmUnavailable: this peer cannot share memory with us.
        """
        peer, grant = await self._grant(move)
        if move.right not in grant.rights:
            raise Unauthorized(f"the token grants {grant.rights!r}, {move.right!r} is needed")
        if any(r.remote_offset + r.nbytes > grant.view.nbytes for r in move.ranges):
            raise FrameInvalid(f"range outside of the region of {grant.view.nbytes} bytes")
        access = ShmAccess(peer, grant.region_id)
        copy = Copy(
            move.region.view, grant.view, move.ranges, access, move.right == "r", move.priority
        )
        await self._copier.copy(copy, move.deadline_s)

    async def _grant(self, move: Move) -> tuple[ShmPeer, Grant]:
        token = move.token
        peer = self._peers.get((token.endpoint.shm, token.endpoint.incarnation))
        if peer is not None and peer.alive:
            grant = peer.mappings.get(token.region_id, token.capability)
            if grant is not None:
                peer.check(grant.region_id)
                return peer, grant
        try:
            async with asyncio.timeout_at(move.deadline_s):
                return await self._io.run(self._map(move))
        except TimeoutError:
            raise DeadlineExceeded("the owner did not share its memory by the deadline") from None

    async def _map(self, move: Move) -> tuple[ShmPeer, Grant]:
        peer = await self._open(move.token.endpoint.shm, move.token.endpoint.incarnation)
        return peer, await peer.map(move.token.region_id, move.token.capability)

    async def _open(self, address: str, incarnation: str) -> ShmPeer:
        """Return the connection to a peer; concurrent callers share one attempt."""
        key = (address, incarnation)
        peer = self._peers.get(key)
        if peer is not None and peer.alive:
            return peer
        attempt = self._opening.get(key)
        if attempt is None:
            attempt = asyncio.get_running_loop().create_task(self._connect(key))
            self._opening[key] = attempt
            attempt.add_done_callback(lambda done: self._on_attempt(key, done))
        return await asyncio.shield(attempt)

    def _on_attempt(self, key: tuple[str, str], attempt: asyncio.Task[ShmPeer]) -> None:
        del self._opening[key]
        if not attempt.cancelled():
            attempt.exception()  # whoever asked may have gone

    async def _connect(self, key: tuple[str, str]) -> ShmPeer:
        """Connect, and put the peer among the others before anything else can happen."""
        address, incarnation = key
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                peer = await open_peer(address, self._incarnation, incarnation)
        except TimeoutError:
            raise PeerUnreachable(
                f"the owner at {address!r} did not answer within {self._connect_timeout_s} s"
            ) from None
        self._peers = {k: p for k, p in self._peers.items() if p.alive}
        self._peers[key] = peer
        return peer

    def _on_withdrawn(self, region_id: int) -> None:
        """A region was revoked, on any thread: let the peers that mapped it know."""
        if self._owner.is_mapped(region_id):
            with suppress(PeerClosed):  # this engine ends: so do its connections
                self._io.call(self._owner.tell_withdrawn, region_id)

    def disrupt(self, endpoint: Endpoint) -> None:
        peer = self._peers.get((endpoint.shm, endpoint.incarnation))
        if peer is not None:
            peer.alive = False  # at once: whoever comes next connects anew
            error = PeerLost(f"the connection to {endpoint.shm} was broken on purpose")
            self._io.call(peer.close, error)

    async def close(self) -> None:
        await self._control.end_in_order(EngineState.CLOSED)

    def abort(self) -> None:
        self._control.end(EngineState.ABORTED)

    def release(self, error: TransferError) -> None:
        """Close every socket at once. On the I/O loop, after ``close`` or ``abort``."""
        self._owner.release()
        self._listener.close()
        for attempt in self._opening.values():
            attempt.cancel()
        for peer in self._peers.values():
            peer.close(error)
        self._peers.clear()
        self._control.close()


def _listen(address: str) -> tuple[socket.socket, ControlPage]:
    listener = listen_abstract(address)
    try:
        return listener, ControlPage()
    except OSError as error:
        listener.close()
        raise PeerUnreachable(
            f"cannot share memory: {error}; raise the limit on open files, or choose 'tcp'"
        ) from error
