"""One bulk operation on its way between two simulated nodes, and who can be reached.

Owns ``SimBulk`` (which lives of which node there are), ``SimOperation`` (moves the pieces of one
operation under the faults that were drawn for it) and ``Hold`` (stops pieces until released). Knows
no tokens beyond their address, and no callers.

Bytes move in pieces, each at its own moment: a fault, a crash or a cancel in between leaves part of
them moved. The caller's memory is never touched after the operation has ended; a *read* that is
given up may take a while to end, and move bytes until then (``late_read``). Bytes of a failed or
cancelled *write* may still reach the owner later, as on a real wire (``late_write``), unless the
region has been revoked by then.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from tests.sim.network import SimFabric
from transfer.errors import (
    DeadlineExceeded,
    PeerClosed,
    PeerLost,
    PeerUnreachable,
    Stale,
    TransferError,
)
from transfer.interface import Range, Region
from transfer.ranges import total_nbytes
from transfer.region import RegisteredRegion, check_spans
from transfer.token import Endpoint
from transfer.transports import Move

if TYPE_CHECKING:
    from tests.sim.transfer import SimTransfer

SILENCE_S = 2.0  # a peer that moves nothing for this long is lost
QUIET_S = 0.3  # until a read that was given up has ended: what every real transport keeps to
POLL_S = 0.02
MIN_PIECE_NBYTES = 256
PIECES_PER_OPERATION = 8


class Hold(Protocol):
    """Decides whether a piece may move now."""

    def admits(self) -> bool: ...


Arrivals = Callable[[Sequence[Range]], Callable[[Range], None]]  # begun: who sees each piece


class SimBulk:
    """All lives of all nodes, and the regions whose pieces are held.

    Attributes:
        arrivals: who looks at what is read into a region: told of an operation when it begins.
    """

    def __init__(self, fabric: SimFabric) -> None:
        self.fabric = fabric
        self.holds: WeakKeyDictionary[RegisteredRegion, Hold] = WeakKeyDictionary()
        self.arrivals: WeakKeyDictionary[Region, Arrivals] = WeakKeyDictionary()
        self._lives: dict[str, list[SimTransfer]] = {}

    def add(self, transfer: SimTransfer) -> int:
        """Return the number of this life: 1 for the first."""
        lives = self._lives.setdefault(transfer.node, [])
        lives.append(transfer)
        return len(lives)

    def owner(self, endpoint: Endpoint) -> SimTransfer:
        """Return the life that ``endpoint`` names.

        Raises:
            Stale: another life has taken its place.
            PeerUnreachable: there never was anybody.
        """
        lives = self._lives.get(endpoint.tcp)
        if not lives:
            raise PeerUnreachable(f"nothing answers at {endpoint.tcp}")
        if lives[-1].incarnation != endpoint.incarnation:
            raise Stale(
                f"{endpoint.tcp} answers as {lives[-1].incarnation}, the token names "
                f"{endpoint.incarnation}: it was restarted"
            )
        return lives[-1]


class SimOperation:
    """One read or write. ``user`` is the engine that asked for it."""

    def __init__(self, bulk: SimBulk, user: SimTransfer, move: Move) -> None:
        self._bulk = bulk
        self._fabric = bulk.fabric
        self._user = user
        self._move = move
        self._pieces = list(cut(move.ranges, user.config.piece_nbytes))
        self._num_moved = 0
        self._waiter: asyncio.Future[None] | None = None
        self._interruption: TransferError | None = None
        faults = self._fabric.plan
        arrivals = bulk.arrivals.get(move.region) if move.right == "r" else None
        self._landed = None if arrivals is None else arrivals(move.ranges)
        self._breaks_at = self._drawn(faults.bulk_fail)
        self._corrupts_at = self._drawn(faults.bulk_corrupt)

    def _drawn(self, probability: float) -> int | None:
        """Return the piece that a fault hits; None for no fault."""
        rng = self._fabric.rng
        return rng.randrange(len(self._pieces)) if rng.random() < probability else None

    @property
    def _kind(self) -> str:
        return "read" if self._move.right == "r" else "write"

    async def run(self) -> None:
        """Move every byte, or raise why not."""
        try:
            async with asyncio.timeout_at(self._move.deadline_s):
                owner = await self._reach()
                for index, piece in enumerate(self._pieces):
                    await self._move_piece(owner, index, piece)
                    self._num_moved = index + 1
                await self._sleep(self._fabric.delay_s())
                owner.count_served(total_nbytes(self._pieces))
        except TimeoutError as error:
            await self._run_out()
            self._leave_behind()
            name = self._move.token.endpoint.tcp
            raise DeadlineExceeded(f"{self._kind} at {name} took too long") from error
        except asyncio.CancelledError:
            await self._run_out()
            self._leave_behind()
            raise
        except BaseException:
            self._leave_behind()
            raise

    async def _reach(self) -> SimTransfer:
        endpoint = self._move.token.endpoint
        await self._sleep(self._fabric.delay_s())
        await self._until_it_answers(self._bulk.owner(endpoint))
        owner = self._bulk.owner(endpoint)
        check_spans(
            [(r.remote_offset, r.nbytes) for r in self._move.ranges],
            owner.serve(self._move).nbytes,
        )
        return owner

    async def _move_piece(self, owner: SimTransfer, index: int, piece: Range) -> None:
        speed = self._fabric.bulk_bytes_per_s(self._user.node, owner.node)
        await self._sleep(piece.nbytes / speed * self._fabric.rng.uniform(0.5, 2.0))
        await self._until_it_answers(owner)
        await self._until_admitted(owner)
        if index == self._breaks_at:
            raise PeerLost(f"the bulk connection to {owner.node} broke")
        remote = owner.serve(self._move)
        data = bytearray(self._source(remote, piece))
        if index == self._corrupts_at:
            data[self._fabric.rng.randrange(len(data))] ^= 1 << self._fabric.rng.randrange(8)
        self._put(remote, piece, data)
        what = f"{self._kind} {self._user.node}>{owner.node} {_text(piece)}"
        self._fabric.trace.add(self._fabric.loop.now_s, what, bytes(data))
        self._fabric.arrived()

    def _source(self, remote: RegisteredRegion, piece: Range) -> memoryview:
        if self._move.right == "r":
            return remote.view[piece.remote_offset : piece.remote_offset + piece.nbytes]
        return self._move.region.view[piece.local_offset : piece.local_offset + piece.nbytes]

    def _put(self, remote: RegisteredRegion, piece: Range, data: bytes | bytearray) -> None:
        if self._move.right == "r":
            start = piece.local_offset
            self._move.region.view[start : start + piece.nbytes] = data
            if self._landed is not None:
                self._landed(piece)
        else:
            start = piece.remote_offset
            remote.view[start : start + piece.nbytes] = data

    async def _until_admitted(self, owner: SimTransfer) -> None:
        while True:
            hold = self._bulk.holds.get(owner.serve(self._move))
            if hold is None or hold.admits():
                return
            await self._sleep(POLL_S)
            await self._until_it_answers(owner)

    async def _until_it_answers(self, owner: SimTransfer) -> None:
        """Return when both directions work and the owner lives; PeerLost after a long silence."""
        silent_s = 0.0
        while owner.closed or owner.life.paused or self._is_cut_off(owner):
            if owner.said_goodbye and not self._is_cut_off(owner):
                raise PeerClosed(f"{owner.node} closed its transfer engine")
            if silent_s >= SILENCE_S or self._is_reset(owner):
                raise PeerLost(f"{owner.node} does not answer")
            await self._sleep(POLL_S)
            silent_s += POLL_S

    def _is_cut_off(self, owner: SimTransfer) -> bool:
        fabric, user = self._fabric, self._user
        return fabric.is_blocked(user.node, owner.node) or fabric.is_blocked(owner.node, user.node)

    def _is_reset(self, owner: SimTransfer) -> bool:
        """A dead process on a living host answers with a reset, unless it went silently."""
        return owner.closed and not owner.life.died_silently and not self._is_cut_off(owner)

    async def _run_out(self) -> None:
        """Perhaps let the piece of a read that was under way arrive before the operation ends."""
        if self._move.right == "w" or self._num_moved >= len(self._pieces):
            return
        if self._fabric.rng.random() >= self._fabric.plan.late_read or not self._user.life.alive:
            return
        try:
            await self._sleep(min(10 * self._fabric.delay_s(), QUIET_S))
            owner = self._bulk.owner(self._move.token.endpoint)
            remote = owner.serve(self._move)
        except TransferError:
            return
        if owner.closed or owner.life.paused or self._is_cut_off(owner):
            return
        piece = self._pieces[self._num_moved]
        data = bytes(self._source(remote, piece))
        self._put(remote, piece, data)
        what = f"late read {self._user.node}>{owner.node} {_text(piece)}"
        self._fabric.trace.add(self._fabric.loop.now_s, what, data)

    def _leave_behind(self) -> None:
        """Perhaps let the piece that was under way reach the owner after all, later."""
        if self._move.right == "r" or self._num_moved >= len(self._pieces):
            return
        if self._fabric.rng.random() >= self._fabric.plan.late_write:
            return
        piece = self._pieces[self._num_moved]
        start = piece.local_offset
        data = bytes(self._move.region.view[start : start + piece.nbytes])

        def land() -> None:
            try:
                owner = self._bulk.owner(self._move.token.endpoint)
                remote = owner.serve(self._move)
            except TransferError:
                return
            if not owner.closed and not self._is_cut_off(owner):
                self._put(remote, piece, data)
                what = f"late write {self._user.node}>{owner.node} {_text(piece)}"
                self._fabric.trace.add(self._fabric.loop.now_s, what, data)

        when_s = self._fabric.loop.now_s + 10 * self._fabric.delay_s()
        self._fabric.loop.call_at_true_time(when_s, land, context=contextvars.Context())

    def interrupt(self, error: TransferError) -> None:
        """End the operation with ``error`` at its next step."""
        self._interruption = self._interruption or error
        if self._waiter is not None:
            _wake(self._waiter)

    async def _sleep(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(delay_s, _wake, self._waiter)
        try:
            if self._interruption is None:
                await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        if self._interruption is not None:
            raise self._interruption


def _text(piece: Range) -> str:
    return f"{piece.local_offset}/{piece.remote_offset}+{piece.nbytes}"


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def cut(ranges: Sequence[Range], max_nbytes: int) -> Iterator[Range]:
    """Cut ranges into pieces that move one at a time."""
    size = max(MIN_PIECE_NBYTES, min(total_nbytes(ranges) // PIECES_PER_OPERATION, max_nbytes))
    for r in ranges:
        for start in range(0, r.nbytes, size):
            nbytes = min(size, r.nbytes - start)
            yield Range(r.remote_offset + start, r.local_offset + start, nbytes)
