"""Walks the spans of one request in order, as buffers for vectored I/O.

Owns ``Payload``, what a connection needs to know of the memory behind a request, and ``Cursor``,
the payload of host memory. Pure: knows no socket. Never copies; the slices it returns point into
the region.

Memory that is not there at once (a device's, behind bounce buffers) implements ``Payload`` too: it
has nothing ready for a while, and wakes the connection when it has. Until then the connection
serves its other requests. Everything here is called on the I/O loop::

    sending     ready_nbytes > 0 ──frame of at most that──▶ advance ──▶ ... ──▶ remaining == 0
    receiving   ready_nbytes > 0 ──bytes arrive──▶ advance ──▶ remaining == 0 ──▶ settled
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from transfer.errors import TransferError

MAX_BUFFERS = 256  # well below IOV_MAX (1024)
MIN_FILE_NBYTES = 128 * 1024  # 256 runs of 64 KiB were 1.5 times as fast copied, in vectored sends


class FileRun(NamedTuple):
    """Bytes that lie one after the other in a file."""

    fd: int
    offset: int
    nbytes: int


class FileSource(Protocol):
    """Where memory lies in a file: its bytes can be sent from there without being copied."""

    def enter(self) -> tuple[int, int] | None:
        """Return the descriptor and where the memory begins; None: there is no file any more.

        What is not None needs one ``leave``; the descriptor stays open until then.
        """
        ...

    def leave(self) -> None: ...


class Payload(Protocol):
    """The bytes of one request, on their way out or in.

    Attributes:
        remaining: bytes that have not passed yet.
        wake: set by the connection. Called on the I/O loop when ``ready_nbytes`` was 0 and is not
            any more, when ``settled`` becomes true, when ``error`` is set, and when whoever
            withdrew the memory wants the connection to notice.
        error: why the bytes are void; the request ends with it.
        file: where they lie in a file, to be sent by reference; None: they are copied.
    """

    remaining: int
    file: FileSource | None
    wake: Callable[[], None]
    error: TransferError | None

    @property
    def ready_nbytes(self) -> int:
        """Bytes that can pass now without waiting; at most ``remaining``."""
        ...

    @property
    def settled(self) -> bool:
        """True when every byte that was received is where it belongs."""
        ...

    def begin(self, nbytes: int) -> None:
        """A DATA frame of ``nbytes`` bytes arrives: room for it is wanted from now on."""
        ...

    def buffers(self, limit_nbytes: int) -> list[memoryview]:
        """Return the next bytes, at most ``limit_nbytes`` and what is ready, without moving."""
        ...

    def next_run(self, limit_nbytes: int) -> tuple[int, int]:
        """Return offset (in the memory) and length of the next bytes that lie in one piece.

        Asked of what has a ``file`` only.
        """
        ...

    def advance(self, nbytes: int) -> None:
        """Pass over ``nbytes`` bytes."""
        ...

    def close(self) -> None:
        """The request is over, complete or not: release what is held for it. Idempotent."""
        ...


def _nobody_waits() -> None:
    """Host memory is always ready."""


class Cursor:
    """Position in a list of ``(offset, nbytes)`` spans of host memory. Always ready."""

    __slots__ = ("_done", "_index", "_spans", "_view", "error", "file", "remaining", "wake")

    def __init__(
        self,
        view: memoryview,
        spans: Sequence[tuple[int, int]],
        file: FileSource | None = None,
    ) -> None:
        self.file = file
        self._view = view
        self._spans = array("Q", chain.from_iterable(spans))  # 16 bytes a span: thousands wait
        self._index = 0  # in _spans, where offsets and lengths alternate
        self._done = 0  # bytes of the current span that have been passed
        self.remaining = sum(self._spans[1::2])
        self.wake: Callable[[], None] = _nobody_waits
        self.error: TransferError | None = None

    @property
    def ready_nbytes(self) -> int:
        return self.remaining

    @property
    def settled(self) -> bool:
        return True

    def begin(self, nbytes: int) -> None:
        """There is room."""

    def buffers(self, limit_nbytes: int) -> list[memoryview]:
        found: list[memoryview] = []
        index, done = self._index, self._done
        spans, view, num = self._spans, self._view, len(self._spans)
        while limit_nbytes > 0 and index < num and len(found) < MAX_BUFFERS:
            start = spans[index] + done
            take = min(spans[index + 1] - done, limit_nbytes)
            found.append(view[start : start + take])
            limit_nbytes -= take
            index, done = index + 2, 0
        return found

    def next_run(self, limit_nbytes: int) -> tuple[int, int]:
        start, nbytes = self._spans[self._index : self._index + 2]
        return start + self._done, min(nbytes - self._done, limit_nbytes)

    def advance(self, nbytes: int) -> None:
        assert nbytes <= self.remaining, "advanced past the end"
        self.remaining -= nbytes
        while nbytes:
            left = self._spans[self._index + 1] - self._done
            if nbytes < left:
                self._done += nbytes
                return
            nbytes -= left
            self._index += 2
            self._done = 0

    def close(self) -> None:
        """Nothing is held."""
