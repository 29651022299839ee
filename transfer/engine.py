"""The bulk transfer engine of one process: registers memory, reads and writes that of others.

Owns the regions, the I/O thread, the copy threads and the transports; implements
``interface.Transfer``. Checks each operation once (token, ranges, rights, deadline) and hands it to
the transport that reaches the peer. Knows no pages.

::

    new ──start()──▶ running ──close() / abort()──▶ closed
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence
from enum import Enum

from msgspec import structs

from transfer.config import TransferConfig
from transfer.copier import Copier
from transfer.counters import CounterBoard, TransferCounters
from transfer.device_copier import DeviceCopiers
from transfer.device_slots import limits_of
from transfer.device_stage import DeviceStages
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerClosed,
    PeerUnreachable,
    RegionRevoked,
    TransferError,
    Unauthorized,
)
from transfer.fault_injection import FaultInjector
from transfer.interface import Priority, Range, Region, Rights, remaining_s
from transfer.io_thread import IoThread
from transfer.loopback import LoopbackOwner, LoopbackTransport
from transfer.operation_limit import OperationLimit
from transfer.ranges import plan, total_nbytes
from transfer.region import HostRegion, RegionTable, RegisteredRegion
from transfer.route import Router
from transfer.shm import ShmTransport
from transfer.shm_memory import shared_memory_available
from transfer.tcp import TcpTransport
from transfer.token import TOKEN_VERSION, Endpoint, Token, decode_token, encode_token
from transfer.transports import Move, Transport, host_id, process_id
from transfer.ucx import UcxTransport
from transfer.ucx_binding import UcxUnavailable, has_rdma_device, installed_binding

_LOG = logging.getLogger(__name__)
_LOOPBACK_NUMBERS = itertools.count(1 << 16)  # above every port, which name engines, too


class _State(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class TransferEngine:
    """One per process. Its methods are called from one event loop at a time."""

    def __init__(self, config: TransferConfig | None = None) -> None:
        self._config = config or TransferConfig()
        self._state = _State.NEW
        self.incarnation: str = secrets.token_hex(8)
        self._counters = CounterBoard()
        self._limit = OperationLimit(self._config.max_operations_per_peer)
        self._regions = RegionTable(self._encode_token)
        self._copier = Copier(
            threads=self._config.copy_threads,
            piece_nbytes=self._config.piece_nbytes,
            inline_nbytes=self._config.inline_copy_nbytes,
        )
        self._copiers = DeviceCopiers()
        self._devices = DeviceStages(self._copiers, self._regions, limits_of(self._config))
        self._io: IoThread | None = None
        self._tcp: TcpTransport | None = None
        self._shm: ShmTransport | None = None
        self._ucx: UcxTransport | None = None
        self._loopback: LoopbackTransport | None = None
        self._transports: dict[str, Transport] = {}
        rules, scratch = self._config.fault_rules, self._regions.register_host
        self._faults = FaultInjector(rules, self._counters, scratch)
        self._endpoint = Endpoint(self.incarnation, process_id(), host_id())
        self._router = Router(self._config.transport, self._counters, self._devices)

    @property
    def config(self) -> TransferConfig:
        return self._config

    @property
    def transport(self) -> str:
        """The transport in use; for ``auto``, the one for other processes of this host."""
        if self._config.transport != "auto" or self._state is _State.NEW:
            return self._config.transport
        return "shm" if self._endpoint.shm else "ucx" if self._endpoint.ucx else "tcp"

    @property
    def address(self) -> str:
        """``host:port`` at which peers reach this engine over tcp; empty for pure loopback."""
        return self._endpoint.tcp

    @property
    def is_healthy(self) -> bool:
        """True while the engine runs and its I/O and device threads are alive."""
        threads = self._io is not None and self._io.is_alive and self._copiers.are_alive
        if self._endpoint.ucx and self._ucx is not None:
            threads = threads and self._ucx.is_alive
        return self._state is _State.RUNNING and threads

    def counters(self) -> TransferCounters:
        return self._counters.snapshot()

    @property
    def _wants_shm(self) -> bool:
        return self._config.transport in ("auto", "shm") and shared_memory_available()

    @property
    def _wants_files(self) -> bool:
        """Peers map files, or tcp sends from them without a copy."""
        asked = self._config.transport
        return asked in ("auto", "shm", "tcp") and shared_memory_available()

    @property
    def _wants_ucx(self) -> bool:
        asked = self._config.transport
        return asked == "ucx" or (
            asked == "auto" and has_rdma_device() and installed_binding() is not None
        )

    async def start(self) -> None:
        """Listen on every transport that the configuration asks for.

        Raises:
            PeerUnreachable: an address cannot be bound, or the transport is not possible here.
        """
        assert self._state is _State.NEW, f"start() of an engine that is {self._state.value}"
        if self._config.transport == "shm" and not shared_memory_available():
            raise PeerUnreachable(
                "transport 'shm' needs Linux memfd and abstract sockets; choose 'auto' or 'tcp'"
            )
        self._io = IoThread(f"kvferry-io-{self.incarnation[:6]}")
        self._io.start()
        self._state = _State.RUNNING
        try:
            self._open_transports(self._io)
            for name in list(self._transports):
                await self._start_transport(name)
        except BaseException:
            self.abort()
            raise
        self._say_what_was_chosen()

    async def _start_transport(self, name: str) -> None:
        try:
            await self._transports[name].start()
        except UcxUnavailable as error:
            if self._config.transport == "ucx":
                raise
            _LOG.warning("transfer: auto does not use ucx, though there is RDMA: %s", error)
            self._counters.add(fallbacks=1)
            del self._transports[name]
            self._endpoint = structs.replace(self._endpoint, ucx="")

    def _open_transports(self, io: IoThread) -> None:
        config = self._config
        tcp = shm = ucx = loopback = ""
        if config.transport != "loopback":
            self._tcp = TcpTransport(
                config, self.incarnation, self._regions, self._counters, io, self._copiers
            )
            self._transports["tcp"] = self._tcp
            tcp = self._tcp.address
        if self._wants_shm:
            shm = f"kvferry/{tcp}"  # a restart on the same port answers at the same name
            self._shm = ShmTransport(config, self.incarnation, self._regions, io, self._copier, shm)
            self._transports["shm"] = self._shm
        if self._wants_ucx and self._tcp is not None:
            self._ucx = UcxTransport(
                config, self.incarnation, self._regions, self._counters, beside=self._tcp.port
            )
            self._transports["ucx"] = self._ucx
            ucx = self._ucx.address
        if config.transport in ("auto", "loopback"):
            # A restart on the same port answers at the same name, here as well.
            loopback = tcp or f"local-{config.port or next(_LOOPBACK_NUMBERS)}"
            owner = LoopbackOwner(self.incarnation, self._regions, self._counters)
            self._loopback = LoopbackTransport(loopback, owner, self._copier, self._devices)
            self._transports["loopback"] = self._loopback
        self._endpoint = Endpoint(
            self.incarnation,
            process_id(),
            host_id(),
            loopback=loopback,
            shm=shm,
            tcp=tcp,
            ucx=ucx,
        )
        self._transports = self._faults.wrap(self._transports)

    def _say_what_was_chosen(self) -> None:
        asked, what = self._config.transport, self.describe()
        if asked != "auto":
            _LOG.info("transfer: %s as configured: %s", asked, what)
        elif self._shm is not None or self._endpoint.ucx:
            shm = "auto chose shm for this host (memfd works)" if self._shm else "no shared memory"
            far = "ucx (RDMA)" if self._endpoint.ucx else "tcp (no RDMA device with ucx)"
            _LOG.info("transfer: %s, %s for other hosts: %s", shm, far, what)
        else:
            _LOG.warning("transfer: auto fell back to tcp at %s: no shared memory", self.address)
            self._counters.add(fallbacks=1)

    def describe(self) -> str:
        """Return for people by what and where peers reach this engine."""
        shm = "shm by memfd" if self._endpoint.shm else ""
        ucx = self._ucx.details() if self._ucx is not None and self._endpoint.ucx else ""
        tcp = f"tcp at {self.address}" if self.address else ""
        loopback = "loopback in this process" if self._endpoint.loopback else ""
        return "; ".join(filter(None, (ucx, shm, loopback, tcp))) or "not started"

    def register(self, buffer: object) -> RegisteredRegion:
        """Register a C-contiguous numpy array, torch tensor, mmap, bytearray or CUDA array.

        A slice of what ``allocate`` returned stays reachable through shared memory. Memory of a
        device: an operation of ours begins after all work of the calling thread's current stream,
        and has ended on the device when it returns. For an operation of a peer the owner orders:
        what it tells a peer to read must be there (synchronise first).

        Raises:
            TypeError: not a buffer in host or CUDA memory.
            ValueError: not contiguous.
            PeerClosed: the engine is closed.
        """
        self._check_not_closed()
        return self._regions.register(buffer)

    def allocate(self, nbytes: int) -> HostRegion:
        """Return zeroed, page-aligned memory; for shm (mapped by peers) and tcp (sent without a
        copy) in a memfd, which takes one descriptor until the last region in it is revoked."""
        self._check_not_closed()
        return self._regions.allocate(nbytes, shared=self._wants_files)

    def _encode_token(self, region: RegisteredRegion, rights: Rights, capability: bytes) -> bytes:
        assert self._state is _State.RUNNING, f"export() while the engine is {self._state.value}"
        return encode_token(
            Token(
                version=TOKEN_VERSION,
                endpoint=self._endpoint,
                region_id=region.region_id,
                nbytes=region.nbytes,
                rights=rights,
                capability=capability,
                in_shared_memory=self._shm is not None and region.in_shared_memory,
            )
        )

    async def read(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        into: Region,
        deadline_s: float,
        priority: Priority = Priority.NOW,
    ) -> None:
        """Copy ranges of a peer's region into ``into``; see ``interface.Transfer``.

        Raises:
            TransferError: see ``transfer.errors``; the ranges of ``into`` are then undefined.
        """
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
        """Copy ranges of ``source`` into a peer's region; see ``interface.Transfer``.

        Raises:
            TransferError: see ``transfer.errors``; the remote ranges are then undefined.
        """
        await self._counted("w", token, ranges, source, deadline_s, priority)

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
            move = self._check(right, decode_token(token), ranges, region, deadline_s, priority)
            if move.ranges:
                with self._limit.admit(move.token.endpoint.incarnation):
                    await self._router.move(move, self._endpoint, self._transports)
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
        priority: Priority,
    ) -> Move:
        """Return the operation with merged ranges, or raise what is wrong with it."""
        self._check_not_closed()
        assert self._state is _State.RUNNING, "the engine was not started"
        if not isinstance(region, RegisteredRegion) or not self._regions.owns(region):
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
        if merged and not remaining_s(deadline_s) > 0:  # NaN is no deadline either
            raise DeadlineExceeded("the deadline had passed before the operation began")
        return Move(right, token, merged, region, deadline_s, priority)

    def _check_not_closed(self) -> None:
        if self._state is _State.CLOSED:
            raise PeerClosed("this transfer engine is closed")

    async def close(self) -> None:
        """Say goodbye to every peer, then stop. Idempotent; takes at most a fraction of a second.

        Afterwards, also when cancelled, no memory of this process is touched by the engine.
        Operations in flight raise ``PeerClosed``.
        """
        if self._state is not _State.RUNNING:
            self._stop()
            return
        self._state = _State.CLOSED
        self._copier.close()
        try:
            for transport in (self._loopback, self._shm, self._ucx, self._tcp):
                if transport is not None:
                    await transport.close()
        finally:
            self._stop()

    def abort(self) -> None:
        """Stop at once; peers see a broken connection. Idempotent.

        Views of regions keep their bytes; nothing is copied for that (``shm_memory``).
        """
        if self._state is _State.RUNNING:
            for transport in (self._loopback, self._shm):
                if transport is not None:
                    transport.abort()
        self._stop()

    def _stop(self) -> None:
        """Release everything. Idempotent."""
        self._state = _State.CLOSED
        self._faults.close()
        self._copier.close()
        self._copiers.close()
        if self._ucx is not None:
            self._ucx.stop(PeerClosed("this transfer engine was closed"))
        if self._io is not None:
            self._io.stop(self._release)
        self._regions.revoke_all()

    def _release(self) -> None:
        """Close all sockets; on the I/O loop."""
        error = PeerClosed("this transfer engine was closed")
        if self._tcp is not None:
            self._tcp.release(error)
        if self._shm is not None:
            self._shm.release(error)
