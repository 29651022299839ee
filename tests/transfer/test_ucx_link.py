"""How many pieces one connection has under way: few long ones, more short ones. No UCX."""

from __future__ import annotations

import asyncio
import socket

import pytest

from transfer import ucx_rest, ucx_watch
from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.gate import Gate
from transfer.region import RegionTable
from transfer.ucx_binding import Flight, Message
from transfer.ucx_cargo import Cargo
from transfer.ucx_codec import Cancel, Control, pack_tag
from transfer.ucx_farewell import Farewells
from transfer.ucx_freight import Delivery, Shipment
from transfer.ucx_lifeline import Lifeline
from transfer.ucx_link import (
    MAX_RECEIVED_NBYTES,
    MAX_RECEIVES,
    MAX_SENDS,
    MAX_SENT_NBYTES,
    UcxLink,
)

OWN, PEER, REQUEST = 1, 2, 3
NUM_PIECES = 40
SHORT, LONG = 40_000, 1 << 20  # not packed; one piece each


class _Flight:
    completed = False

    def error(self) -> TransferError | None:
        return None


class _Worker:
    """Keeps everything under way until it is told otherwise."""

    moves_only_in_progress = True
    takes_runs = False
    quiet = True
    address = b""

    def __init__(self) -> None:
        self.flights: list[_Flight] = []
        self.announced: list[Message] = []
        self.num_looks = 0
        self._ends = socket.socketpair()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def progress(self) -> None:
        self.num_looks += 1

    def arm(self) -> bool:
        return True

    def connect(self, address: bytes) -> None:
        raise AssertionError(address)

    def send(self, _buffer: object, _tag: int) -> Flight:
        self.flights.append(_Flight())
        return self.flights[-1]

    def probe(self) -> Message | None:
        return self.announced.pop(0) if self.announced else None

    def receive(self, _message: Message, buffer: object) -> Flight:
        return self.send(buffer, 0)

    def drop(self, _message: Message) -> Flight:
        return _Flight()  # what still waits when the connection is closed

    def break_off(self) -> bool:
        for flight in self.flights:
            flight.completed = True
        return True

    def close(self) -> None:
        for end in self._ends:
            end.close()


class _Handler:
    busy = moving = False

    def on_control(self, message: Control) -> None:
        raise AssertionError(message)

    def __init__(self) -> None:
        self.errors: list[TransferError] = []
        self.lost = asyncio.Event()

    def on_lost(self, error: TransferError) -> None:
        self.errors.append(error)
        self.lost.set()


class Bed:
    """A link over a worker on which nothing completes by itself."""

    def __init__(self, nbytes: int) -> None:
        self.worker = _Worker()
        sock, self._peer = socket.socketpair()
        sock.setblocking(False)
        lifeline = Lifeline(sock, "the peer", lambda error: self.link.close(error))
        self.handler = _Handler()
        self.link = UcxLink(self.worker, lifeline, self.handler, Farewells(), own=OWN, peer=PEER)
        memory = memoryview(bytearray(NUM_PIECES * nbytes))
        region = RegionTable(lambda *_: b"").register_host(memory)
        spans = [(i * nbytes, nbytes) for i in range(NUM_PIECES)]
        self.cargo = Cargo(region, spans, piece_nbytes=LONG, packs=True)

    async def turn(self) -> int:
        """Let the link do what it can; return how many pieces are under way."""
        self.link.kick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return sum(not flight.completed for flight in self.worker.flights)

    def close(self) -> None:
        self._peer.close()
        self.link.close(PeerClosed("the test is over"))


@pytest.mark.parametrize(("nbytes", "limit"), [(SHORT, MAX_SENDS), (LONG, MAX_SENT_NBYTES // LONG)])
async def test_pieces_being_sent_are_bounded_in_number_and_in_bytes(
    nbytes: int, limit: int
) -> None:
    bed = Bed(nbytes)
    bed.link.ship(Shipment(REQUEST, bed.cargo, Gate(), lambda _complete: None))
    assert await bed.turn() == limit
    bed.worker.flights[0].completed = True
    assert await bed.turn() == limit, "another piece follows one that was sent, and only one"
    assert len(bed.worker.flights) == limit + 1
    bed.close()


@pytest.mark.parametrize(
    ("nbytes", "limit"), [(SHORT, MAX_RECEIVES), (LONG, MAX_RECEIVED_NBYTES // LONG)]
)
async def test_pieces_being_received_are_bounded_in_number_and_in_bytes(
    nbytes: int, limit: int
) -> None:
    bed = Bed(nbytes)
    bed.link.expect(Delivery(REQUEST, bed.cargo, Gate(), lambda _complete: None))
    bed.worker.announced += [
        Message(pack_tag(OWN, REQUEST, index), nbytes, None) for index in range(NUM_PIECES)
    ]
    assert await bed.turn() == limit
    bed.worker.flights[0].completed = True
    assert await bed.turn() == limit, "another piece follows one that arrived, and only one"
    assert len(bed.worker.flights) == limit + 1
    bed.close()


async def test_a_control_message_that_ucx_refuses_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed(SHORT)

    def refuse(_buffer: object, _tag: int) -> Flight:
        raise PeerLost("the endpoint is gone")

    monkeypatch.setattr(bed.worker, "send", refuse)
    bed.link.send(Cancel(1))  # does not raise: whoever waits for the request is told
    await bed.turn()
    assert [str(error) for error in bed.handler.errors] == ["the endpoint is gone"]
    bed.close()


async def test_a_connection_that_gives_the_core_away_lets_the_loop_go_on_after_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ucx_rest, "MAX_LINGERED_S", 1000.0)  # however slow this machine is
    bed = Bed(SHORT)
    monkeypatch.setattr(bed.worker, "arm", lambda: False)
    await bed.turn()
    for _ in range(5):
        looks = bed.worker.num_looks
        await asyncio.sleep(0)
        assert bed.worker.num_looks == looks + 1
    bed.close()


async def test_a_connection_whose_worker_never_sleeps_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ucx_rest, "MAX_LINGERED_S", 0.0)
    monkeypatch.setattr(ucx_rest, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(ucx_rest, "MAX_PAUSE_S", 1000.0)
    bed = Bed(SHORT)
    monkeypatch.setattr(bed.worker, "arm", lambda: False)
    await bed.turn()
    looks = bed.worker.num_looks
    for _ in range(20):
        await asyncio.sleep(0)
    assert bed.worker.num_looks == looks
    await bed.turn()
    assert bed.worker.num_looks == looks + 1, "what we ask for does not wait"
    bed.close()


async def test_a_frozen_peer_is_lost_while_only_ucx_itself_has_something_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ucx_rest, "MAX_LINGERED_S", 0.0)
    monkeypatch.setattr(ucx_watch, "WATCH_S", 0.001)
    monkeypatch.setattr(ucx_watch, "PING_S", 0.001)
    bed = Bed(SHORT)
    monkeypatch.setattr(bed.worker, "arm", lambda: False)
    async with asyncio.timeout(10):
        await bed.handler.lost.wait()
    assert "has not answered" in str(bed.handler.errors[0])
    bed.close()
