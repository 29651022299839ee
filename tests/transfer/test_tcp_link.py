"""One tcp connection over a socket pair: what ends it, what it is said to be, what waits in it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.transfer.bulk_harness import until
from tests.transfer.raw_tcp import RESET
from transfer import tcp_link
from transfer.cursor import Cursor
from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.gate import Gate
from transfer.tcp_codec import Header, Op, control_frame, encode_header
from transfer.tcp_link import Link
from transfer.tcp_reader import Sink
from transfer.tcp_writer import Source


class Handler:
    """Awaits nothing, and remembers what it was told."""

    busy = saturated = False

    def __init__(self) -> None:
        self.frames: list[Op] = []
        self.lost: list[TransferError] = []
        self.link: Link | None = None
        self.react: Callable[[Link], None] = lambda link: None

    def on_frame(self, header: Header, body: bytes) -> None:
        assert self.link is not None
        self.frames.append(header.op)
        if header.op is Op.GOODBYE:
            self.link.peer_said_goodbye = True
        self.react(self.link)

    def sink_for(self, header: Header) -> Sink:
        raise AssertionError("nobody sends data")

    def on_data_end(self, sink: Sink) -> None: ...

    def on_lost(self, error: TransferError) -> None:
        self.lost.append(error)


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a tcp connection; the first is non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def linked(sock: socket.socket) -> tuple[Link, Handler]:
    handler = Handler()
    handler.link = Link(sock, handler, piece_nbytes=4096, name="peer")
    return handler.link, handler


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


async def test_frames_that_came_with_the_one_that_ended_the_connection_are_not_handed_out(
    pair: Pair,
) -> None:
    """Whoever serves them would hold memory for a connection that is gone."""
    ours, theirs = pair
    _, handler = linked(ours)
    handler.react = lambda link: link.close(PeerLost("enough"))
    theirs.sendall(control_frame(Op.CANCEL, 1) * 3)
    await until(lambda: handler.lost)
    assert handler.frames == [Op.CANCEL]


async def test_a_reset_after_a_goodbye_is_a_close_in_order(pair: Pair) -> None:
    ours, theirs = pair
    link, handler = linked(ours)
    theirs.sendall(control_frame(Op.GOODBYE))
    await until(lambda: link.peer_said_goodbye)
    reset(theirs)
    await until(lambda: handler.lost)
    assert isinstance(handler.lost[0], PeerClosed)


@pytest.mark.parametrize("before", [b"", encode_header(Op.GOODBYE)[:10]])
async def test_a_reset_without_a_whole_goodbye_is_a_loss(pair: Pair, before: bytes) -> None:
    ours, theirs = pair
    _, handler = linked(ours)
    theirs.sendall(before)
    reset(theirs)
    await until(lambda: handler.lost)
    assert isinstance(handler.lost[0], PeerLost)


@pytest.mark.parametrize("bug", [AssertionError, AttributeError])
async def test_a_bug_of_ours_while_sending_ends_the_connection_and_is_raised(
    pair: Pair, bug: type[Exception]
) -> None:
    """Left open, the writable socket would call into the bug for ever."""
    link, handler = linked(pair[0])

    def broken(complete: bool) -> None:
        raise bug("a bug")

    with pytest.raises(bug, match="a bug"):
        link.add(Source(1, Cursor(memoryview(b"x"), [(0, 1)]), Gate(), broken))
    assert link.closed
    assert isinstance(handler.lost[0], PeerLost)


@pytest.mark.parametrize("bug", [AssertionError, AttributeError, ValueError])
async def test_a_bug_of_ours_of_any_kind_does_not_leave_the_peer_waiting(
    pair: Pair, bug: type[Exception]
) -> None:
    link, handler = linked(pair[0])

    def break_down(link: Link) -> None:
        raise bug("a bug")

    handler.react = break_down
    pair[1].sendall(control_frame(Op.CANCEL, 1))
    with pytest.raises(bug, match="a bug"):
        link.look()
    assert link.closed
    assert isinstance(handler.lost[0], PeerLost)
    assert pair[1].recv(1) == b"", "the peer hears of it at once"


async def test_a_peer_that_asks_and_does_not_read_is_dropped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_link, "MAX_CONTROL_QUEUED_NBYTES", 1 << 16)
    link, handler = linked(pair[0])
    frame = control_frame(Op.DONE, 1, bytes(1000))
    sent_nbytes = 0
    while not link.closed:
        link.send(frame)
        sent_nbytes += len(frame)
        assert sent_nbytes < 64 << 20, "the queue has no limit"
    link.send(frame)
    (error,) = handler.lost
    assert isinstance(error, PeerLost)
