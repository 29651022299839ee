"""Accepting connections when the process has no descriptors left, or enough connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator

import pytest

from transfer import acceptor
from transfer.acceptor import Acceptor


class Listener(socket.socket):
    """A listening socket that is out of descriptors for a while."""

    num_failures = 0
    num_calls = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_calls += 1
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as sock:
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock


async def test_out_of_descriptors_it_waits_and_does_not_spin(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "ACCEPT_RETRY_S", 0.01)
    accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
    listener.num_failures = 2
    accepting = Acceptor(listener, lambda sock, _: accepted.put_nowait(sock), num_open=lambda: 0)
    with socket.create_connection(listener.getsockname()):
        async with asyncio.timeout(5):
            (await accepted.get()).close()
    assert listener.num_calls == 3
    accepting.close()
    accepting.close()


async def test_connections_beyond_the_maximum_are_closed_at_once(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "MAX_ACCEPTED", 1)
    accepted: list[socket.socket] = []
    accepting = Acceptor(
        listener, lambda sock, _: accepted.append(sock), num_open=lambda: len(accepted)
    )
    address = listener.getsockname()
    with socket.create_connection(address), socket.create_connection(address) as second:
        assert await asyncio.to_thread(second.recv, 1) == b""
        assert len(accepted) == 1
        accepted[0].close()
    accepting.close()
