"""Bulk transfers between simulated nodes: the contract of ``transfer.interface``, in virtual time.

Owns ``SimTransfer``: the regions of one life of one node and the operations it has under way. Who
may use a region is decided by the real table (``transfer/region.py``), which ranges move by the
real plan (``transfer/ranges.py``); only the wire is simulated (``tests/sim/bulk.py``). Knows
no pages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from tests.sim.bulk import SimBulk, SimOperation
from tests.sim.loop import Life
from transfer.config import TransferConfig
from transfer.counters import CounterBoard, TransferCounters
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerClosed,
    PeerLost,
    RegionRevoked,
    TransferError,
    Unauthorized,
)
from transfer.interface import Priority, Range, Region, Rights, remaining_s
from transfer.operation_limit import OperationLimit
from transfer.ranges import plan, total_nbytes
from transfer.region import HostRegion, RegionTable, RegisteredRegion
from transfer.token import TOKEN_VERSION, Endpoint, Token, decode_token, encode_token
from transfer.transports import Move


class SimTransfer:
    """Bulk transfers of one life of one node.

    Attributes:
        said_goodbye: it was closed in order, so that its peers know.
    """

    def __init__(
        self,
        bulk: SimBulk,
        node: str,
        life: Life,
        rng: random.Random,
        config: TransferConfig | None = None,
    ) -> None:
        self.node = node
        self.life = life
        self.rng = rng
        self.said_goodbye = False
        self.config = config or TransferConfig()
        self._bulk = bulk
        self.incarnation = f"{node}/{bulk.add(self)}"
        self._endpoint = Endpoint(self.incarnation, self.incarnation, node, tcp=node)
        self._regions = RegionTable(self._encode_token)
        self._counters = CounterBoard()
        self._limit = OperationLimit(self.config.max_operations_per_peer)
        self._operations: dict[SimOperation, str] = {}  # value: incarnation of the peer
        self._closed = False

    @property
    def transport(self) -> str:
        return "sim"

    @property
    def address(self) -> str:
        return self.node

    @property
    def closed(self) -> bool:
        return self._closed or not self.life.alive

    def counters(self) -> TransferCounters:
        return self._counters.snapshot()

    async def start(self) -> None:
        """Nothing to start."""

    def register(self, buffer: object) -> Region:
        self._check_not_closed()
        return self._regions.register(buffer)

    def allocate(self, nbytes: int) -> HostRegion:
        self._check_not_closed()
        return self._regions.allocate(nbytes, shared=False)

    async def read(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        into: Region,
        deadline_s: float,
        priority: Priority = Priority.NOW,
    ) -> None:
        await self._counted("r", token, ranges, into, deadline_s, priority)

    async def write(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        source: Region,
        deadline_s: float,
        priority: Priority = Priority.BACKGROUND,
    ) -> None:
        await self._counted("w", token, ranges, source, deadline_s, priority)

    async def close(self) -> None:
        self.said_goodbye = not self.closed or self.said_goodbye
        self.abort()

    def abort(self) -> None:
        self._closed = True
        for operation in self._operations:
            operation.interrupt(PeerClosed("this transfer engine was closed"))
        self._regions.revoke_all()

    def disrupt(self, endpoint: Endpoint) -> None:
        """Break the connection to ``endpoint``: what is under way there is lost."""
        for operation, incarnation in self._operations.items():
            if incarnation == endpoint.incarnation:
                operation.interrupt(PeerLost(f"the connection to {endpoint.tcp} was broken"))

    def serve(self, move: Move) -> RegisteredRegion:
        """The owner's side of every piece: check the token, return the region."""
        return self._regions.authorize(move.token.region_id, move.token.capability, move.right)

    def count_served(self, nbytes: int) -> None:
        self._counters.add(bytes_served=nbytes)

    def _encode_token(self, region: RegisteredRegion, rights: Rights, capability: bytes) -> bytes:
        size = region.nbytes
        return encode_token(
            Token(TOKEN_VERSION, self._endpoint, region.region_id, size, rights, capability, False)
        )

    async def _counted(
        self,
        right: Rights,
        token: bytes,
        ranges: Sequence[Range],
        region: Region,
        deadline_s: float,
        priority: Priority,
    ) -> None:
        try:
            move = self._check(right, decode_token(token), ranges, region, deadline_s)
            if move.ranges:
                await self._run(move._replace(priority=priority))
        except (TransferError, asyncio.CancelledError):
            self._counters.add(operations=1, errors=1, ranges_asked=len(ranges))
            raise
        nbytes = total_nbytes(move.ranges)
        moved = {"bytes_read": nbytes} if right == "r" else {"bytes_written": nbytes}
        self._counters.add(
            operations=1, ranges_asked=len(ranges), ranges_sent=len(move.ranges), **moved
        )

    def _check(
        self,
        right: Rights,
        token: Token,
        ranges: Sequence[Range],
        region: Region,
        deadline_s: float,
    ) -> Move:
        self._check_not_closed()
        if not isinstance(region, HostRegion) or not self._regions.owns(region):
            raise FrameInvalid("the local region is not one of this engine")
        if region.revoked:
            raise RegionRevoked("the local region is revoked")
        if right == "r" and region.readonly:
            raise Unauthorized("the local region is read-only; nothing can be read into it")
        if right not in token.rights:
            raise Unauthorized(f"the token grants {token.rights!r}, {right!r} is needed")
        merged = plan(
            ranges,
            local_nbytes=region.nbytes,
            remote_nbytes=token.nbytes,
            destination="local" if right == "r" else "remote",
        )
        if merged and not remaining_s(deadline_s) > 0:
            raise DeadlineExceeded("the deadline had passed before the operation began")
        return Move(right, token, merged, region, deadline_s)

    async def _run(self, move: Move) -> None:
        operation = SimOperation(self._bulk, self, move)
        self._operations[operation] = incarnation = move.token.endpoint.incarnation
        try:
            with self._limit.admit(incarnation):
                await operation.run()
        finally:
            del self._operations[operation]

    def _check_not_closed(self) -> None:
        if self.closed:
            raise PeerClosed("this transfer engine is closed")
