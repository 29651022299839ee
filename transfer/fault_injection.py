"""Injects faults into real transports: performs what ``FaultSchedule`` decided.

Owns the wrapper around each transport of one engine and the operations that are held up on purpose.
Knows no sockets: a connection is broken by ``Transport.disrupt``, and bytes move by the wrapped
transport's own ``move``, once or in two parts. So the promises of ``interface.Transfer`` hold as
they do without faults: deadlines and cancels are obeyed, and an operation that has ended touches
nothing any more.

What is corrupted is always the destination: for a read the local region, for a write what arrives
at the peer (some bytes are written a second time, from scratch memory). The caller's source is
never touched.

::

    DELAY      pause ─────────▶ move all
    DROP       pause until the deadline
    STALL      move head ──▶ pause ──▶ move tail
    TRUNCATE   move head ──▶ disrupt ──▶ PeerLost
    RESET      move head ──▶ move tail, disrupt while it is on its way ──▶ PeerLost
    CORRUPT    move all ──▶ flip some bytes of the destination
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from transfer.counters import CounterBoard
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost
from transfer.fault_memory import cut, flip_local, flipped_source
from transfer.fault_rules import FaultKind, FaultRules, Operation
from transfer.fault_schedule import Fault, FaultSchedule
from transfer.ranges import total_nbytes
from transfer.region import HostRegion
from transfer.token import Endpoint
from transfer.transports import Move, Transport

_LOG = logging.getLogger(__name__)


class FaultInjector:
    """The faults of one engine, on all of its transports. Used from one event loop at a time.

    Args:
        rules: what to inject; ``from`` and ``until`` count from ``wrap``.
        counters: where ``faults_injected`` is counted.
        register: makes scratch memory known to the transports.
    """

    def __init__(
        self,
        rules: FaultRules,
        counters: CounterBoard,
        register: Callable[[memoryview], HostRegion],
    ) -> None:
        self.rules = rules
        self.register = register
        self._counters = counters
        self._schedule = FaultSchedule(rules)
        self._started_s: float | None = None
        self._held: set[asyncio.Future[None]] = set()
        self._closed = False

    def wrap(self, transports: Mapping[str, Transport]) -> dict[str, Transport]:
        """Return the transports with faults, under the same names, and say so loudly.

        Without rules, the transports themselves: nothing is slower for what is not used.
        """
        if not self.rules.rules:
            return dict(transports)
        self._started_s = asyncio.get_running_loop().time()
        _LOG.warning(
            "FAULTS ARE INJECTED into every transfer of this process, as asked for: %s",
            self.rules.describe(),
        )
        for rule in self.rules.rules:
            if rule.transport is not None and rule.transport not in transports:
                _LOG.warning(
                    "fault rule %r NEVER APPLIES: this engine has no %s, only %s: name one of "
                    "these, or choose the transport (--transfer)",
                    *(rule.text, rule.transport, ", ".join(transports)),
                )
        return {name: FaultyTransport(inner, self) for name, inner in transports.items()}

    def next(self, transport: str, move: Move) -> Fault | None:
        """Return what happens to ``move``, which is counted."""
        assert self._started_s is not None, "wrap() comes first"
        nbytes = total_nbytes(move.ranges)
        operation = Operation(move.right, transport, move.token.endpoint, nbytes)
        now_s = asyncio.get_running_loop().time() - self._started_s
        fault = self._schedule.next(operation, now_s)
        if fault is not None:
            self._counters.add(faults_injected=1)
            if self._schedule.injected[fault.kind] == 1:
                _say_first(fault, operation)
        return fault

    async def pause(self, seconds: float | None, deadline_s: float) -> None:
        """Hold an operation up for ``seconds``; None: until it ends for another reason.

        Raises:
            DeadlineExceeded: the operation's deadline came first.
            PeerClosed: the engine was closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        until_s = deadline_s if seconds is None else min(loop.time() + seconds, deadline_s)
        held: asyncio.Future[None] = loop.create_future()
        self._held.add(held)
        try:
            if not self._closed:
                async with asyncio.timeout_at(until_s):
                    await held
        except TimeoutError:
            if until_s == deadline_s:
                raise DeadlineExceeded("the deadline passed during an injected fault") from None
            return
        finally:
            self._held.discard(held)
        raise PeerClosed("this transfer engine was closed")

    def close(self) -> None:
        """End what is held up, with ``PeerClosed``. Idempotent."""
        self._closed = True
        for held in self._held:
            if not held.done():
                held.set_result(None)


def _say_first(fault: Fault, operation: Operation) -> None:
    right, transport, endpoint, nbytes = operation
    _LOG.warning(
        "injected the first %s: %s of %d bytes over %s, peer %s, rule %r; more are only counted",
        fault.kind.value,
        "read" if right == "r" else "write",
        nbytes,
        transport,
        endpoint.tcp or endpoint.loopback,
        fault.rule.text,
    )


class FaultyTransport:
    """``transports.Transport`` around another one."""

    def __init__(self, inner: Transport, injector: FaultInjector) -> None:
        self._inner = inner
        self._injector = injector

    @property
    def name(self) -> str:
        return self._inner.name

    async def start(self) -> None:
        await self._inner.start()

    async def close(self) -> None:
        self._injector.close()
        await self._inner.close()

    def disrupt(self, endpoint: Endpoint) -> None:
        self._inner.disrupt(endpoint)

    async def move(self, move: Move) -> None:
        """Move as the wrapped transport does, with at most one fault.

        Raises:
            PeerLost: a reset or truncation was injected.
            TransferError: as without faults.
        """
        fault = self._injector.next(self.name, move)
        if fault is None:
            await self._inner.move(move)
            return
        head, tail = cut(move.ranges, fault.after_nbytes)
        match fault.kind:
            case FaultKind.DELAY:
                await self._injector.pause(fault.pause_s, move.deadline_s)
                await self._inner.move(move)
            case FaultKind.DROP:
                await self._injector.pause(None, move.deadline_s)
            case FaultKind.STALL:
                await self._move_if_any(move._replace(ranges=head))
                await self._injector.pause(fault.pause_s, move.deadline_s)
                await self._inner.move(move._replace(ranges=tail))
            case FaultKind.TRUNCATE:
                await self._move_if_any(move._replace(ranges=head))
                self._break(move)
            case FaultKind.RESET:
                await self._move_if_any(move._replace(ranges=head))
                await self._reset(move._replace(ranges=tail))
            case FaultKind.CORRUPT:
                await self._inner.move(move)
                await self._corrupt(move, fault)

    async def _move_if_any(self, move: Move) -> None:
        if move.ranges:
            await self._inner.move(move)

    async def _reset(self, move: Move) -> None:
        """Begin to move, and break the connection as soon as the transport has begun."""
        loop = asyncio.get_running_loop()
        breaking = loop.call_soon(self._disrupt, move.token.endpoint)
        try:
            await self._inner.move(move)
        finally:
            breaking.cancel()
        self._break(move)  # it was faster than the break, or had no connection yet

    def _break(self, move: Move) -> None:
        self._disrupt(move.token.endpoint)
        raise PeerLost("the connection was broken by fault injection")

    def _disrupt(self, endpoint: Endpoint) -> None:
        with suppress(PeerClosed):  # the engine is closed: nothing is left to break
            self._inner.disrupt(endpoint)

    async def _corrupt(self, move: Move, fault: Fault) -> None:
        if move.right == "r":
            flip_local(move.region, move.ranges, fault.flips)
            return
        scratch, ranges = flipped_source(move.region, move.ranges, fault.flips)
        region = self._injector.register(memoryview(scratch))
        try:
            await self._inner.move(move._replace(region=region, ranges=ranges))
        finally:
            region.revoke()
