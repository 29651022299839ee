"""Two engines meet over ucx: the worker and the key that one side makes for one connection.

Owns the worker until there is a connection to own it; if none comes about, it is given up in a way
that does not pull it from under the peer, who may be connecting to it. Knows no requests.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from transfer.errors import PeerLost
from transfer.ucx_binding import Context, UcxUnavailable, Worker
from transfer.ucx_codec import KEY_BITS, UCX_PROTOCOL_VERSION, Card
from transfer.ucx_farewell import Farewells


class Meeting:
    """One attempt, on either side."""

    def __init__(self, context: Context, farewells: Farewells) -> None:
        self.farewells = farewells
        self.key = secrets.randbits(KEY_BITS)  # in the tags of what we shall receive
        self._context = context
        self._worker: Worker | None = None

    def make_card(self) -> Card:
        """Return what the peer needs to know. Raises ``UcxUnavailable``."""
        self._worker = self._context.open_worker()
        dialect, address = self._context.dialect, self._worker.address
        return Card(UCX_PROTOCOL_VERSION, dialect, self.key, address)

    def join(self, peer: Card, sock: socket.socket, name: str) -> Worker:
        """Connect our worker to the peer's, and return it.

        Raises:
            UcxUnavailable: the two have no transport in common.
            PeerLost: the peer went away meanwhile.
        """
        assert self._worker is not None, "joined without a card"
        try:
            self._worker.connect(peer.address)
        except UcxUnavailable as error:
            with suppress(BlockingIOError):
                if not sock.recv(1, socket.MSG_PEEK):
                    raise PeerLost(f"{name} hung up after the hello") from error
            raise
        return self._worker

    @contextmanager
    def given_up_on_failure(self, sock: socket.socket) -> Iterator[None]:
        """Give up worker and socket if the body fails or is cancelled."""
        try:
            yield
        except BaseException:
            if self._worker is None:
                sock.close()
            else:
                self._worker.break_off()
                self.farewells.part(self._worker, sock, _nothing)
            raise


def _nothing() -> None:
    """A meeting has no piece under way."""
