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
from collections.abc import Callable
from functools import partial

from transfer.acceptor import Acceptor
from transfer.config import TransferConfig
from transfer.counters import CounterBoard
from transfer.cursor import Cursor, Payload
from transfer.device_copier import DeviceCopiers
from transfer.device_serve import DeviceServer
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
from transfer.interface import Priority, Rights
from transfer.loans import LentFile
from transfer.region import (
    DeviceRegion,
    HostRegion,
    RegionTable,
    RegisteredRegion,
    Spans,
    check_spans,
)
from transfer.tcp_codec import COPIED_NBYTES, Header, Op, RequestBody, decode_body, done_frame
from transfer.tcp_cores import ReceiverCore
from transfer.tcp_handshake import NONCE_NBYTES, ServerHandshake
from transfer.tcp_link import Link
from transfer.tcp_operation import SMALL_NBYTES
from transfer.tcp_reader import Sink
from transfer.tcp_sockets import join_address, tune
from transfer.tcp_writer import Source
from transfer.window import MAX_REQUESTS_IN_FLIGHT

_LOG = logging.getLogger(__name__)

REFUSAL_LIMIT_S = 1.0  # for a refused peer to read why
# Of one client. It has at most MAX_REQUESTS_IN_FLIGHT out, and may have cancelled as many more.
MAX_SERVED_READS = 2 * MAX_REQUESTS_IN_FLIGHT  # beyond, it is not listened to until some end
MAX_SERVED_WRITES = 2 * MAX_REQUESTS_IN_FLIGHT  # beyond, it breaks the protocol
MAX_LENT_READS = 4096  # answered and not yet taken; a client says so within milliseconds
MAX_UNPROVEN = 256  # clients in the hello: strangers do not take the descriptors of a process
MAX_UNREAD_ANSWERS_NBYTES = 1 << 20  # a client that reads no answers is not listened to either


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
        self._sinks: dict[int, tuple[Sink, RegisteredRegion | None]] = {}
        self._lending: dict[int, LentFile] = {}  # of reads that are being answered by reference
        self._lent: dict[int, LentFile] = {}  # of reads whose bytes may still lie in the socket
        piece_nbytes = server.config.piece_nbytes
        self.link = Link(sock, self, piece_nbytes=piece_nbytes, name=name, core=server.core)
        self._hello_timer = asyncio.get_running_loop().call_later(
            server.config.connect_timeout_s, self._hello_overdue
        )

    @property
    def busy(self) -> bool:
        return False  # what we wait for is the client's to send; the client watches us

    @property
    def saturated(self) -> bool:
        """Bounds what a client can pile up here: TCP then makes it wait."""
        return (
            len(self._sources) >= MAX_SERVED_READS
            or self.link.control_nbytes >= MAX_UNREAD_ANSWERS_NBYTES
        )

    def _hello_overdue(self) -> None:
        if not self._handshake.ready:
            self.link.close(PeerLost(f"{self.link.name} did not finish the hello"))

    def on_frame(self, header: Header, body: bytes) -> None:
        if header.op is Op.GOODBYE:
            self.link.peer_said_goodbye = True
        elif self._handshake.refused:
            pass  # it was told why and is read no further
        elif not self._handshake.ready:
            self._on_hello_frame(header, body)
        elif header.op in (Op.READ, Op.WRITE):
            self._on_request(header, decode_body(body, RequestBody))
        elif header.op is Op.CANCEL:
            self._on_cancel(header.request_id)
        elif header.op is Op.TAKEN:
            self._on_taken(header.request_id)
        else:
            raise FrameInvalid(f"{header.op.name} from the asking side")

    def _on_hello_frame(self, header: Header, body: bytes) -> None:
        try:
            self.link.send(self._handshake.receive(header, body))
            if self._handshake.ready:
                self.link.trust()
                self._server.admit(self)
        except (HelloRefused, Unauthorized, FrameInvalid) as error:
            _LOG.warning("refused %s: %s", self.link.name, error)
            self.link.send(done_frame(0, error))
            asyncio.get_running_loop().call_later(REFUSAL_LIMIT_S, self.link.close, error)

    def _on_request(self, header: Header, body: RequestBody) -> None:
        request_id = header.request_id
        if request_id in self._sources or request_id in self._sinks or request_id in self._lent:
            raise FrameInvalid(f"request id {request_id} is in use")
        if len(self._sinks) >= MAX_SERVED_WRITES:
            raise FrameInvalid(f"more than {MAX_SERVED_WRITES} writes at once")
        spans = body.unpack()
        right: Rights = "r" if header.op is Op.READ else "w"
        region: RegisteredRegion | None = None
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
            self._answer(request_id, region, spans, body.priority)

    def _answer(
        self, request_id: int, region: RegisteredRegion, spans: Spans, priority: Priority
    ) -> None:
        payload = self._server.payload(region, spans, "r", self)
        nbytes = payload.remaining
        lent = payload.file if isinstance(payload.file, LentFile) else None

        def on_end(complete: bool) -> None:
            source = self._sources.pop(request_id)
            payload.close()
            if lent is not None:
                self._on_lent(request_id, lent)
            if complete:
                self._server.counters.add(bytes_served=nbytes)
                if nbytes <= SMALL_NBYTES:
                    self._server.served_small()
            else:
                self.link.send(done_frame(request_id, self._why_ended(source)))

        done = done_frame(request_id, None)
        source = Source(request_id, payload, region.gate, on_end, priority, done)
        self._sources[request_id] = source
        if lent is not None:
            self._lending[request_id] = lent
        self.link.add(source)

    def _on_lent(self, request_id: int, lent: LentFile) -> None:
        """No more is sent by reference. What was may lie in the client's socket, also if the read
        ended early: DONE comes behind it, and TAKEN after DONE."""
        del self._lending[request_id]
        if not lent.is_out:
            return
        self._lent[request_id] = lent
        if len(self._lent) > MAX_LENT_READS:
            text = f"{self.link.name} does not say which of {MAX_LENT_READS} reads it has taken"
            asyncio.get_running_loop().call_soon(self.link.close, FrameInvalid(text))

    def _on_taken(self, request_id: int) -> None:
        lent = self._lent.pop(request_id, None)
        if lent is not None:  # else its bytes were copied, or it was refused
            lent.give_back()

    def _why_ended(self, source: Source) -> TransferError:
        if source.cursor.error is not None:
            return source.cursor.error
        if self.link.finishing:
            return PeerClosed("the peer closed its transfer engine")
        if not source.gate.is_open:
            return RegionRevoked("the region was revoked while it was read")
        return DeadlineExceeded("cancelled by the reader")

    def _expect(self, request_id: int, region: RegisteredRegion | None, spans: Spans) -> None:
        """Make a sink for a write; a refused one swallows what is on its way already."""
        nbytes = sum(count for _, count in spans)
        payload = None if region is None else self._server.payload(region, spans, "w", self)
        gate = closed_gate() if region is None else region.gate
        sink = Sink(request_id, payload, gate, nbytes)
        self._sinks[request_id] = (sink, region)
        if payload is not None and payload.ready_nbytes < nbytes:
            payload.wake = partial(self._on_sink_woken, sink)

    def _on_sink_woken(self, sink: Sink) -> None:
        self.link.resume()
        if sink.remaining == 0 and not self.link.closed:
            self.on_data_end(sink)

    def _on_cancel(self, request_id: int) -> None:
        self._forget_sink(request_id)
        source = self._sources.get(request_id)
        if source is not None:
            self.link.drop(source)

    def _forget_sink(self, request_id: int) -> None:
        sink, _ = self._sinks.pop(request_id, (None, None))
        if sink is not None and sink.cursor is not None:
            sink.cursor.close()

    def sink_for(self, header: Header) -> Sink:
        entry = self._sinks.get(header.request_id)
        if entry is None:
            raise FrameInvalid(f"DATA for request {header.request_id}, which does not write")
        if entry[0].cursor is not None:
            entry[0].cursor.begin(header.body_nbytes)
        return entry[0]

    def on_data_end(self, sink: Sink) -> None:
        """Answer a write when its last byte is where it belongs, or cannot get there."""
        entry = self._sinks.get(sink.request_id)
        if sink.remaining or entry is None:
            return
        payload, region = sink.cursor, entry[1]
        if payload is not None and not (payload.settled or sink.void):
            return  # it wakes us
        self._forget_sink(sink.request_id)
        if region is None:
            return  # refused when it came
        error = payload.error if payload is not None else None
        if error is None and region.revoked:
            error = RegionRevoked("the region was revoked while it was written")
        elif error is None:
            self._server.counters.add(bytes_served=sink.nbytes)
        self.link.send(done_frame(sink.request_id, error))

    def on_lost(self, error: TransferError) -> None:
        self._hello_timer.cancel()
        for source in self._sources.values():
            source.cursor.close()
        self._sources.clear()
        for request_id in list(self._sinks):
            self._forget_sink(request_id)
        self._end_loans()
        self._server.forget(self)

    def _end_loans(self) -> None:
        """What lay in the client's socket is gone with it; if that is still there, who knows?"""
        for lent in (*self._lending.values(), *self._lent.values()):
            if self.link.peer_closed:
                lent.give_back()
            else:
                lent.lose()
        self._lending.clear()
        self._lent.clear()


class TcpServer:
    """Listens and keeps what it accepted."""

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        regions: RegionTable,
        counters: CounterBoard,
        copiers: DeviceCopiers,
        served_small: Callable[[], None],
        core: ReceiverCore | None = None,
    ) -> None:
        """Args:
        served_small: called when a small request was answered: others may follow at once.
        core: where the thread runs that receives.
        """
        self.core = core
        self.served_small = served_small
        self.config = config
        self.regions = regions
        self.counters = counters
        self._devices = DeviceServer(config, copiers, regions)
        self._incarnation = incarnation
        self._acceptor: Acceptor | None = None
        self._links: dict[ServedLink, None] = {}
        self._unproven: dict[ServedLink, None] = {}  # those in the hello, oldest first

    def payload(
        self, region: RegisteredRegion, spans: Spans, right: Rights, link: ServedLink
    ) -> Payload:
        """Return the bytes of a request of ``link``, to be sent ("r") or received ("w")."""
        if isinstance(region, DeviceRegion):
            return self._devices.payload(region, spans, right, link)
        many = sum(nbytes for _, nbytes in spans) > COPIED_NBYTES
        lent = None
        if right == "r" and many and isinstance(region, HostRegion):
            file = region.file  # once: a revocation on another thread may take it away
            lent = None if file is None else LentFile(file, region.loans)
        return Cursor(region.view, spans, lent)

    def serve(self, sock: socket.socket) -> None:
        """Accept on a listening, non-blocking socket; takes it over."""
        self._acceptor = Acceptor(sock, self._accept, num_open=lambda: len(self._links))

    def _accept(self, sock: socket.socket, address: object) -> None:
        """Raise OSError for one that hung up before we looked (``Acceptor``)."""
        assert isinstance(address, tuple), address
        tune(sock)
        handshake = ServerHandshake(
            self.config.secret, self._incarnation, secrets.token_bytes(NONCE_NBYTES)
        )
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            oldest.link.close(PeerLost(f"{oldest.link.name} gave way in the hello"))
        served = ServedLink(sock, self, handshake, join_address(*address[:2]))
        self._links[served] = self._unproven[served] = None

    def admit(self, link: ServedLink) -> None:
        """The client has proven the secret."""
        self._unproven.pop(link, None)

    def forget(self, link: ServedLink) -> None:
        self._links.pop(link, None)
        self._unproven.pop(link, None)

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
