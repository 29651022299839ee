"""A connection whose UCX is out of resources for a while, or broken: no byte and nobody is lost.

No UCX.
"""

from __future__ import annotations

import pytest

from tests.transfer.test_ucx_link import NUM_PIECES, OWN, PEER, REQUEST, SHORT, Bed, _Flight
from transfer import ucx_link, ucx_outbox
from transfer.errors import PeerLost
from transfer.gate import Gate
from transfer.ucx_binding import Flight, Message
from transfer.ucx_codec import Cancel, Control, encode_control, pack_tag
from transfer.ucx_freight import Delivery, Shipment
from transfer.ucx_link import MAX_SENDS

BUSY, BROKEN = BlockingIOError("status -2"), PeerLost("status -25")
CONTROL = pack_tag(PEER, 0, 0)


class Scarce:
    """A worker whose UCX is out of resources, or broken, for whichever calls a test names."""

    def __init__(self, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refusals: dict[str, Exception] = {}
        self.tags: list[int] = []  # of what was sent
        self.dropped: list[Message] = []
        self._send, self._receive = bed.worker.send, bed.worker.receive
        monkeypatch.setattr(ucx_link, "RETRY_S", 0.0)
        for name in ("send", "receive", "drop"):
            monkeypatch.setattr(bed.worker, name, getattr(self, name))

    def _refuse(self, what: str) -> None:
        if what in self.refusals:
            raise self.refusals[what]

    def send(self, buffer: object, tag: int) -> Flight:
        self._refuse("send")
        if tag == CONTROL:
            self._refuse("control")
        self.tags.append(tag)
        return self._send(buffer, tag)

    def receive(self, message: Message, buffer: object) -> Flight:
        self._refuse("receive")
        return self._receive(message, buffer)

    def drop(self, message: Message) -> Flight:
        self._refuse("drop")
        self.dropped.append(message)
        return _Flight()


async def test_what_ucx_refuses_for_now_is_sent_later_in_order_and_ahead_of_its_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed(SHORT)
    scarce = Scarce(bed, monkeypatch)
    scarce.refusals["send"] = BUSY
    bed.link.send(Cancel(1))
    bed.link.ship(Shipment(REQUEST, bed.cargo, Gate(), lambda _complete: None))
    for _ in range(5):
        await bed.turn()
    scarce.refusals.clear()
    bed.link.send(Cancel(2))
    await bed.turn()
    assert scarce.tags[:2] == [CONTROL] * 2
    assert scarce.tags[2:] == [pack_tag(PEER, REQUEST, index) for index in range(MAX_SENDS)]
    assert not bed.handler.errors
    bed.close()


async def test_what_is_asked_for_while_pieces_are_sent_stays_ahead_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed, revoked = Bed(SHORT), Gate()
    scarce = Scarce(bed, monkeypatch)
    next_one = Shipment(REQUEST, bed.cargo, Gate(), lambda _complete: None)

    def on_end(_complete: bool) -> None:
        scarce.refusals["control"] = BUSY
        bed.link.send(Cancel(1))
        bed.link.ship(next_one)

    revoked.shut()
    bed.link.ship(Shipment(REQUEST + 1, bed.cargo, revoked, on_end))
    await bed.turn()
    assert not scarce.tags
    scarce.refusals.clear()
    await bed.turn()
    assert scarce.tags[:2] == [CONTROL, pack_tag(PEER, REQUEST, 0)]
    bed.close()


async def test_no_more_waits_for_ucx_than_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_outbox, "MAX_CONTROL_FLIGHTS", 3)
    bed = Bed(SHORT)
    scarce = Scarce(bed, monkeypatch)
    bed.link.send(Cancel(1))  # the peer has not taken it
    scarce.refusals["send"] = BUSY
    bed.link.send(Cancel(2))
    bed.link.send(Cancel(3))
    await bed.turn()
    assert not bed.handler.errors
    bed.link.send(Cancel(4))
    assert not bed.link.closed, "whoever sends is told later"
    await bed.turn()
    assert "does not take" in str(bed.handler.errors[0])
    bed.close()


async def test_a_control_message_that_ucx_does_not_receive_for_now_is_read_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed(SHORT)
    scarce, read = Scarce(bed, monkeypatch), list[Control]()
    monkeypatch.setattr(bed.handler, "on_control", read.append)
    scarce.refusals["receive"] = BUSY
    data = encode_control(Cancel(1))
    bed.worker.announced += [Message(pack_tag(OWN, 0, 0), len(data), None)]
    await bed.turn()
    assert not bed.worker.flights
    scarce.refusals.clear()

    def receive(_message: Message, buffer: object) -> Flight:
        assert isinstance(buffer, bytearray)
        buffer[:] = data
        flight = _Flight()
        flight.completed = True
        return flight

    monkeypatch.setattr(bed.worker, "receive", receive)
    await bed.turn()
    assert read == [Cancel(1)]
    bed.close()


async def test_a_message_that_ucx_does_not_take_for_now_is_dropped_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed(SHORT)
    scarce = Scarce(bed, monkeypatch)
    scarce.refusals["receive"] = BUSY
    message = Message(pack_tag(OWN, 0, 0), 1, None)
    bed.worker.announced.append(message)
    await bed.turn()
    bed.close()
    assert scarce.dropped == [message]


@pytest.mark.parametrize("refusal", [BUSY, BROKEN], ids=["busy", "broken"])
async def test_whoever_uses_a_connection_is_told_of_its_end_also_if_ucx_drops_nothing(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(SHORT)
    scarce, gate = Scarce(bed, monkeypatch), Gate()
    bed.link.expect(Delivery(REQUEST, bed.cargo, gate, lambda _complete: None))
    bed.worker.announced += [
        Message(pack_tag(OWN, REQUEST, index), SHORT, None) for index in range(NUM_PIECES)
    ]
    await bed.turn()
    scarce.refusals["drop"] = refusal
    bed.link.close(PeerLost("cut"))
    assert [str(error) for error in bed.handler.errors] == ["cut"]
    assert gate._inside == 0


@pytest.mark.parametrize("way", ["send", "receive"])
async def test_a_piece_that_ucx_does_not_move_is_not_waited_for_nor_taken_twice(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(SHORT)
    scarce, gate, ends = Scarce(bed, monkeypatch), Gate(), list[bool]()
    scarce.refusals[way] = BROKEN
    messages = [Message(pack_tag(OWN, REQUEST, index), SHORT, None) for index in range(2)]
    if way == "send":
        bed.link.ship(Shipment(REQUEST, bed.cargo, gate, ends.append))
    else:
        bed.link.expect(Delivery(REQUEST, bed.cargo, gate, ends.append))
        bed.worker.announced += messages
    await bed.turn()
    assert bed.handler.errors == [BROKEN]
    assert ends == [False]
    assert gate._inside == 0
    assert scarce.dropped == (messages[1:] if way == "receive" else [])


@pytest.mark.parametrize("way", ["send", "receive"])
async def test_a_piece_that_fails_under_way_ends_its_request_when_nobody_can_be_answered(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the peer is told that the request was cancelled, and not that the connection broke."""
    bed, closed = Bed(SHORT), list[bool]()

    def on_end(complete: bool) -> None:
        assert not complete
        closed.append(bed.link.closed)

    if way == "send":
        bed.link.ship(Shipment(REQUEST, bed.cargo, Gate(), on_end))
    else:
        bed.link.expect(Delivery(REQUEST, bed.cargo, Gate(), on_end))
        bed.worker.announced += [Message(pack_tag(OWN, REQUEST, 0), SHORT, None)]
    await bed.turn()
    monkeypatch.setattr(_Flight, "error", lambda _flight: BROKEN)
    for flight in bed.worker.flights:
        flight.completed = True
    await bed.turn()
    assert closed == [True]
    assert bed.handler.errors == [BROKEN]
