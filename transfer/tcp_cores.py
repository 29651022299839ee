"""Keeps the thread that receives many bytes off the core on which their sender runs.

Owns the affinity of one I/O thread while long requests from this host arrive, and gives it back
``KEPT_S`` after the last. Between processes of one host the kernel does the receiver's share of the
protocol on the sender's core, and likes to wake the receiver there as well: the two then take turns
on one core while another is idle. Knows no frames.

::

    as it was ──receiving: the sender is on core c──▶ not on c ──it has moved to d──▶ not on d
        ▲                                                └───────── KEPT_S ─────────────┤
        └───────────────────────────────────────────────────────────────────────────────┘

Invariants: the thread never gets a core that it did not have before, nor one that somebody else has
taken from it meanwhile; with one core nothing happens. A thread that it starts inherits where it
runs now, and has to help itself (``device_lane``).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress

SO_INCOMING_CPU = 49  # of Linux; Python 3.11 has no name for it
MANY_NBYTES = 1 << 20  # still to come in one request: worth a call or two of the kernel
KEPT_S = 1.0


class ReceiverCore:
    """Where the I/O thread may run. Its methods are called on the I/O loop."""

    def __init__(self, thread_id: int, loop: asyncio.AbstractEventLoop) -> None:
        """Args:
        thread_id: the kernel's name of the loop's thread.
        """
        self._thread_id = thread_id
        self._loop = loop
        self._usual: set[int] = set()  # empty: where the thread runs is none of our business
        self._avoided: int | None = None
        self._received_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def avoided(self) -> int | None:
        """The core that the thread is kept off now."""
        return self._avoided

    def receiving(self, sock: socket.socket) -> None:
        """Many bytes arrive at ``sock``, from this host: do not run where they are sent."""
        if sys.platform != "linux":
            return
        self._received_s = self._loop.time()
        with suppress(OSError):  # the thread may not be moved, or the socket is closed
            core = sock.getsockopt(socket.SOL_SOCKET, SO_INCOMING_CPU)
            if core != self._avoided:
                self._keep_off(core)
        if self._timer is None and self._avoided is not None:
            self._timer = self._loop.call_later(KEPT_S, self._end)

    def _keep_off(self, core: int) -> None:
        cores = os.sched_getaffinity(self._thread_id)
        if self._avoided is None or cores not in (self._usual, self._usual - {self._avoided}):
            self._usual, self._avoided = cores, None  # somebody has moved it since
        others = self._usual - {core}
        if others and core in self._usual:
            os.sched_setaffinity(self._thread_id, others)
            self._avoided = core

    def _end(self) -> None:
        """Nothing has arrived for a while; if something has, look again later."""
        left_s = self._received_s + KEPT_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._end)
            return
        ours = self._usual - {self._avoided}
        self._timer = self._avoided = None
        with suppress(OSError):
            if os.sched_getaffinity(self._thread_id) == ours:  # else somebody has moved it since
                os.sched_setaffinity(self._thread_id, self._usual)
