"""A client of Redis's protocol (RESP2) that copies no payload: what a careful user would write.

``SET`` sends header and page with one ``sendmsg``; ``GET`` receives the page straight into its
place. All commands of a batch are sent before the first answer is read, from a thread of its own,
so that neither side waits for the other (pipelining). Blocking; knows only what the benchmark uses.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

HEADER_NBYTES_MAX = 64
IOV_MAX = 512


class RespError(RuntimeError):
    """The server answered with an error, or with something else than was asked."""


class RespClient:
    """One connection.

    Args:
        path: of the server's unix socket.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._buffer = bytearray()

    def set_many(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        """Store every value under its key."""
        parts: list[bytes | memoryview] = []
        for key, value in items:
            parts += [b"*3\r\n$3\r\nSET\r\n" + _bulk(key) + b"$%d\r\n" % len(value), value, b"\r\n"]
        with self._sending(parts):
            for _ in items:
                self._expect(b"+OK")

    def get_many(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        """Read the value of every key into the memory beside it, which it must fill."""
        parts: list[bytes | memoryview] = [b"*2\r\n$3\r\nGET\r\n" + _bulk(key) for key, _ in items]
        with self._sending(parts):
            for _, into in items:
                self._expect(b"$%d" % len(into))
                self._read_into(into)
                self._expect(b"")

    def flush(self) -> None:
        """Forget everything; returns when the memory is free again."""
        with self._sending([b"*2\r\n$8\r\nFLUSHALL\r\n$4\r\nSYNC\r\n"]):
            self._expect(b"+OK")

    def close(self) -> None:
        self._socket.close()

    def _sending(self, parts: list[bytes | memoryview]) -> _Sending:
        return _Sending(self._socket, parts)

    def _expect(self, line: bytes) -> None:
        while b"\r\n" not in self._buffer:
            data = self._socket.recv(HEADER_NBYTES_MAX)
            if not data:
                raise RespError("the server hung up")
            self._buffer += data
        found, _, rest = bytes(self._buffer).partition(b"\r\n")
        self._buffer = bytearray(rest)
        if found != line:
            raise RespError(f"expected {line!r}, got {found[:80]!r}")

    def _read_into(self, into: memoryview) -> None:
        have = min(len(self._buffer), len(into))
        into[:have] = self._buffer[:have]
        del self._buffer[:have]
        while have < len(into):
            count = self._socket.recv_into(into[have:])
            if not count:
                raise RespError("the server hung up")
            have += count


class _Sending:
    """Sends on a thread while the caller reads the answers."""

    def __init__(self, sock: socket.socket, parts: list[bytes | memoryview]) -> None:
        self._socket = sock
        self._parts = parts
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        try:
            left = [memoryview(part) for part in self._parts]
            while left:
                sent = self._socket.sendmsg(left[:IOV_MAX])
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]
        except OSError as error:
            self._error = error


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)
