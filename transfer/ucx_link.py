"""One ucx connection: messages out, messages in, and getting rid of it.

Owns the worker, the lifeline and every flight between them and memory. Runs on the ucx loop, or
while that is lent; there only ``send``, ``ship`` and ``expect``, which leave turns and ends to it.
The worker's descriptor is in the loop: an idle connection costs nothing. Knows no requests of
either side: ``Freight`` says which bytes, the handler says what control messages mean.

A turn: make progress, settle what has completed, take what has arrived, land and send pieces, and
sleep if UCX agrees. Where UCX is out of resources, the rest of the turn is tried again a little
later. Pieces under way are bounded, in number and bytes, so what is called off is quiet soon;
control messages overtake pieces that wait to be landed.

::

    open ──finish()──▶ saying goodbye ──▶ closed
      └── close(error), error of ucx, end of the lifeline, broken protocol, silence ──▶ closed

Invariant: a piece stays aboard its freight until UCX touches its memory no more. Cutting the
connection completes every flight, most of them at once; a rest is waited for by ``Farewells``. So a
peer that is frozen with a piece under way cannot hold up a deadline, a cancel or a revocation:
``LinkWatch`` cuts the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Protocol

from transfer.errors import FrameInvalid, PeerClosed, PeerLost, TransferError
from transfer.ucx_alarm import Alarm
from transfer.ucx_binding import Message, Worker
from transfer.ucx_codec import (
    MAX_CONTROL_NBYTES,
    Control,
    decode_control,
    pack_tag,
    unpack_tag,
)
from transfer.ucx_farewell import Farewells
from transfer.ucx_flights import Flights
from transfer.ucx_freight import Delivery, Shipment
from transfer.ucx_lifeline import Lifeline
from transfer.ucx_outbox import Outbox
from transfer.ucx_pieces import Piece
from transfer.ucx_quota import Quota
from transfer.ucx_rest import Rest
from transfer.ucx_watch import LinkWatch

_LOG = logging.getLogger(__name__)

# Under way at a time; few of long pieces, and enough of short ones to outlast the work on the next.
MAX_SENDS = 32
MAX_SENT_NBYTES = 8 << 20  # a piece is sent while there are less
MAX_RECEIVES = 16
MAX_RECEIVED_NBYTES = 8 << 20
MAX_WAITING = 1 << 15  # pieces that wait to be landed: a window of the smallest, and to spare
RETRY_S = 0.001  # when UCX is out of resources
MAX_ROUNDS = 16  # of one turn, before other connections get theirs


class LinkHandler(Protocol):
    """What a connection is used for."""

    @property
    def busy(self) -> bool:
        """True while something of the peer is awaited."""
        ...

    @property
    def moving(self) -> bool:
        """True while a request is not over, on whichever side."""
        ...

    def on_control(self, message: Control) -> None: ...

    def on_lost(self, error: TransferError) -> None: ...


_Arrived = tuple[Message, Delivery, int]  # the number of the piece is the last


class UcxLink:
    """Made when both ends have met; ``worker`` is connected."""

    def __init__(
        self,
        worker: Worker,
        lifeline: Lifeline,
        handler: LinkHandler,
        farewells: Farewells,
        *,
        own: int,
        peer: int,
    ) -> None:
        """Args:
        own: the key in the tags of what we receive.
        peer: the key in the tags of what we send.
        """
        self._worker = worker
        self._lifeline = lifeline
        self._handler = handler
        self._farewells = farewells
        self._own = own
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._flights = Flights(worker)
        self._outbox = Outbox(worker, self._flights, pack_tag(peer, 0, 0))
        self._shipments: deque[Shipment] = deque()
        self._deliveries: dict[int, Delivery] = {}
        self._arrived: deque[_Arrived] = deque()
        self._sends = Quota(MAX_SENDS, MAX_SENT_NBYTES)
        self._receives = Quota(MAX_RECEIVES, MAX_RECEIVED_NBYTES)
        self._refused: Message | None = None  # by UCX, for now: it is taken next
        self._reads_control = False
        self._rest = Rest(worker, self._loop.time)
        self._kicked = False
        self._retry: asyncio.TimerHandle | None = None
        self._watch = LinkWatch(
            lifeline, lambda: self._busy, lambda: self._flights.unwanted, self.close
        )
        self.closed = False
        self._alarm = Alarm(worker.fileno(), self._turn)
        self.kick()

    @property
    def name(self) -> str:
        return self._lifeline.name

    @property
    def takes_runs(self) -> bool:
        """Whether UCX takes several runs of memory for one piece here."""
        return self._worker.takes_runs

    @property
    def finishing(self) -> bool:
        return self._lifeline.finishing

    def kick(self) -> None:
        """Take a turn soon."""
        if not self._kicked and not self.closed:
            self._kicked = True
            self._loop.call_soon(self._turn)

    def send(self, message: Control) -> None:
        """Send a control message; a peer that never takes them is dropped.

        Raises nothing: whoever asked is told as of any lost connection, and not from in here.
        """
        if self.closed:
            return
        try:
            if self._outbox.full:
                raise PeerLost(f"{self.name} asks and does not take the answers")
            self._outbox.put(message)
            self._outbox.post()
        except TransferError as error:
            self._loop.call_soon(self._fail, error)
        except BlockingIOError:
            pass  # a turn tries again
        self.kick()

    def ship(self, shipment: Shipment) -> None:
        """Send the pieces of ``shipment``, in turns with those of others."""
        self._shipments.append(shipment)
        self.kick()

    def expect(self, delivery: Delivery) -> None:
        """Pieces of this request will come."""
        self._deliveries[delivery.request] = delivery

    def forget(self, request: int) -> None:
        """Pieces of this request that still come are dropped."""
        self._deliveries.pop(request, None)

    def _turn(self) -> None:
        self._kicked = False
        try:
            if not self._work():
                self.kick()
        except BlockingIOError:
            if self._retry is None:
                self._retry = self._loop.call_later(RETRY_S, self._try_again)
        except TransferError as error:
            self._fail(error)
        self._watch.start()

    def _try_again(self) -> None:
        self._retry = None
        self.kick()

    def _work(self) -> bool:
        """Do what there is to do; False if the turn was over before."""
        self._lifeline.look()
        for _ in range(MAX_ROUNDS):
            if self.closed:
                return True
            self._worker.progress()
            busy = self._settle() | self._take() | self._land() | self._outbox.post() | self._load()
            if busy:
                self._rest.disturb()
                self._alarm.end_pause()
            elif self.closed:
                return True
            elif self._rest.arm_or_give_way(busy=self._moving):
                self._alarm.end_pause()
                return True
            elif self._rest.pause_s is not None:
                self._alarm.pause(self._rest.pause_s)
                return True
            elif self._rest.gave_way:
                return False  # on a busy machine that took a while: this loop has others too
        return False

    def _fail(self, error: TransferError) -> None:
        """UCX or the peer broke the rules; if the peer has said goodbye, that is the reason."""
        self._lifeline.look()
        if not self.closed:
            if isinstance(error, FrameInvalid):
                _LOG.warning("dropping the ucx connection to %s: %s", self.name, error)
            self.close(error)

    def _settle(self) -> bool:
        """Let go of the flights that have completed."""
        settled = self._flights.settle()
        if settled:
            self._watch.moved()
        return settled

    def _take(self) -> bool:
        """Look at what has arrived. What follows a control message waits until it is read."""
        took = False
        while not (self.closed or self._reads_control):
            message, self._refused = self._refused or self._worker.probe(), None
            if message is None:
                break
            took = True
            try:
                self._on_message(message)
            except BlockingIOError:
                self._refused = message
                raise
            if self._reads_control:  # a short one has been read by now
                self._settle()
        return took

    def _on_message(self, message: Message) -> None:
        key, request, index = unpack_tag(message.tag)
        delivery = self._deliveries.get(request)
        if key != self._own:
            self._drop(message)  # from nobody who has met us
        elif request == 0:
            self._receive_control(message)
        elif delivery is None:
            self._drop(message)
        elif delivery.unwanted:
            delivery.call_off()
            self._drop(message)
        else:
            self._arrived.append((message, delivery, index))
            if len(self._arrived) > MAX_WAITING:
                raise FrameInvalid(f"more than {MAX_WAITING} pieces at once")

    def _receive_control(self, message: Message) -> None:
        if not 0 < message.nbytes <= MAX_CONTROL_NBYTES:
            self._drop(message)
            raise FrameInvalid(f"a control message of {message.nbytes} bytes")
        data = bytearray(message.nbytes)
        flight = self._worker.receive(message, data)
        self._reads_control = True

        def settle(error: TransferError | None) -> None:
            self._reads_control = False
            if error is None and not self.closed:
                self._handler.on_control(decode_control(memoryview(data)))

        self._flights.post(flight, None, settle)

    def _land(self) -> bool:
        """Receive pieces into memory, in the order of their arrival; drop what nobody wants."""
        landed = False
        while self._arrived and not self.closed:
            message, delivery, index = arrived = self._arrived[0]
            if not (self._receives.has_room or delivery.unwanted):
                break
            found = delivery.berth(index, message.nbytes)
            self._arrived.popleft()  # whatever UCX says, but for one thing it is gone
            try:
                if found is None:
                    self._drop(message)
                else:
                    self._receive_piece(message, delivery, index, *found)
            except BlockingIOError:
                self._arrived.appendleft(arrived)
                raise
            landed = True
        return landed

    def _receive_piece(
        self, message: Message, delivery: Delivery, index: int, piece: Piece, berth: object
    ) -> None:
        try:
            flight = self._worker.receive(message, berth)
        except (BlockingIOError, TransferError):
            delivery.put_back(index)
            raise
        self._receives.begin(piece.nbytes)

        def settle(error: TransferError | None) -> None:
            self._receives.end(piece.nbytes)
            delivery.landed(piece, berth, failed=error is not None)

        self._flights.post(flight, delivery, settle)

    def _drop(self, message: Message) -> None:
        self._flights.post(self._worker.drop(message), None, _nothing)

    def _load(self) -> bool:
        """Send pieces, one of each shipment in turn; none ahead of what announces it."""
        loaded = False
        while self._shipments and self._sends.has_room and not (self._outbox or self.closed):
            shipment = self._shipments[0]
            piece = shipment.load()
            if piece is None:
                self._shipments.popleft()
                continue
            self._send_piece(shipment, *piece)
            self._shipments.rotate(-1)
            loaded = True
        return loaded

    def _send_piece(self, shipment: Shipment, index: int, nbytes: int, data: object) -> None:
        tag = pack_tag(self._peer, shipment.request, index)
        try:
            flight = self._worker.send(data, tag)
        except (BlockingIOError, TransferError):
            shipment.put_back()
            raise
        self._sends.begin(nbytes)

        def settle(error: TransferError | None) -> None:
            self._sends.end(nbytes)
            shipment.sent(failed=error is not None)

        self._flights.post(flight, shipment, settle)

    @property
    def _moving(self) -> bool:
        return bool(self._flights) or self._handler.moving

    @property
    def _busy(self) -> bool:
        stuck = self._rest.pause_s is not None  # UCX has something under way on its own account
        waits = stuck or bool(self._flights) or bool(self._outbox)
        return not self.closed and (waits or self._handler.busy)

    async def finish(self) -> None:
        """Say goodbye, then close."""
        if not self.closed:
            await self._lifeline.say_goodbye()
            self.close(PeerClosed("this transfer engine was closed"))

    def close(self, error: TransferError) -> None:
        """Cut the connection at once; the handler is told ``error``. Idempotent."""
        if self.closed:
            return
        if self._lifeline.finishing:
            error = PeerClosed("this transfer engine was closed")
        self.closed = True
        self._watch.stop()
        self._alarm.stop()
        sock = self._lifeline.let_go()
        for message in (*(message for message, _, _ in self._arrived), self._refused):
            with suppress(TransferError, BlockingIOError):  # it goes with the worker
                if message is not None:
                    self._worker.drop(message)
        self._arrived.clear()
        self._worker.break_off()
        self._flights.settle_cut(error)
        for freight in (*self._shipments, *self._deliveries.values()):
            freight.call_off()
        self._shipments.clear()
        self._deliveries.clear()
        self._farewells.part(self._worker, sock, partial(self._flights.give_up, error))
        self._handler.on_lost(error)


def _nothing(_error: TransferError | None) -> None:
    """A dropped message needs no settling."""
