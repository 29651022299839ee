"""Walks the spans of one request in order, as buffers for vectored I/O.

Pure: knows no socket. Never copies; the slices it returns point into the region.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_BUFFERS = 256  # well below IOV_MAX (1024)


class Cursor:
    """Position in a list of ``(offset, nbytes)`` spans of one memory view."""

    __slots__ = ("_done", "_index", "_spans", "_view", "remaining")

    def __init__(self, view: memoryview, spans: Sequence[tuple[int, int]]) -> None:
        self._view = view
        self._spans = spans
        self._index = 0
        self._done = 0  # bytes of the current span that have been passed
        self.remaining = sum(nbytes for _, nbytes in spans)

    def buffers(self, limit_nbytes: int, max_buffers: int = MAX_BUFFERS) -> list[memoryview]:
        """Return the next at most ``limit_nbytes`` bytes, without moving."""
        found: list[memoryview] = []
        index, done = self._index, self._done
        while limit_nbytes > 0 and index < len(self._spans) and len(found) < max_buffers:
            offset, nbytes = self._spans[index]
            take = min(nbytes - done, limit_nbytes)
            found.append(self._view[offset + done : offset + done + take])
            limit_nbytes -= take
            index, done = index + 1, 0
        return found

    def advance(self, nbytes: int) -> None:
        """Pass over ``nbytes`` bytes."""
        assert nbytes <= self.remaining, "advanced past the end"
        self.remaining -= nbytes
        while nbytes:
            left = self._spans[self._index][1] - self._done
            if nbytes < left:
                self._done += nbytes
                return
            nbytes -= left
            self._index += 1
            self._done = 0
