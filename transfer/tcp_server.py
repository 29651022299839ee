"""The side of tcp that serves: accepts connections and answers reads and writes from memory.

Owns the connections it accepted. The application's code takes no part.
Runs on the I/O loop only. Every request is checked against the region table before a byte moves,
and each piece passes the region's gate.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket

from transfer.acceptor import Acceptor
from transfer.config import TransferConfig
from transfer.counters import CounterBoard
from transfer.cursor import Cursor
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    HelloRefused,
    PeerClosed,
    PeerLost,
    RegionRevoked,
    TransferError,
    Unauthorized,
)
from transfer.gate import closed_gate
from transfer.interface import Rights
from transfer.region import HostRegion, RegionTable, Spans, check_spans
from transfer.tcp_codec import Header, Op, RequestBody, decode_body, done_frame
from transfer.tcp_handshake import NONCE_NBYTES, ServerHandshake
from transfer.tcp_link import Link
from transfer.tcp_reader import Sink
from transfer.tcp_sockets import join_address, tune
from transfer.tcp_window import MAX_REQUESTS_IN_FLIGHT
from transfer.tcp_writer import Source

_LOG = logging.getLogger(__name__)

REFUSAL_LIMIT_S = 1.0  # for a refused peer to read why
MAX_SERVED_REQUESTS = 2 * MAX_REQUESTS_IN_FLIGHT  # one side's limit, and those it has cancelled


class ServedLink:
    """One accepted connection."""

    def __init__(
        self,
        sock: socket.socket,
        server: TcpServer,
        handshake: ServerHandshake,
        name: str,
    ) -> None:
        self._server = server
        self._handshake = handshake
        self._sources: dict[int, Source] = {}
        self._sinks: dict[int, tuple[Sink, HostRegion | None]] = {}
        self.link = Link(sock, self, piece_nbytes=server.config.piece_nbytes, name=name)
        self._hello_timer = asyncio.get_running_loop().call_later(
            server.config.connect_timeout_s, self._hello_overdue
        )

    @property
    def busy(self) -> bool:
        return False  # what we wait for is the client's to send; the client watches us

    def _hello_overdue(self) -> None:
        if not self._handshake.ready:
            self.link.close(PeerLost(f"{self.link.name} did not finish the hello"))

    def on_frame(self, header: Header, body: bytes) -> None:
        if header.op is Op.GOODBYE:
            self.link.peer_said_goodbye = True
        elif not self._handshake.ready:
            self._on_hello_frame(header, body)
        elif header.op in (Op.READ, Op.WRITE):
            self._on_request(header, decode_body(body, RequestBody))
        elif header.op is Op.CANCEL:
            self._on_cancel(header.request_id)
        else:
            raise FrameInvalid(f"{header.op.name} from the asking side")

    def _on_hello_frame(self, header: Header, body: bytes) -> None:
        try:
            self.link.send(self._handshake.receive(header, body))
        except (HelloRefused, Unauthorized, FrameInvalid) as error:
            _LOG.warning("refused %s: %s", self.link.name, error)
            self.link.send(done_frame(0, error))
            asyncio.get_running_loop().call_later(REFUSAL_LIMIT_S, self.link.close, error)

    def _on_request(self, header: Header, body: RequestBody) -> None:
        request_id = header.request_id
        if request_id in self._sources or request_id in self._sinks:
            raise FrameInvalid(f"request id {request_id} is in use")
        if len(self._sources) + len(self._sinks) >= MAX_SERVED_REQUESTS:
            raise FrameInvalid(f"more than {MAX_SERVED_REQUESTS} requests at once")
        spans = body.unpack()
        right: Rights = "r" if header.op is Op.READ else "w"
        region: HostRegion | None = None
        error: TransferError | None = None
        try:
            region = self._server.regions.authorize(body.region_id, body.capability, right)
            check_spans(spans, region.nbytes)
        except (Unauthorized, RegionRevoked, FrameInvalid) as refusal:
            error = refusal
        if error is not None:
            self.link.send(done_frame(request_id, error))
        if right == "w":
            self._expect(request_id, region if error is None else None, spans)
        elif error is None and region is not None:
            self._answer(request_id, region, spans)

    def _answer(self, request_id: int, region: HostRegion, spans: Spans) -> None:
        cursor = Cursor(region.view, spans)
        nbytes = cursor.remaining

        def on_end(complete: bool) -> None:
            dropped = self._sources.pop(request_id).dropped
            error: TransferError | None = None
            if complete:
                self._server.counters.add(bytes_served=nbytes)
            elif self.link.finishing:
                error = PeerClosed("the peer closed its transfer engine")
            elif not region.gate.is_open:
                error = RegionRevoked("the region was revoked while it was read")
            elif dropped:
                error = DeadlineExceeded("cancelled by the reader")
            self.link.send(done_frame(request_id, error))

        source = Source(request_id, cursor, region.gate, on_end)
        self._sources[request_id] = source
        self.link.add(source)

    def _expect(self, request_id: int, region: HostRegion | None, spans: Spans) -> None:
        """Make a sink for a write; a refused one swallows what is on its way already."""
        nbytes = sum(count for _, count in spans)
        cursor = None if region is None else Cursor(region.view, spans)
        gate = closed_gate() if region is None else region.gate
        self._sinks[request_id] = (Sink(request_id, cursor, gate, nbytes), region)

    def _on_cancel(self, request_id: int) -> None:
        self._sinks.pop(request_id, None)
        source = self._sources.get(request_id)
        if source is not None:
            source.dropped = True

    def sink_for(self, header: Header) -> Sink:
        entry = self._sinks.get(header.request_id)
        if entry is None:
            raise FrameInvalid(f"DATA for request {header.request_id}, which does not write")
        return entry[0]

    def on_data_end(self, sink: Sink) -> None:
        if sink.remaining:
            return
        _, region = self._sinks.pop(sink.request_id)
        if region is None:
            return  # refused when it came
        error: TransferError | None = None
        if region.revoked:
            error = RegionRevoked("the region was revoked while it was written")
        else:
            self._server.counters.add(bytes_served=sink.nbytes)
        self.link.send(done_frame(sink.request_id, error))

    def on_lost(self, error: TransferError) -> None:
        self._hello_timer.cancel()
        self._sources.clear()
        self._sinks.clear()
        self._server.forget(self)


class TcpServer:
    """Listens and keeps what it accepted."""

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        regions: RegionTable,
        counters: CounterBoard,
    ) -> None:
        self.config = config
        self.regions = regions
        self.counters = counters
        self._incarnation = incarnation
        self._acceptor: Acceptor | None = None
        self._links: dict[ServedLink, None] = {}

    def serve(self, sock: socket.socket) -> None:
        """Accept on a listening, non-blocking socket; takes it over."""
        self._acceptor = Acceptor(sock, self._accept, num_open=lambda: len(self._links))

    def _accept(self, sock: socket.socket, address: object) -> None:
        assert isinstance(address, tuple), address
        tune(sock)
        handshake = ServerHandshake(
            self.config.secret, self._incarnation, secrets.token_bytes(NONCE_NBYTES)
        )
        self._links[ServedLink(sock, self, handshake, join_address(*address[:2]))] = None

    def forget(self, link: ServedLink) -> None:
        self._links.pop(link, None)

    def stop_listening(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()

    async def finish(self) -> None:
        """Say goodbye to every client."""
        self.stop_listening()
        await asyncio.gather(*(served.link.finish() for served in list(self._links)))

    def abort(self, error: TransferError) -> None:
        self.stop_listening()
        for served in list(self._links):
            served.link.close(error)
