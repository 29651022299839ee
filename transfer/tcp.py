"""Transport over tcp: reaches every peer, on any host.

Owns one server and the peers this engine talks to. All sockets live on the I/O thread; this file is
the bridge from the application's loop. Peers are keyed by address *and* incarnation, each with
connections of its own: a slow peer slows nobody else.
"""

from __future__ import annotations

import asyncio

from transfer.config import TransferConfig
from transfer.counters import CounterBoard
from transfer.device_copier import DeviceCopiers
from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.io_thread import IoThread
from transfer.region import RegionTable
from transfer.tcp_answer import AnswerWatch
from transfer.tcp_cores import ReceiverCore
from transfer.tcp_operation import TcpOperation
from transfer.tcp_peer import TcpPeer
from transfer.tcp_resolver import Resolver
from transfer.tcp_server import TcpServer
from transfer.tcp_sockets import join_address, listen
from transfer.token import Endpoint
from transfer.transports import Move

MAX_NOW_RANGES = 16  # of a read that is sent from the application's thread


class TcpTransport:
    """Serves this engine's regions and reaches those of others."""

    name = "tcp"

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        regions: RegionTable,
        counters: CounterBoard,
        io: IoThread,
        copiers: DeviceCopiers,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._io = io
        self._core = ReceiverCore(io.native_id, io.loop)
        self._server = TcpServer(
            *(config, incarnation, regions, counters, copiers),
            served_small=io.expect_more,
            core=self._core,
        )
        self._watch = AnswerWatch(io)
        self._sock = listen(config.host, config.port)
        self.port: int = self._sock.getsockname()[1]
        self.address = join_address(config.advertised, self.port)
        self._resolver = Resolver()
        self._peers: dict[tuple[str, str], TcpPeer] = {}  # touched on the I/O loop, or lent, only

    async def start(self) -> None:
        await self._io.run(self._open())

    async def _open(self) -> None:
        self._watch.open()
        self._server.serve(self._sock)

    async def move(self, move: Move) -> None:
        config = self._config
        operation = TcpOperation(
            move, max_ranges=config.max_ranges_per_request, max_nbytes=config.request_nbytes
        )
        if not self._io.try_now(self._submit_now, operation):
            self._io.call(self._submit, operation)
        try:
            await operation.wait(self._watch.wait)
        except BaseException:
            self._forget_soon(operation)
            raise

    def _submit_now(self, operation: TcpOperation) -> bool:
        """Ask from the application's thread if that takes no longer than telling the I/O thread."""
        move, endpoint = operation.move, operation.move.token.endpoint
        peer = self._peers.get((endpoint.tcp, endpoint.incarnation))
        if peer is None or not peer.quiet or move.right == "w" or len(move.ranges) > MAX_NOW_RANGES:
            return False
        peer.submit(operation)
        if (link := peer.only_link) is not None:
            self._watch.begin(operation, link)
        return True

    def _submit(self, operation: TcpOperation) -> None:
        endpoint = operation.move.token.endpoint
        key = (endpoint.tcp, endpoint.incarnation)
        peer = self._peers.get(key)
        if peer is None:
            self._peers = {k: p for k, p in self._peers.items() if not p.idle}
            own, loop = self._incarnation, self._io.loop
            peer = TcpPeer(self._config, own, loop, self._resolver, *key, self._core)
            self._peers[key] = peer
        elif (link := peer.only_link) is not None:
            self._watch.end(link.link)  # what comes now need not be small
        peer.submit(operation)

    def _forget_soon(self, operation: TcpOperation) -> None:
        try:
            self._io.call(self._forget, operation)
        except PeerClosed:
            pass  # the I/O thread is gone, and with it every operation

    def _forget(self, operation: TcpOperation) -> None:
        endpoint = operation.move.token.endpoint
        peer = self._peers.get((endpoint.tcp, endpoint.incarnation))
        if peer is not None:
            peer.forget(operation)

    def disrupt(self, endpoint: Endpoint) -> None:
        self._io.call(self._disrupt, (endpoint.tcp, endpoint.incarnation))

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

    def release(self, error: TransferError) -> None:
        """Close every socket at once. On the I/O loop."""
        self._server.abort(error)
        self._sock.close()
        self._watch.close()
        for peer in self._peers.values():
            peer.abort(error)
