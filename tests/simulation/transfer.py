"""Bulk transfers between simulated nodes: one-sided, with seeded delays and faults.

Owns ``SimBulk`` (which life of which node owns which regions) and ``SimTransfer`` (implements
``transfer.interface.Transfer`` for one life). Knows no pages.

Bytes move in pieces, each at its own moment: a fault, a crash or a cancel in between leaves part
of them moved. The caller's memory is never touched after the operation has ended. Bytes of a
failed or cancelled *write* may still reach the owner later, as on a real wire (``late_write``).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from tests.simulation.loop import Life
from tests.simulation.network import SimFabric
from transfer.buffers import flat_view
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerClosed,
    PeerLost,
    PeerUnreachable,
    RegionRevoked,
    Stale,
    Unauthorized,
)
from transfer.interface import Priority, Range, Region, Rights
from transfer.ranges import plan

SILENCE_S = 2.0  # a peer that moves nothing for this long is lost
POLL_S = 0.02
MIN_PIECE_NBYTES = 512
PIECES_PER_OPERATION = 8

Kind = Literal["read", "write"]


class SimToken(msgspec.Struct, frozen=True, array_like=True):
    """Names a region of one life of one node."""

    node: str
    life_id: int
    region_id: int
    nbytes: int
    rights: Rights
    capability: bytes


class SimRegion:
    """``transfer.interface.Region``."""

    def __init__(self, owner: SimTransfer, region_id: int, view: memoryview) -> None:
        self.revoked = False
        self._owner = owner
        self._region_id = region_id
        self._view = view
        self.capabilities: dict[bytes, Rights] = {}

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def view(self) -> memoryview:
        return self._view

    def export(self, rights: Rights) -> bytes:
        if self.revoked:
            raise RegionRevoked(f"region {self._region_id} is revoked; register it again")
        if "w" in rights and self._view.readonly:
            raise Unauthorized("cannot grant writing: the buffer is read-only")
        capability = next((c for c, r in self.capabilities.items() if r == rights), None)
        if capability is None:
            capability = self._owner.rng.randbytes(16)
            self.capabilities[capability] = rights
        return self._owner.encode(self._region_id, self.nbytes, rights, capability)

    def revoke(self) -> None:
        self.revoked = True


class SimBulk:
    """All regions of all lives."""

    def __init__(self, fabric: SimFabric) -> None:
        self.fabric = fabric
        self._lives: dict[str, list[SimTransfer]] = {}

    def add(self, transfer: SimTransfer) -> int:
        lives = self._lives.setdefault(transfer.node, [])
        lives.append(transfer)
        return len(lives)

    def owner(self, token: SimToken) -> SimTransfer:
        """Return the life that issued ``token``; Stale when a later one has taken its place."""
        lives = self._lives.get(token.node, [])
        if not 0 < token.life_id <= len(lives):
            raise PeerUnreachable(f"nothing answers at {token.node}")
        if token.life_id < len(lives):
            raise Stale(f"{token.node} was restarted; its old tokens are void")
        return lives[-1]


class _Move(NamedTuple):
    """One operation on its way."""

    kind: Kind
    token: SimToken
    local: SimRegion
    pieces: list[Range]
    breaks_at: int | None  # index of the piece at which the wire breaks
    corrupts_at: int | None


class SimTransfer:
    """Bulk transfers of one life of one node."""

    def __init__(self, bulk: SimBulk, node: str, life: Life, rng: random.Random) -> None:
        self.node = node
        self.life = life
        self.rng = rng
        self.num_operations = 0
        self._bulk = bulk
        self._fabric = bulk.fabric
        self._life_id = bulk.add(self)
        self._regions: list[SimRegion] = []
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._closed = False

    @property
    def transport(self) -> str:
        return "sim"

    @property
    def closed(self) -> bool:
        return self._closed or not self.life.alive

    async def start(self) -> None:
        """Nothing to start."""

    def register(self, buffer: object) -> Region:
        region = SimRegion(self, len(self._regions), flat_view(buffer))
        self._regions.append(region)
        return region

    def allocate(self, nbytes: int) -> Region:
        return self.register(bytearray(nbytes))

    async def read(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        into: Region,
        deadline_s: float,
        priority: Priority = Priority.NOW,
    ) -> None:
        await self._operate("read", token, ranges, into, deadline_s)

    async def write(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        source: Region,
        deadline_s: float,
        priority: Priority = Priority.BACKGROUND,
    ) -> None:
        await self._operate("write", token, ranges, source, deadline_s)

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._closed = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(PeerClosed("the transfer engine is closed"))

    def encode(self, region_id: int, nbytes: int, rights: Rights, capability: bytes) -> bytes:
        return msgspec.msgpack.encode(
            SimToken(self.node, self._life_id, region_id, nbytes, rights, capability)
        )

    def region_for(self, kind: Kind, token: SimToken) -> SimRegion:
        """The owner's side of a request: check the token, return the region."""
        if token.region_id >= len(self._regions):
            raise Unauthorized(f"{self.node} has no such region")
        region = self._regions[token.region_id]
        rights = region.capabilities.get(token.capability)
        if rights is None or kind[0] not in rights:
            raise Unauthorized(f"the token does not grant to {kind}")
        if region.revoked:
            raise RegionRevoked(f"{self.node} has revoked the region")
        return region

    async def _operate(
        self, kind: Kind, token: bytes, ranges: Sequence[Range], local: Region, deadline_s: float
    ) -> None:
        if self.closed:
            raise PeerClosed("the transfer engine is closed")
        assert isinstance(local, SimRegion), "regions belong to the engine that made them"
        if local.revoked:
            raise RegionRevoked("the local region is revoked")
        try:
            ticket = msgspec.msgpack.decode(token, type=SimToken)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrameInvalid(f"not a region token: {error}") from error
        planned = plan(
            ranges,
            local_nbytes=local.nbytes,
            remote_nbytes=ticket.nbytes,
            destination="local" if kind == "read" else "remote",
        )
        if deadline_s <= asyncio.get_running_loop().time():
            raise DeadlineExceeded(f"deadline passed before the {kind}")
        self.num_operations += 1
        await self._within_deadline(self._draw(kind, ticket, local, planned), deadline_s)

    def _draw(self, kind: Kind, token: SimToken, local: SimRegion, planned: list[Range]) -> _Move:
        """Decide the fate of an operation."""
        rng, faults = self._fabric.rng, self._fabric.plan
        pieces = list(_cut(planned))

        def drawn(probability: float) -> int | None:
            hit = rng.random() < probability and pieces
            return rng.randrange(len(pieces)) if hit else None

        return _Move(
            kind, token, local, pieces, drawn(faults.bulk_fail), drawn(faults.bulk_corrupt)
        )

    async def _within_deadline(self, move: _Move, deadline_s: float) -> None:
        num_moved = 0
        try:
            async with asyncio.timeout_at(deadline_s):
                owner = await self._find_owner(move)
                for index, piece in enumerate(move.pieces):
                    await self._move_piece(owner, move, index, piece)
                    num_moved = index + 1
                await self._sleep(self._fabric.delay_s())
        except TimeoutError as error:
            self._leave_behind(move, num_moved)
            raise DeadlineExceeded(f"{move.kind} at {move.token.node} took too long") from error
        except BaseException:
            self._leave_behind(move, num_moved)
            raise

    async def _find_owner(self, move: _Move) -> SimTransfer:
        await self._sleep(self._fabric.delay_s())
        owner = self._bulk.owner(move.token)
        await self._until_it_answers(owner)
        owner = self._bulk.owner(move.token)
        owner.region_for(move.kind, move.token)
        return owner

    async def _move_piece(self, owner: SimTransfer, move: _Move, index: int, piece: Range) -> None:
        speed = self._fabric.plan.bulk_bytes_per_s
        await self._sleep(piece.nbytes / speed * self._fabric.rng.uniform(0.5, 2.0))
        await self._until_it_answers(owner)
        if index == move.breaks_at:
            raise PeerLost(f"the bulk connection to {owner.node} broke")
        remote = owner.region_for(move.kind, move.token)
        data = bytearray(_bytes_of(move, remote, piece))
        if index == move.corrupts_at:
            data[self._fabric.rng.randrange(len(data))] ^= 1 << self._fabric.rng.randrange(8)
        self._put(move, remote, piece, data)
        self._fabric.trace.add(
            self._fabric.loop.now_s, f"{move.kind} {self.node}>{owner.node} {piece}", bytes(data)
        )
        self._fabric.run_checkers()

    @staticmethod
    def _put(move: _Move, remote: SimRegion, piece: Range, data: bytes | bytearray) -> None:
        if move.kind == "read":
            offset = piece.local_offset
            move.local.view[offset : offset + piece.nbytes] = data
        else:
            offset = piece.remote_offset
            remote.view[offset : offset + piece.nbytes] = data

    async def _until_it_answers(self, owner: SimTransfer) -> None:
        """Return when both directions work and the owner lives; PeerLost after a long silence."""
        silent_s = 0.0
        while owner.closed or owner.life.paused or self._is_cut_off(owner):
            if silent_s >= SILENCE_S or self._is_reset(owner):
                raise PeerLost(f"{owner.node} does not answer")
            await self._sleep(POLL_S)
            silent_s += POLL_S

    def _is_cut_off(self, owner: SimTransfer) -> bool:
        fabric = self._fabric
        return fabric.is_blocked(self.node, owner.node) or fabric.is_blocked(owner.node, self.node)

    def _is_reset(self, owner: SimTransfer) -> bool:
        """A dead process on a living host answers with a reset, unless it went silently."""
        return owner.closed and not owner.life.died_silently and not self._is_cut_off(owner)

    def _leave_behind(self, move: _Move, num_moved: int) -> None:
        """Perhaps let the piece that was under way reach the owner after all, later."""
        if move.kind == "read" or num_moved >= len(move.pieces):
            return
        if self._fabric.rng.random() >= self._fabric.plan.late_write:
            return
        piece = move.pieces[num_moved]
        data = bytes(move.local.view[piece.local_offset : piece.local_offset + piece.nbytes])

        def land() -> None:
            try:
                owner = self._bulk.owner(move.token)
                remote = owner.region_for(move.kind, move.token)
            except (Stale, Unauthorized, RegionRevoked, PeerUnreachable):
                return
            if not owner.closed and not self._is_cut_off(owner):
                self._put(move, remote, piece, data)
                what = f"late write {self.node}>{owner.node} {piece}"
                self._fabric.trace.add(self._fabric.loop.now_s, what, data)

        when_s = self._fabric.loop.now_s + 10 * self._fabric.delay_s()
        self._fabric.loop.call_at_true_time(when_s, land, context=contextvars.Context())

    async def _sleep(self, delay_s: float) -> None:
        """Wait; PeerClosed when this engine is closed meanwhile."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = loop.call_later(delay_s, _wake, waiter)
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            timer.cancel()
            del self._waiters[waiter]


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _bytes_of(move: _Move, remote: SimRegion, piece: Range) -> memoryview:
    if move.kind == "read":
        return remote.view[piece.remote_offset : piece.remote_offset + piece.nbytes]
    return move.local.view[piece.local_offset : piece.local_offset + piece.nbytes]


def _cut(ranges: Sequence[Range]) -> Iterator[Range]:
    """Cut ranges into pieces that move one at a time."""
    total = sum(r.nbytes for r in ranges)
    size = max(MIN_PIECE_NBYTES, total // PIECES_PER_OPERATION)
    for r in ranges:
        for start in range(0, r.nbytes, size):
            nbytes = min(size, r.nbytes - start)
            yield Range(r.remote_offset + start, r.local_offset + start, nbytes)
