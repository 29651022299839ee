"""Transport between processes of one host: the peer maps the memory and copies by itself.

Owns the peers' connections; ``shm_owner`` and ``shm_peer`` are its two sides. The first use of a
region costs one exchange over a unix socket; after it, a move is a memory copy and two looks at the
control page.

Revocation is seen within one piece: a peer that is copying when the owner revokes may still touch
the memory until the end of that piece, and its operation fails. An owner that hands the same bytes
to somebody else at once must therefore verify what it finds there, for example by checksum.
"""

from __future__ import annotations

import asyncio
import socket

from transfer.config import TransferConfig
from transfer.copier import Copier, Copy
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerLost,
    PeerUnreachable,
    TransferError,
    Unauthorized,
)
from transfer.io_thread import IoThread
from transfer.region import RegionTable
from transfer.shm_memory import ControlPage, EngineState
from transfer.shm_owner import ShmOwner, listen_abstract
from transfer.shm_peer import Grant, ShmAccess, ShmPeer, open_peer
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
        self.address = address
        self._incarnation = incarnation
        self._connect_timeout_s = config.connect_timeout_s
        self._io = io
        self._copier = copier
        self._listener: socket.socket = listen_abstract(address)
        self._control = ControlPage()
        regions.attach(self._control)
        self._owner = ShmOwner(incarnation, regions, self._control)
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
        copy = Copy(move.region.view, grant.view, move.ranges, access, move.right == "r")
        await self._copier.copy(copy, move.deadline_s)

    async def _grant(self, move: Move) -> tuple[ShmPeer, Grant]:
        token = move.token
        peer = self._peers.get((token.endpoint.shm, token.endpoint.incarnation))
        if peer is not None and peer.alive:
            grant = peer.known_grant(token.region_id, token.capability)
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
        if not attempt.cancelled() and attempt.exception() is None:
            self._peers = {k: p for k, p in self._peers.items() if p.alive}
            self._peers[key] = attempt.result()

    async def _connect(self, key: tuple[str, str]) -> ShmPeer:
        address, incarnation = key
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await open_peer(address, self._incarnation, incarnation)
        except TimeoutError:
            raise PeerUnreachable(
                f"the owner at {address!r} did not answer within {self._connect_timeout_s} s"
            ) from None

    def disrupt(self, endpoint: Endpoint) -> None:
        self._io.call(self._disrupt, (endpoint.shm, endpoint.incarnation))

    def _disrupt(self, key: tuple[str, str]) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            peer.close(PeerLost(f"the connection to {key[0]} was broken on purpose"))

    async def close(self) -> None:
        self._control.set_state(EngineState.CLOSED)

    def abort(self) -> None:
        self._control.set_state(EngineState.ABORTED)

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
