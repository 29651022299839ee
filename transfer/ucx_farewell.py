"""The end of ucx connections: a worker is given back when the peer has let go of it as well.

Owns the workers and sockets of connections that are over here, until they are over there. Why: a
peer reaches a worker's shared memory by the number of one of our descriptors (``/proc/pid/fd/n``),
opened when it is first needed. Closed too early, the number may stand for another file by then.

::

    cut off here ──part()──▶ told the peer (end of stream) ──peer hangs up──▶ closed
                                 └── after PARTING_LIMIT_S, or when too many wait ──▶ closed

Both sides cut off *before* they end the stream, and look at the stream before they use UCX: so the
first to see its end knows that nothing of the other side touches anything any more.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from contextlib import suppress

from transfer.ucx_binding import Worker

_LOG = logging.getLogger(__name__)
PARTING_LIMIT_S = 30.0  # a peer that is frozen for longer looks before it touches
MAX_PARTING = 256
READ_NBYTES = 4096


class Farewells:
    """Those of one engine. Lives on the ucx loop."""

    def __init__(self) -> None:
        self._parting: dict[socket.socket, tuple[Worker, asyncio.TimerHandle]] = {}

    def part(self, worker: Worker, sock: socket.socket) -> None:
        """Take over a worker that was broken off, and the lifeline's socket."""
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        if _has_hung_up(sock):
            sock.close()
            worker.close()
            return
        if len(self._parting) >= MAX_PARTING:
            self._close(next(iter(self._parting)))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(PARTING_LIMIT_S, self._close, sock)
        self._parting[sock] = worker, timer
        loop.add_reader(sock, self._on_readable, sock)

    def _on_readable(self, sock: socket.socket) -> None:
        if _has_hung_up(sock):
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        worker, timer = self._parting.pop(sock)
        timer.cancel()
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()
        worker.close()

    def end(self, limit_s: float) -> None:
        """Close all, after a short wait for the peers; blocks, for at most ``limit_s``."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while self._parting and (left_s := until_s - loop.time()) > 0:
            readable, _, _ = select.select(list(self._parting), [], [], left_s)
            for sock in readable:
                self._on_readable(sock)
        for sock in list(self._parting):
            _LOG.info("a ucx peer did not hang up in time")
            self._close(sock)


def _has_hung_up(sock: socket.socket) -> bool:
    """Read away what the peer has signalled; True at the end of the stream."""
    try:
        while sock.recv(READ_NBYTES):
            pass
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return True
