"""The side of ucx that asks: the connection to one peer, and its requests.

Owns requests in flight and their window. Runs on the ucx loop, or while that is lent (``submit``,
which therefore ends no connection and never asks for the running loop). The peer is one incarnation
at one address; a restart is another peer.

A request ends when the owner has answered *and* no piece of it is under way. The answer alone is
not enough, nor are the bytes: an owner whose region was revoked in between sends no success.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transfer.config import TransferConfig
from transfer.error_codes import error_of
from transfer.errors import FrameInvalid, TransferError
from transfer.region import Spans
from transfer.tcp_codec import pack_spans
from transfer.tcp_handshake import ClientHandshake
from transfer.tcp_resolver import Resolver
from transfer.tcp_sockets import connect
from transfer.ucx_cargo import Cargo, may_pack
from transfer.ucx_codec import (
    MAX_REQUEST,
    UNPACKABLE,
    Ask,
    Cancel,
    Control,
    Done,
)
from transfer.ucx_freight import Delivery, Shipment
from transfer.ucx_lifeline import Lifeline, introduce_client
from transfer.ucx_link import UcxLink
from transfer.ucx_meeting import Meeting
from transfer.ucx_operation import UcxOperation, UcxRequest
from transfer.ucx_pieces import MAX_PIECE_NBYTES
from transfer.window import RequestWindow

MAX_REQUEST_NBYTES = 64 << 20  # the cut into pieces must fit their numbers
LARGE_NBYTES = 8 << 20  # requests from here on move in larger pieces
LARGE_PIECES = 4  # times as large


class _Manner(NamedTuple):
    """How both sides cut a request into pieces: see ``ucx_pieces.cut``."""

    piece_nbytes: int
    packs: bool
    gathers: bool


class UcxClient:
    """One connection that carries our requests."""

    def __init__(
        self,
        config: TransferConfig,
        on_gone: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        """Args:
        on_gone: the connection has ended.
        on_done: an operation has succeeded.
        """
        self._piece_nbytes = config.piece_nbytes
        self._on_gone = on_gone
        self._on_done = on_done
        self._requests: dict[int, UcxRequest] = {}
        self._number = 0
        self._operations: dict[UcxOperation, None] = {}  # ordered set
        self._window: RequestWindow[UcxRequest] = RequestWindow(config.window_nbytes)
        self._unpackable: set[int] = set()  # regions of the peer that lie on a device
        self._link: UcxLink | None = None

    async def open(
        self, handshake: ClientHandshake, address: str, resolver: Resolver, meeting: Meeting
    ) -> None:
        """Connect and swap cards; raises the ``TransferError`` of either."""
        sock = await connect(address, resolver)
        with meeting.given_up_on_failure(sock):
            peer = await introduce_client(sock, handshake, meeting.make_card, address)
            worker = meeting.join(peer, sock, address)
        lifeline = Lifeline(sock, address, lambda error: self.link.close(error))
        self._link = UcxLink(
            worker, lifeline, self, meeting.farewells, own=meeting.key, peer=peer.key
        )

    @property
    def link(self) -> UcxLink:
        assert self._link is not None, "used before open"
        return self._link

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def moving(self) -> bool:
        return bool(self._requests)

    @property
    def quiet(self) -> bool:
        """True if it is open and no operation is under way."""
        return not (self._operations or self._requests or self.link.closed)

    @property
    def num_operations(self) -> int:
        return len(self._operations)

    def submit(self, operation: UcxOperation) -> None:
        self._operations[operation] = None
        self._window.add(operation, operation.move.priority)
        self._advance()

    def withdraw(self, operation: UcxOperation, error: TransferError) -> None:
        """The operation was cancelled or failed: move no more of its bytes."""
        operation.finish(error)
        if self._operations.pop(operation, 0) == 0:
            return
        self._window.drop(operation)
        for number, request in list(self._requests.items()):
            if request.operation is operation and request.freight is not None:
                request.freight.call_off()
                if isinstance(request.freight, Delivery) and not request.answered:
                    self.link.send(Cancel(number))
        self._advance()

    def _advance(self) -> None:
        """Start as many requests as the window allows."""
        while not self.link.closed and (request := self._window.next()) is not None:
            self._start(self._next_number(), request)

    def _next_number(self) -> int:
        """Return a number that no request in flight has; there are far fewer than numbers."""
        while True:
            self._number = self._number % MAX_REQUEST + 1
            if self._number not in self._requests:
                return self._number

    def _start(self, number: int, request: UcxRequest) -> None:
        move, manner = request.operation.move, self._manner_of(request)
        self._requests[number] = request
        self._ask(number, request, manner)  # first: the owner is at work while this side cuts
        local: Spans = [(r.local_offset, r.nbytes) for r in request.ranges]
        cargo = Cargo(
            *(move.region, local),
            piece_nbytes=manner.piece_nbytes,
            packs=manner.packs,
            gathers=manner.gathers,
            takes_runs=self.link.takes_runs,
        )

        def on_end(complete: bool) -> None:
            request.complete = complete
            if not complete and move.right == "w" and not request.answered:
                self.link.send(Cancel(number))
            self._end(number, request)

        if move.right == "r":
            delivery = Delivery(number, cargo, request.operation, on_end)
            request.freight = delivery
            self.link.expect(delivery)
        else:
            shipment = Shipment(number, cargo, request.operation, on_end)
            request.freight = shipment
            self.link.ship(shipment)

    def _manner_of(self, request: UcxRequest) -> _Manner:
        move, takes_runs = request.operation.move, self.link.takes_runs
        packs = may_pack(move.region) and move.token.region_id not in self._unpackable
        piece_nbytes = self._piece_nbytes
        if takes_runs and request.nbytes >= LARGE_NBYTES:
            piece_nbytes = min(LARGE_PIECES * piece_nbytes, MAX_PIECE_NBYTES)
        return _Manner(piece_nbytes, packs, packs and takes_runs)

    def _ask(self, number: int, request: UcxRequest, manner: _Manner) -> None:
        move = request.operation.move
        token = move.token
        spans = pack_spans([(r.remote_offset, r.nbytes) for r in request.ranges])
        ask = Ask(number, move.right, token.region_id, token.capability, *manner, spans)
        self.link.send(ask)

    def on_control(self, message: Control) -> None:
        if not isinstance(message, Done):
            raise FrameInvalid(f"{type(message).__name__} from the serving side")
        request = self._requests.get(message.request)
        if request is None or request.freight is None or request.answered:
            raise FrameInvalid(f"DONE for request {message.request}, which is not in flight")
        request.answered = True
        freight = request.freight
        if message.status == UNPACKABLE:
            self._unpackable.add(request.operation.move.token.region_id)
            freight.call_off()
            self._window_again(request)
        elif error := error_of(message.status, message.text.encode()):
            freight.call_off()
            self.withdraw(request.operation, error)
        self._end(message.request, request)

    def _window_again(self, request: UcxRequest) -> None:
        operation = request.operation
        if not operation.finished:
            operation.give_back(request)
            self._window.drop(operation)
            self._window.add(operation, operation.move.priority)

    def _end(self, number: int, request: UcxRequest) -> None:
        """Forget a request that was answered and is quiet; not before."""
        freight = request.freight
        if not request.answered or freight is None or not freight.ended:
            return
        if self._requests.pop(number, None) is None:
            return
        self.link.forget(number)
        operation = request.operation
        self._window.done(request.nbytes, operation.move.priority)
        if request.complete:
            operation.settle(request)
            if operation.finished:
                self._on_done()
        if operation.finished:
            self._operations.pop(operation, None)
        self._advance()

    def on_lost(self, error: TransferError) -> None:
        operations, self._operations = self._operations, {}
        self._requests.clear()
        for operation in operations:
            operation.finish(error)
        self._on_gone()
