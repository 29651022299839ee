"""Accepts connections on one listening socket, on the I/O loop.

Owns the listening socket; who connects is its user's business. Out of file descriptors, the socket
stays readable: it is left alone for ``ACCEPT_RETRY_S`` then, so that the loop does not spin.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.5  # when the process is out of file descriptors
MAX_ACCEPTED = 4096  # connections that one listening socket serves at a time


class Acceptor:
    """Calls ``on_accepted(sock, address)`` with each new connection, non-blocking.

    Args:
        sock: listening and non-blocking; closed by ``close``.
        on_accepted: may raise OSError, for a socket that is broken already: it is closed.
        num_open: connections open now; beyond ``MAX_ACCEPTED`` new ones are closed at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_accepted: Callable[[socket.socket, object], None],
        *,
        num_open: Callable[[], int],
    ) -> None:
        self._sock: socket.socket | None = sock
        self._on_accepted = on_accepted
        self._num_open = num_open
        asyncio.get_running_loop().add_reader(sock, self._on_acceptable)

    def _on_acceptable(self) -> None:
        assert self._sock is not None, "accepting without a socket"
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        if self._num_open() >= MAX_ACCEPTED:
            _LOG.error("refused a bulk connection: %d are open already", MAX_ACCEPTED)
            sock.close()
            return
        sock.setblocking(False)
        try:
            self._on_accepted(sock, address)
        except OSError as error:  # whoever connected has reset the connection already
            _LOG.info("lost a bulk connection before it began: %s", error)
            sock.close()

    def _pause(self, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, "?")
        _LOG.error("cannot accept bulk connections (%s); trying again", name)
        loop = asyncio.get_running_loop()
        if self._sock is not None:
            loop.remove_reader(self._sock)
            loop.call_later(ACCEPT_RETRY_S, self._resume)

    def _resume(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock, self._on_acceptable)

    def close(self) -> None:
        """Stop accepting and close the listening socket. Idempotent."""
        sock, self._sock = self._sock, None
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
