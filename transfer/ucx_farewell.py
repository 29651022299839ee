"""The end of ucx connections: a worker is given back when the peer has let go of it as well.

Owns the workers and sockets of connections that are over here, until they are over there. Why: a
peer reaches a worker's shared memory by the number of one of our descriptors (``/proc/pid/fd/n``),
opened when it is first needed. Closed too early, the number may stand for another file by then.

::

    cut off here ──part()──▶ told the peer (end of stream) ──peer hangs up──▶ closed, once
                                 └── after PARTING_LIMIT_S, or too many wait ──▶ quiet

Both sides cut off *before* they end the stream, and look at the stream before they use UCX: so the
first to see its end knows that nothing of the other side touches anything any more. A worker that
is not quiet by then is one of the ``Stragglers``.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable
from contextlib import suppress

from transfer.ucx_binding import Worker
from transfer.ucx_stragglers import Stragglers

_LOG = logging.getLogger(__name__)
PARTING_LIMIT_S = 30.0  # a peer that is frozen for longer looks before it touches
MAX_PARTING = 256
READ_NBYTES = 4096
END_PAUSE_S = 0.002  # at the end, between two looks at the stragglers


class Farewells:
    """Those of one engine. Lives on the ucx loop."""

    def __init__(self) -> None:
        self._parting: dict[socket.socket, tuple[Worker, asyncio.TimerHandle]] = {}
        self._stragglers = Stragglers()

    def part(self, worker: Worker, sock: socket.socket, settle: Callable[[], None]) -> None:
        """Take over a worker that was broken off, and the lifeline's socket.

        Args:
            settle: called once, when no flight of the worker touches memory any more: at once, if
                it is quiet.
        """
        if worker.quiet:
            settle()
        else:
            self._stragglers.keep(worker, settle)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        if _has_hung_up(sock):
            sock.close()
            self._stragglers.release(worker)
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
        self._stragglers.release(worker)

    def end(self, limit_s: float) -> None:
        """Close all, after a short wait for the peers; blocks, for at most ``limit_s``."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while (self._parting or self._stragglers) and (left_s := until_s - loop.time()) > 0:
            pause_s = min(left_s, END_PAUSE_S) if self._stragglers else left_s
            readable, _, _ = select.select(list(self._parting), [], [], pause_s)
            for sock in readable:
                self._on_readable(sock)
            self._stragglers.look()
        for sock in list(self._parting):
            _LOG.info("a ucx peer did not hang up in time")
            self._close(sock)
        self._stragglers.end()


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
