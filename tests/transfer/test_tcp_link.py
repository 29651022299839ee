"""One tcp connection over a socket pair: what waits for a peer that does not read is bounded."""

from __future__ import annotations

import socket

import pytest

from transfer import tcp_link
from transfer.errors import PeerLost, TransferError
from transfer.tcp_codec import Header, Op, control_frame
from transfer.tcp_link import Link
from transfer.tcp_reader import Sink


class Handler:
    """Awaits nothing, and remembers why the link was lost."""

    busy = False

    def __init__(self) -> None:
        self.lost: list[TransferError] = []

    def on_frame(self, header: Header, body: bytes) -> None: ...

    def sink_for(self, header: Header) -> Sink:
        raise AssertionError("nobody sends data")

    def on_data_end(self, sink: Sink) -> None: ...

    def on_lost(self, error: TransferError) -> None:
        self.lost.append(error)


async def test_a_peer_that_asks_and_does_not_read_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_link, "MAX_CONTROL_QUEUED_NBYTES", 1 << 16)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    handler = Handler()
    link = Link(ours, handler, piece_nbytes=4096, name="peer")
    frame = control_frame(Op.DONE, 1, bytes(1000))
    sent_nbytes = 0
    while not link.closed:
        link.send(frame)
        sent_nbytes += len(frame)
        assert sent_nbytes < 64 << 20, "the queue has no limit"
    link.send(frame)
    (error,) = handler.lost
    assert isinstance(error, PeerLost)
    theirs.close()
