"""The socket beside a ucx connection: signals, silence and goodbyes, without UCX."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tests.transfer.bulk_harness import LIMIT_S
from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.ucx_lifeline import GOODBYE, PING, PONG, Lifeline
from transfer.ucx_watch import MAX_UNANSWERED, PING_S, QUIET_LIMIT_S, WATCH_S, LinkWatch


class Line:
    """A lifeline and the socket at its other end."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.peer.setblocking(False)
        self.ended: asyncio.Future[TransferError] = asyncio.get_running_loop().create_future()
        self.lifeline = Lifeline(ours, "the peer", self._on_end)

    def _on_end(self, error: TransferError) -> None:
        self.lifeline.let_go().close()
        self.ended.set_result(error)

    async def signal(self) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.get_running_loop().sock_recv(self.peer, 100)

    async def end(self) -> TransferError:
        async with asyncio.timeout(LIMIT_S):
            return await self.ended


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    made = Line()
    yield made
    if not made.ended.done():
        made.lifeline.let_go().close()
    made.peer.close()


async def test_a_ping_is_answered(line: Line) -> None:
    line.peer.send(PING)
    assert await line.signal() == PONG


async def test_any_signal_is_a_sign_of_life(line: Line) -> None:
    for _ in range(3):
        line.lifeline.ping()
    assert line.lifeline.unanswered == 3
    line.peer.send(PONG)
    line.lifeline.look()
    assert line.lifeline.unanswered == 0


async def test_a_goodbye_is_an_end_in_order_even_if_the_stream_breaks_after_it(line: Line) -> None:
    line.peer.send(GOODBYE)
    line.peer.close()
    assert isinstance(await line.end(), PeerClosed)


async def test_an_end_without_a_goodbye_is_a_loss(line: Line) -> None:
    line.peer.close()
    assert isinstance(await line.end(), PeerLost)


async def test_saying_goodbye_waits_until_the_peer_has_hung_up(line: Line) -> None:
    goodbye = asyncio.create_task(line.lifeline.say_goodbye())
    assert await line.signal() == GOODBYE
    assert not goodbye.done()
    line.peer.close()
    async with asyncio.timeout(LIMIT_S):
        await goodbye


async def test_a_peer_that_takes_no_signals_does_not_block_us(line: Line) -> None:
    for _ in range(100_000):
        line.lifeline.ping()
    assert not line.ended.done()


class Watched:
    """A watch whose timer is turned by hand."""

    def __init__(self, line: Line) -> None:
        self.busy, self.unwanted = True, False
        self.errors: list[TransferError] = []
        self.watch = LinkWatch(
            line.lifeline, lambda: self.busy, lambda: self.unwanted, self.errors.append
        )

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds / WATCH_S)):
            self.watch.stop()
            self.watch._look()
        self.watch.stop()


async def test_a_peer_is_lost_after_so_many_pings_without_a_sign(line: Line) -> None:
    watched = Watched(line)
    watched.pass_s(PING_S * MAX_UNANSWERED)
    assert not watched.errors
    watched.pass_s(PING_S)
    assert isinstance(watched.errors[0], PeerLost)


async def test_a_slow_peer_that_answers_is_never_lost(line: Line) -> None:
    watched = Watched(line)
    for _ in range(10 * MAX_UNANSWERED):
        watched.pass_s(PING_S)
        line.peer.send(PONG)
        line.lifeline.look()
    assert not watched.errors


async def test_a_piece_that_was_called_off_ends_the_connection_only_if_nothing_moves(
    line: Line,
) -> None:
    watched = Watched(line)
    watched.unwanted = True
    for _ in range(10):
        watched.watch.moved()
        watched.pass_s(WATCH_S)
    assert not watched.errors
    watched.pass_s(QUIET_LIMIT_S + WATCH_S)
    assert isinstance(watched.errors[0], PeerLost)


async def test_an_idle_connection_has_no_timer(line: Line) -> None:
    watched = Watched(line)
    watched.busy = False
    watched.watch.start()
    assert watched.watch._timer is None
    watched.busy = True
    watched.watch.start()
    assert watched.watch._timer is not None
    watched.busy = False
    watched.watch.stop()
    watched.watch._look()
    assert watched.watch._timer is None
