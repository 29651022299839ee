"""Transport over UCX: RDMA, NVLink, shared memory or tcp, whatever UCX finds between two peers.

Owns the ucx thread, the UCX context, one server and the peers this engine talks to. UCX lives on a
thread of its own, with a stock asyncio loop: its progress copies memory, which would hold up the
sockets of other transports, and under uvloop it takes milliseconds for each message. Peers are
keyed by address *and* incarnation, each with a worker of its own: a slow peer slows nobody else.

Trust. Both sides prove the cluster secret before they learn how to reach each other's workers, and
tags carry a key that only the two know. UCX itself authenticates nobody and encrypts nothing: its
own sockets listen on the devices that it uses (only ``lo`` if ``host`` is this machine's; else see
``UCX_NET_DEVICES``), so its network must be as trusted as an RDMA fabric is.
"""

from __future__ import annotations

import asyncio

from transfer.config import TransferConfig, is_local_host
from transfer.counters import CounterBoard
from transfer.device_memory import DeviceEvent
from transfer.errors import PeerClosed, PeerLost, PeerUnreachable, TransferError
from transfer.io_thread import IoThread
from transfer.region import DeviceRegion, RegionTable
from transfer.tcp_resolver import Resolver
from transfer.tcp_sockets import join_address, listen
from transfer.token import Endpoint
from transfer.transports import Move
from transfer.ucx_binding import Context, open_context
from transfer.ucx_client import MAX_REQUEST_NBYTES
from transfer.ucx_farewell import Farewells
from transfer.ucx_operation import UcxOperation
from transfer.ucx_peer import UcxPeer
from transfer.ucx_server import UcxServer
from transfer.vigil import Vigil

MAX_NOW_RANGES = 16  # of a read that is sent from the application's thread
SPIN_S = 0.0005  # the ucx thread awake after the last small operation of a series
OFTEN_S = 0.001  # between the operations of a series: one over UCX's tcp takes half of that
FAREWELL_LIMIT_S = 0.1  # for peers to hang up, when everything is stopped at once
FIRST_EPHEMERAL = 32_768  # Linux: net.ipv4.ip_local_port_range
FIRST_BESIDE, NUM_BESIDE = 10_000, 20_000


class UcxTransport:
    """Serves this engine's regions and reaches those of others."""

    name = "ucx"

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        regions: RegionTable,
        counters: CounterBoard,
        beside: int,
    ) -> None:
        """Args:
        beside: the engine's tcp port, which gives that of ucx if it is free: a restart on the
            same port answers at the same address.
        """
        self._config = config
        self._incarnation = incarnation
        self._io = IoThread(
            f"kvferry-ucx-{incarnation[:6]}", vigil=Vigil(spin_s=SPIN_S, often_s=OFTEN_S)
        )
        self._server = UcxServer(
            config, incarnation, regions, counters, on_served=self._io.expect_more
        )
        self._context: Context | None = None
        self._resolver = Resolver()
        self._farewells = Farewells()
        self._peers: dict[tuple[str, str], UcxPeer] = {}  # on the ucx loop, or lent
        try:
            self._sock = listen(config.host, config.ucx_port or port_beside(beside))
        except PeerUnreachable:
            if config.ucx_port:
                raise
            self._sock = listen(config.host, 0)
        self.address = join_address(config.advertised, self._sock.getsockname()[1])

    async def start(self) -> None:
        """Open UCX and serve.

        Raises:
            UcxUnavailable: there is no library, device or permission; says what to install or set.
        """
        self._io.start()
        await self._io.run(self._open())

    async def _open(self) -> None:
        self._context = open_context(only_this_host=is_local_host(self._config.host))
        self._server.serve(self._sock, self._context, self._farewells)

    @property
    def is_alive(self) -> bool:
        """True while the ucx thread runs."""
        return self._io.is_alive

    def details(self) -> str:
        """Return library, transports and devices, such as ``ucx 1.21.0 over tcp/lo``."""
        if self._context is None:
            return "ucx, not open"
        return f"{self._context.version} over {', '.join(self._context.resources)}"

    async def move(self, move: Move) -> None:
        config = self._config
        if isinstance(move.region, DeviceRegion):
            await _passed(move.region.memory.fence())
        operation = UcxOperation(
            move,
            max_ranges=config.max_ranges_per_request,
            max_nbytes=min(config.request_nbytes, MAX_REQUEST_NBYTES),
        )
        if not self._io.try_now(self._submit_now, operation):
            self._io.call(self._submit, operation)
        await operation.wait(self._withdraw_soon)

    def _submit_now(self, operation: UcxOperation) -> bool:
        """Ask from the application's thread if that takes no longer than telling the ucx thread."""
        move, endpoint = operation.move, operation.move.token.endpoint
        peer = self._peers.get((endpoint.ucx, endpoint.incarnation))
        if peer is None or not peer.quiet or move.right == "w" or len(move.ranges) > MAX_NOW_RANGES:
            return False
        peer.submit(operation)
        return True

    def _submit(self, operation: UcxOperation) -> None:
        endpoint = operation.move.token.endpoint
        key = (endpoint.ucx, endpoint.incarnation)
        peer = self._peers.get(key)
        if peer is None:
            assert self._context is not None, "used before start"
            self._peers = {k: p for k, p in self._peers.items() if not p.idle}
            peer = UcxPeer(
                self._config,
                self._incarnation,
                self._context,
                self._farewells,
                self._resolver,
                *key,
                on_done=self._io.expect_more,
            )
            self._peers[key] = peer
        peer.submit(operation)

    def _withdraw_soon(self, operation: UcxOperation, error: TransferError) -> None:
        self._io.call(self._withdraw, operation, error)

    def _withdraw(self, operation: UcxOperation, error: TransferError) -> None:
        endpoint = operation.move.token.endpoint
        peer = self._peers.get((endpoint.ucx, endpoint.incarnation))
        if peer is not None:
            peer.withdraw(operation, error)
        else:
            operation.finish(error)

    def disrupt(self, endpoint: Endpoint) -> None:
        self._io.call(self._disrupt, (endpoint.ucx, endpoint.incarnation))

    def _disrupt(self, key: tuple[str, str]) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            peer.abort(PeerLost(f"the connection to {key[0]} was broken on purpose"))

    async def close(self) -> None:
        await self._io.run(self._finish())

    async def _finish(self) -> None:
        """Own operations end first; then both sides say goodbye, all at the same time."""
        error = PeerClosed("this transfer engine was closed")
        await asyncio.gather(
            self._server.finish(), *(peer.finish(error) for peer in self._peers.values())
        )

    def stop(self, error: TransferError) -> None:
        """Cut every connection, close UCX and end its thread. Idempotent; waits for it."""
        self._io.stop(lambda: self._release(error))
        self._sock.close()

    def _release(self, error: TransferError) -> None:
        self._server.abort(error)
        for peer in self._peers.values():
            peer.abort(error)
        self._peers.clear()
        self._farewells.end(FAREWELL_LIMIT_S)
        if self._context is not None:
            self._context.close()


def port_beside(port: int) -> int:
    """Return the port of ucx for a tcp port: the next one, or for one that the kernel picked, one
    out of those that it does not pick by itself (its neighbours are often taken)."""
    return port + 1 if port < FIRST_EPHEMERAL else FIRST_BESIDE + port % NUM_BESIDE


async def _passed(fence: DeviceEvent) -> None:
    """Wait until the device has done what the fence stands behind."""
    if not fence.done:
        await asyncio.get_running_loop().run_in_executor(None, fence.wait)
