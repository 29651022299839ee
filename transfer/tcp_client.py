"""The side of tcp that asks: one connection, and the few connections to one peer.

Owns requests in flight and their window. Runs on the I/O loop only. The peer is one incarnation at
one address; a restart is another peer.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress

from transfer.config import TransferConfig
from transfer.error_codes import error_of
from transfer.errors import FrameInvalid, PeerUnreachable, TransferError
from transfer.tcp_codec import Header, Op, control_frame
from transfer.tcp_handshake import NONCE_NBYTES, ClientHandshake
from transfer.tcp_link import Link
from transfer.tcp_operation import Request, TcpOperation
from transfer.tcp_reader import Sink
from transfer.tcp_sockets import connect
from transfer.tcp_window import RequestWindow
from transfer.tcp_writer import Source


class ClientLink:
    """One connection that carries our requests."""

    def __init__(
        self, config: TransferConfig, handshake: ClientHandshake, on_gone: Callable[[], None]
    ) -> None:
        self._handshake = handshake
        self._on_gone = on_gone
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count(1)
        self._operations: dict[TcpOperation, None] = {}  # ordered set
        self._window: RequestWindow[Request] = RequestWindow(config.window_nbytes)
        self._piece_nbytes = config.piece_nbytes
        self._link: Link | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, address: str) -> None:
        """Connect and exchange hellos; raises the ``TransferError`` of either."""
        sock = await connect(address)
        self._link = Link(sock, self, piece_nbytes=self._piece_nbytes, name=address)
        try:
            self._link.send(self._handshake.first())
            await self._ready
        except BaseException:
            self._link.close(PeerUnreachable(f"{address} did not finish the hello"))
            raise

    @property
    def link(self) -> Link:
        assert self._link is not None, "used before open"
        return self._link

    @property
    def busy(self) -> bool:
        return bool(self._requests) or not self._ready.done()

    @property
    def load_nbytes(self) -> int:
        return self._window.nbytes

    @property
    def num_operations(self) -> int:
        return len(self._operations)

    def submit(self, operation: TcpOperation) -> None:
        self._operations[operation] = None
        self._window.add(operation)
        self._advance()

    def forget(self, operation: TcpOperation) -> None:
        """The operation was cancelled or failed: move no more of its bytes."""
        if self._operations.pop(operation, 0) == 0:
            return
        operation.finished = True
        self._window.drop(operation)
        for request_id, request in list(self._requests.items()):
            if request.operation is operation:
                self._withdraw(request_id, request)
        self._advance()

    def _withdraw(self, request_id: int, request: Request) -> None:
        """A read is cancelled at the peer; a write stops after its current frame (``on_end``)."""
        if request.source is not None:
            request.source.dropped = True
        else:
            self.link.send(control_frame(Op.CANCEL, request_id))

    def _advance(self) -> None:
        """Start as many requests as the window allows."""
        while not self.link.closed and (request := self._window.next()) is not None:
            self._start(next(self._ids), request)

    def _start(self, request_id: int, request: Request) -> None:
        self._requests[request_id] = request
        gate = request.operation.gate
        if request.operation.move.right == "r":
            request.sink = Sink(request_id, request.cursor(), gate, request.nbytes)
            self.link.send(request.frame(request_id))
            return

        def on_end(complete: bool) -> None:
            if not complete and self._requests.pop(request_id, None) is not None:
                self._window.done(request.nbytes)
                self.link.send(control_frame(Op.CANCEL, request_id))
                self._advance()

        request.source = Source(request_id, request.cursor(), gate, on_end)
        self.link.send(request.frame(request_id))
        self.link.add(request.source)

    def sink_for(self, header: Header) -> Sink:
        request = self._requests.get(header.request_id)
        if request is None or request.sink is None:
            raise FrameInvalid(f"DATA for request {header.request_id}, which does not read")
        return request.sink

    def on_data_end(self, sink: Sink) -> None:
        """Nothing: DONE completes a read."""

    def on_frame(self, header: Header, body: bytes) -> None:
        if header.op is Op.GOODBYE:
            self.link.peer_said_goodbye = True
        elif not self._handshake.ready:
            self._on_hello_frame(header, body)
        elif header.op is Op.DONE:
            self._on_done(header, body)
        else:
            raise FrameInvalid(f"{header.op.name} from the serving side")

    def _on_hello_frame(self, header: Header, body: bytes) -> None:
        try:
            answer = self._handshake.receive(header, body)
        except TransferError as error:
            self.link.close(error)
            return
        if answer:
            self.link.send(answer)
        elif not self._ready.done():
            self._ready.set_result(None)

    def _on_done(self, header: Header, body: bytes) -> None:
        request = self._requests.pop(header.request_id, None)
        if request is None:
            return  # a write that was withdrawn while the peer answered
        self._window.done(request.nbytes)
        operation = request.operation
        error = error_of(header.status, body)
        if error is None:
            moved = request.sink.remaining == 0 if request.sink else self._all_sent(request)
            if not moved and not operation.finished:
                raise FrameInvalid(f"DONE for request {header.request_id} before all its bytes")
            operation.settle(request)
            if operation.finished:
                self._operations.pop(operation, None)
        else:
            if request.source is not None and request.source.cursor.remaining:
                self._stop_source(header.request_id, request.source)
            operation.finish(error)
            self.forget(operation)
        self._advance()

    @staticmethod
    def _all_sent(request: Request) -> bool:
        return request.source is not None and request.source.cursor.remaining == 0

    def _stop_source(self, request_id: int, source: Source) -> None:
        """The peer refused a write early: end the frame that is out, then say so."""
        source.dropped = True
        source.on_end = lambda _complete: self.link.send(control_frame(Op.CANCEL, request_id))

    def on_lost(self, error: TransferError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        operations, self._operations = self._operations, {}
        self._requests.clear()
        for operation in operations:
            operation.finish(error)
        self._on_gone()


class TcpPeer:
    """All connections to one incarnation; makes them when they are needed."""

    def __init__(self, config: TransferConfig, own: str, address: str, incarnation: str) -> None:
        self._config = config
        self._own = own
        self._address = address
        self._incarnation = incarnation
        self._links: list[ClientLink] = []
        self._waiting: dict[TcpOperation, None] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        return not (self._links or self._waiting or self._connecting)

    def submit(self, operation: TcpOperation) -> None:
        limit = self._config.max_operations_per_peer
        if len(self._waiting) + sum(link.num_operations for link in self._links) >= limit:
            operation.finish(
                PeerUnreachable(f"{limit} operations wait for {self._address} already")
            )
            return
        link = min(self._links, key=lambda each: each.load_nbytes, default=None)
        may_grow = len(self._links) + len(self._connecting) < self._config.connections_per_peer
        if may_grow and (link is None or link.load_nbytes > 0):
            task = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        if link is not None:
            link.submit(operation)
        else:
            self._waiting[operation] = None

    def forget(self, operation: TcpOperation) -> None:
        operation.finished = True
        self._waiting.pop(operation, None)
        for link in self._links:
            link.forget(operation)

    async def _connect(self) -> None:
        nonce = secrets.token_bytes(NONCE_NBYTES)
        secret = self._config.secret
        handshake = ClientHandshake(secret, self._own, self._incarnation, nonce)
        link = ClientLink(self._config, handshake, lambda: self._drop(link))
        limit_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await link.open(self._address)
        except TransferError as error:
            self._fail_waiting(error)
        except TimeoutError:
            self._fail_waiting(
                PeerUnreachable(f"{self._address} did not answer within {limit_s} s")
            )
        else:
            self._links.append(link)
            waiting, self._waiting = self._waiting, {}
            for operation in waiting:
                self.submit(operation)

    def _fail_waiting(self, error: TransferError) -> None:
        waiting, self._waiting = self._waiting, {}
        for operation in waiting:
            operation.finish(error)

    def _drop(self, link: ClientLink) -> None:
        with suppress(ValueError):
            self._links.remove(link)

    async def finish(self, error: TransferError) -> None:
        """Say goodbye everywhere; operations end with ``error``."""
        self._stop_connecting(error)
        for link in list(self._links):
            await link.link.finish()

    def abort(self, error: TransferError) -> None:
        self._stop_connecting(error)
        for link in list(self._links):
            link.link.close(error)

    def _stop_connecting(self, error: TransferError) -> None:
        for task in self._connecting:
            task.cancel()
        self._fail_waiting(error)
