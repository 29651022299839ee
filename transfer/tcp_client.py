"""The side of tcp that asks: one connection.

Owns the requests in flight on it. Which request goes on which connection, and what becomes of its
operation, is the peer's business (``tcp_peer``). Runs on the I/O loop only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Protocol

from transfer.config import TransferConfig
from transfer.error_codes import error_of
from transfer.errors import FrameInvalid, PeerLost, PeerUnreachable, TransferError
from transfer.tcp_codec import COPIED_NBYTES, Header, Op, control_frame
from transfer.tcp_cores import ReceiverCore
from transfer.tcp_handshake import ClientHandshake
from transfer.tcp_link import Link
from transfer.tcp_operation import SMALL_NBYTES, Request, TcpOperation
from transfer.tcp_reader import Sink
from transfer.tcp_resolver import Resolver
from transfer.tcp_sockets import connect
from transfer.tcp_writer import Source


class RequestOwner(Protocol):
    """Hears how requests end. Each request that was started ends exactly once."""

    def on_answered(self, request: Request, error: TransferError | None) -> None:
        """The peer answered; without an error every byte has moved."""
        ...

    def on_withdrawn(self, request: Request) -> None:
        """A write whose operation was over has stopped sending."""
        ...

    def on_link_lost(
        self, link: ClientLink, requests: list[Request], error: TransferError
    ) -> None: ...


class ClientLink:
    """One connection that carries our requests."""

    saturated = False  # answers are always taken: that is what lets the peer go on

    def __init__(
        self,
        config: TransferConfig,
        handshake: ClientHandshake,
        owner: RequestOwner,
        core: ReceiverCore | None = None,
    ) -> None:
        self._handshake = handshake
        self._owner = owner
        self._core = core
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count(1)
        self._piece_nbytes = config.piece_nbytes
        self._link: Link | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.load_nbytes = 0  # in flight on this connection
        self.answer_s = 0.0  # what the last small read took; 0: there was none yet

    async def open(self, address: str, resolver: Resolver) -> None:
        """Connect and exchange hellos; raises the ``TransferError`` of either."""
        sock = await connect(address, resolver)
        piece_nbytes = self._piece_nbytes
        self._link = Link(sock, self, piece_nbytes=piece_nbytes, name=address, core=self._core)
        try:
            self._link.send(self._handshake.first())
            await self._ready
            if self._link.closed:  # between the last hello frame and now
                raise PeerLost(f"{address} closed the connection after the hello")
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

    def start(self, request: Request) -> None:
        """Put a request on the wire."""
        request_id = next(self._ids)
        self._requests[request_id] = request
        self.load_nbytes += request.nbytes
        gate = request.operation.gate
        if request.operation.move.right == "r":
            request.sink = Sink(request_id, request.cursor(), gate, request.nbytes)
            request.sent_s = time.monotonic()
            self.link.send(request.frame(request_id))
            return

        def on_end(complete: bool) -> None:
            if not complete and self._take(request_id) is not None:
                self.link.send(control_frame(Op.CANCEL, request_id))
                self._owner.on_withdrawn(request)

        priority = request.operation.move.priority
        request.source = Source(request_id, request.cursor(), gate, on_end, priority)
        self.link.send(request.frame(request_id))
        self.link.add(request.source)

    def _take(self, request_id: int) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.load_nbytes -= request.nbytes
        return request

    def withdraw(self, operation: TcpOperation) -> None:
        """Move no more bytes of this operation.

        A read is cancelled at the peer; a write stops after its current frame (``on_end``).
        """
        for request_id, request in list(self._requests.items()):
            if request.operation is not operation:
                continue
            if request.source is not None:
                self.link.drop(request.source)
            else:
                self.link.send(control_frame(Op.CANCEL, request_id))

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
            self.link.trust()
            self._ready.set_result(None)

    def _on_done(self, header: Header, body: bytes) -> None:
        request = self._requests.get(header.request_id)
        if request is None:
            return  # a write that was withdrawn while the peer answered
        error = error_of(header.status, body)
        if error is None and not request.moved and not request.operation.finished:
            raise FrameInvalid(f"DONE for request {header.request_id} before all its bytes")
        self._take(header.request_id)
        if request.sink is not None and request.nbytes <= SMALL_NBYTES:
            self.answer_s = time.monotonic() - request.sent_s
        if error is not None and request.source is not None and request.source.cursor.remaining:
            self._stop_source(header.request_id, request.source)
        self._owner.on_answered(request, error)
        if request.sink is not None and request.nbytes > COPIED_NBYTES:  # failed or not
            self.link.send(control_frame(Op.TAKEN, header.request_id))

    def _stop_source(self, request_id: int, source: Source) -> None:
        """The peer refused a write early: end the frame that is out, then say so."""
        source.on_end = lambda _complete: self.link.send(control_frame(Op.CANCEL, request_id))
        self.link.drop(source)

    def on_lost(self, error: TransferError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        requests, self._requests = list(self._requests.values()), {}
        self.load_nbytes = 0
        self._owner.on_link_lost(self, requests, error)
