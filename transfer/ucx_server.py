"""The side of ucx that serves: meets peers and answers their reads and writes from memory.

Owns the connections it accepted. The application's code takes no part. Runs on the ucx loop only.
Every request is checked against the region table before a byte moves, and each piece passes the
region's gate: ``revoke`` waits for the pieces under way, and no other follows.
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
from transfer.error_codes import status_of
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    HelloRefused,
    PeerClosed,
    RegionRevoked,
    TransferError,
    Unauthorized,
)
from transfer.region import RegionTable, RegisteredRegion, check_spans
from transfer.tcp_codec import done_frame
from transfer.tcp_handshake import NONCE_NBYTES, ServerHandshake
from transfer.tcp_sockets import join_address, tune
from transfer.ucx_binding import Context, Worker
from transfer.ucx_cargo import Cargo, may_pack
from transfer.ucx_codec import (
    MAX_REQUEST,
    UNPACKABLE,
    Ask,
    Cancel,
    Control,
    Done,
)
from transfer.ucx_farewell import Farewells
from transfer.ucx_freight import Delivery, Freight, Shipment
from transfer.ucx_lifeline import Lifeline, introduce_server, refuse
from transfer.ucx_link import UcxLink
from transfer.ucx_meeting import Meeting
from transfer.window import MAX_REQUESTS_IN_FLIGHT

_LOG = logging.getLogger(__name__)

REFUSAL_LIMIT_S = 1.0  # for a refused peer to read why
MAX_SERVED_REQUESTS = 2 * MAX_REQUESTS_IN_FLIGHT  # one side's limit, and those it has cancelled
MAX_TEXT_NCHARS = 500


class UcxServed:
    """One accepted connection."""

    def __init__(
        self,
        server: UcxServer,
        worker: Worker,
        sock: socket.socket,
        name: str,
        meeting: Meeting,
        peer: int,
    ) -> None:
        self._server = server
        self._freights: dict[int, Freight] = {}
        lifeline = Lifeline(sock, name, lambda error: self.link.close(error))
        self.link = UcxLink(worker, lifeline, self, meeting.farewells, own=meeting.key, peer=peer)

    @property
    def busy(self) -> bool:
        return False  # pieces aboard are watched by the link; what is to come, by the client

    @property
    def moving(self) -> bool:
        return bool(self._freights)

    def on_control(self, message: Control) -> None:
        if isinstance(message, Ask):
            self._on_ask(message)
        elif isinstance(message, Cancel):
            freight = self._freights.get(message.request)
            if freight is not None:  # else it has been answered meanwhile
                freight.call_off()
        else:
            raise FrameInvalid(f"{type(message).__name__} from the asking side")

    def _on_ask(self, ask: Ask) -> None:
        if not 0 < ask.request <= MAX_REQUEST or ask.request in self._freights:
            raise FrameInvalid(f"request number {ask.request} is impossible or in use")
        if len(self._freights) >= MAX_SERVED_REQUESTS:
            raise FrameInvalid(f"more than {MAX_SERVED_REQUESTS} requests at once")
        try:
            region, cargo = self._check(ask)
        except (Unauthorized, RegionRevoked, FrameInvalid) as refusal:
            self._answer(ask.request, refusal)
            return
        if cargo is None:
            self.link.send(Done(ask.request, UNPACKABLE))
            return
        on_end = partial(self._on_end, ask.request, region, cargo.nbytes)
        if ask.right == "r":
            shipment = Shipment(ask.request, cargo, region.gate, on_end)
            self._freights[ask.request] = shipment
            self.link.ship(shipment)
        else:
            delivery = Delivery(ask.request, cargo, region.gate, on_end)
            self._freights[ask.request] = delivery
            self.link.expect(delivery)

    def _check(self, ask: Ask) -> tuple[RegisteredRegion, Cargo | None]:
        """Return what is asked for; no cargo if the region cannot be packed from."""
        if ask.right not in ("r", "w"):
            raise FrameInvalid(f"a request reads or writes, not {ask.right!r}")
        region = self._server.regions.authorize(ask.region_id, ask.capability, ask.right)
        spans = ask.unpack()
        check_spans(spans, region.nbytes)
        cargo = Cargo(
            region,
            spans,
            piece_nbytes=ask.piece_nbytes,
            packs=ask.packs,
            gathers=ask.gathers,
            takes_runs=self.link.takes_runs,
        )
        if not may_pack(region) and any(piece.num_runs > 1 for piece in cargo.pieces):
            return region, None
        return region, cargo

    def _on_end(self, request: int, region: RegisteredRegion, nbytes: int, complete: bool) -> None:
        self._freights.pop(request, None)  # lost meanwhile, and one piece was not quiet
        self.link.forget(request)
        error: TransferError | None = None
        if self.link.finishing:
            error = PeerClosed("the peer closed its transfer engine")
        elif not region.gate.is_open:
            error = RegionRevoked("the region was revoked while it was used")
        elif not complete:
            error = DeadlineExceeded("cancelled by the asking side")
        else:
            self._server.counters.add(bytes_served=nbytes)
            self._server.on_served()
        self._answer(request, error)

    def _answer(self, request: int, error: TransferError | None) -> None:
        text = str(error or "")[:MAX_TEXT_NCHARS]
        self.link.send(Done(request, status_of(error), text))

    def on_lost(self, error: TransferError) -> None:
        self._freights.clear()
        self._server.forget(self)


class UcxServer:
    """Listens and keeps what it accepted."""

    def __init__(
        self,
        config: TransferConfig,
        incarnation: str,
        regions: RegionTable,
        counters: CounterBoard,
        *,
        on_served: Callable[[], None],
    ) -> None:
        """Args:
        on_served: called after each request that was served: the next may come at once.
        """
        self.on_served = on_served
        self.regions = regions
        self.counters = counters
        self._config = config
        self._incarnation = incarnation
        self._acceptor: Acceptor | None = None
        self._meeting: set[asyncio.Task[None]] = set()
        self._served: dict[UcxServed, None] = {}

    def serve(self, sock: socket.socket, context: Context, farewells: Farewells) -> None:
        """Accept on a listening, non-blocking socket; takes it over."""
        self._acceptor = Acceptor(
            sock,
            partial(self._accept, lambda: Meeting(context, farewells)),
            num_open=lambda: len(self._served) + len(self._meeting),
        )

    def _accept(
        self, new_meeting: Callable[[], Meeting], sock: socket.socket, address: object
    ) -> None:
        assert isinstance(address, tuple), address
        tune(sock)
        task = asyncio.get_running_loop().create_task(
            self._meet(new_meeting(), sock, join_address(*address[:2]))
        )
        self._meeting.add(task)
        task.add_done_callback(self._meeting.discard)

    async def _meet(self, meeting: Meeting, sock: socket.socket, name: str) -> None:
        """See who has connected; serve them or hang up."""
        try:
            with meeting.given_up_on_failure(sock):
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await self._introduce(meeting, sock, name)
        except (TransferError, TimeoutError) as error:
            _LOG.info("%s did not finish the hello: %s", name, error)

    async def _introduce(self, meeting: Meeting, sock: socket.socket, name: str) -> None:
        nonce = secrets.token_bytes(NONCE_NBYTES)
        handshake = ServerHandshake(self._config.secret, self._incarnation, nonce)
        try:
            peer = await introduce_server(sock, handshake, meeting.make_card, name)
        except (HelloRefused, Unauthorized, FrameInvalid) as error:
            _LOG.warning("refused %s: %s", name, error)
            async with asyncio.timeout(REFUSAL_LIMIT_S):
                await refuse(sock, done_frame(0, error))
            raise
        worker = meeting.join(peer, sock, name)
        self._served[UcxServed(self, worker, sock, name, meeting, peer.key)] = None

    def forget(self, served: UcxServed) -> None:
        self._served.pop(served, None)

    def disrupt(self, error: TransferError) -> None:
        """Cut every connection that was accepted."""
        for served in list(self._served):
            served.link.close(error)

    def stop_listening(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        for task in self._meeting:
            task.cancel()

    async def finish(self) -> None:
        """Say goodbye to every client."""
        self.stop_listening()
        await asyncio.gather(*(served.link.finish() for served in list(self._served)))

    def abort(self, error: TransferError) -> None:
        self.stop_listening()
        self.disrupt(error)
