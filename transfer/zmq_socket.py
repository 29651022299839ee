"""One ZeroMQ socket driven by an asyncio loop, without a thread and without a task.

Owns a socket, its monitor and their readers on the loop. Knows no protocol: it hands out
multipart messages and connection events. Plain ``zmq.Socket`` with ``add_reader`` instead of
``zmq.asyncio``: no future per message, and the same code under asyncio and uvloop.

A ZeroMQ descriptor is edge-triggered: it tells that something happened, once. So every wake-up
drains until nothing is left, and every send looks at the event state again, since sending may have
consumed the edge of an arriving message. (Inside a drain it need not: the drain looks at its end.)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_FRAMES_PER_WAKEUP = 64  # then other callbacks of the loop get their turn
MAX_COPIED_NBYTES = 8192  # longer parts are read where ZeroMQ has put them
_MORE_FOLLOWS = zmq.NOBLOCK | zmq.SNDMORE


class LoopSocket:
    """A socket whose arrivals call ``on_message(parts)`` and whose breaks call ``on_break()``.

    ``on_break`` means that *some* connection of this socket ended. Parts are ``bytes``; with
    ``views``, long ones are ``memoryview`` s of ZeroMQ's own memory, which they keep alive.
    """

    def __init__(
        self,
        socket: zmq.Socket[Any],
        on_message: Callable[[list[Any]], None],
        on_break: Callable[[], None],
        *,
        views: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._on_break = on_break
        self._max_copied_nbytes = MAX_COPIED_NBYTES if views else sys.maxsize
        self._closed = False
        self._scheduled = False
        self._draining = False
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.add_reader(self._monitor_fd, self._drain_monitor)
        self._schedule()  # arms the edges: a descriptor that was never drained tells nothing
        self._loop.call_soon(self._drain_monitor)

    def send(self, parts: list[bytes]) -> None:
        """Queue a message without blocking.

        Raises:
            zmq.ZMQError: ``EAGAIN`` queue full, ``EHOSTUNREACH`` the peer has gone.
        """
        if self._closed:
            return
        for part in parts[:-1]:
            self._socket.send(part, _MORE_FOLLOWS)
        self._socket.send(parts[-1], zmq.NOBLOCK)
        if not self._draining:
            self._schedule()  # once for all that is sent in this turn of the loop

    def _readable(self) -> bool:
        """Whether something has arrived; if not, the descriptor will tell."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain_scheduled)

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        if not self._closed and self._readable():
            self._drain()

    def _drain(self) -> None:
        if self._closed or self._draining:
            return
        self._draining = True
        try:
            left = self._take_all()
        except BaseException:  # a bug, for the loop to report: the edge must not be lost
            left = True
            raise
        finally:
            self._draining = False
            if left:
                self._schedule()

    def _take_all(self) -> bool:
        """Hand out what has arrived; return whether there may be more.

        Mostly there is one message: to ask for the next costs less than to be told in vain.
        """
        for count in range(MAX_FRAMES_PER_WAKEUP):
            if count == 1 and not self._readable():
                return False
            try:
                parts = self._receive()
            except zmq.Again:
                return False
            self._on_message(parts)
            if self._closed:
                return False
        return True

    def _receive(self) -> list[bytes | memoryview]:
        parts: list[bytes | memoryview] = []
        more = True
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            more = frame.more
            parts.append(frame.bytes if len(frame) <= self._max_copied_nbytes else frame.buffer)
        return parts

    def _drain_monitor(self) -> None:
        broke = False
        while not self._closed:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            broke = broke or parse_monitor_message(parts)["event"] == zmq.EVENT_DISCONNECTED
        if broke and not self._closed:
            self._drain()  # what the peer said before it went comes first
            self._on_break()

    def close(self, *, linger_ms: int) -> None:
        """Leave the loop and close the socket; idempotent, does not wait for the linger."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
