"""A plain blocking socket between two processes: the limit that tcp is held against.

One stream, one thread on each side, contiguous memory, no framing beyond 9 bytes an exchange:
what a careful programmer would write by hand. Knows nothing of ``transfer``.

::

    client                                   server
    key (16 bytes, told over a control channel; anything else is hung up on)
    b"r" nbytes  ──────────────────────────▶
                 ◀────────────────────────── nbytes of payload
    b"w" nbytes, nbytes of payload ────────▶
                 ◀────────────────────────── b"." once all of it is in memory
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from hmac import compare_digest
from typing import Literal

from launch.doctor.grid import CASE_NBYTES_MAX

ORDER = struct.Struct("!cQ")
KEY_NBYTES = 16
CONNECT_TIMEOUT_S = 10.0
GREETING_TIMEOUT_S = 5.0  # a stranger that says nothing is hung up on
ACCEPT_TRIES_MAX = 16  # strangers that are hung up on before the server gives up


def _receive(connection: socket.socket, target: memoryview) -> bool:
    """Fill ``target``; False when the other side has closed."""
    got = 0
    while got < len(target):
        count = connection.recv_into(target[got:])
        if count == 0:
            return False
        got += count
    return True


class PlainSocketServer:
    """Serves one client on a thread of its own until ``close``, or until the client leaves."""

    def __init__(self, host: str, memory: memoryview) -> None:
        """``memory`` is what is sent and what is received into.

        Raises:
            OSError: the address cannot be bound.
        """
        self.key = secrets.token_bytes(KEY_NBYTES)
        self._memory = memory
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        self._connection: socket.socket | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-doctor-socket")
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Hang up and wait for the thread. Idempotent."""
        self._closing = True
        for sock in (self._listener, self._connection):
            if sock is not None:
                with contextlib.suppress(OSError):  # not connected (any more)
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        for _ in range(ACCEPT_TRIES_MAX):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed, or nobody came in time
            with connection:
                if self._greeted(connection):
                    with contextlib.suppress(OSError):  # closed, or the client broke off
                        self._serve(connection)
                    return

    def _greeted(self, connection: socket.socket) -> bool:
        """True for the one who knows the key; a stranger may say something else, or break off."""
        self._connection = connection
        if self._closing:
            return False  # it came while ``close`` looked for connections to hang up on
        key = bytearray(KEY_NBYTES)
        try:
            connection.settimeout(GREETING_TIMEOUT_S)
            return _receive(connection, memoryview(key)) and compare_digest(bytes(key), self.key)
        except OSError:
            return False

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # blocking, as the limit is; ``close`` shuts it down
        order = bytearray(ORDER.size)
        while _receive(connection, memoryview(order)):
            kind, nbytes = ORDER.unpack(order)
            if kind not in (b"r", b"w") or nbytes > min(len(self._memory), CASE_NBYTES_MAX):
                return
            part = self._memory[:nbytes]
            if kind == b"r":
                connection.sendall(part)
            elif _receive(connection, part):
                connection.sendall(b".")


class PlainSocket:
    """The measuring end. Blocks without a limit of time: for a worker thread; see ``interrupt``."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        """Connect.

        Raises:
            OSError: nobody answers there.
        """
        self._socket = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(key)
        self._socket.settimeout(None)

    def exchange(self, op: Literal["read", "write"], memory: memoryview) -> None:
        """Fill ``memory`` from the server, or send it there and wait until it has arrived.

        Raises:
            OSError: the server hung up, or ``interrupt`` was called.
        """
        if op == "read":
            self._socket.sendall(ORDER.pack(b"r", len(memory)))
            arrived = _receive(self._socket, memory)
        else:
            self._socket.sendall(ORDER.pack(b"w", len(memory)))
            self._socket.sendall(memory)
            arrived = _receive(self._socket, memoryview(bytearray(1)))
        if not arrived:
            raise ConnectionResetError("the plain socket's server hung up")

    def interrupt(self) -> None:
        """Make a blocked ``exchange`` on another thread fail at once."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
