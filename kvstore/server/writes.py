"""Reservations of one store node: who is writing which row, and until when.

Owns their ends, also of the quarantine after an abort, and the rows of each writer. Moves no page:
``Admission`` does.
"""

from __future__ import annotations

import heapq

from kvstore.server.entry import Write

_ENDS_SLACK = 1024  # ends of finished writes kept before the heap is cleaned


class Writes:
    """Reservations that last ``lease_s``, and at most ``life_s`` however often renewed."""

    def __init__(self, lease_s: float, life_s: float) -> None:
        self._lease_s = lease_s
        self._life_s = life_s
        self._writes: dict[int, Write] = {}  # by row
        self._by_writer: dict[str, dict[int, None]] = {}
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._writes)

    def begin(self, row: int, generation: int, writer: str, now_s: float) -> None:
        self._put(row, Write(generation, now_s, now_s + self._lease_s, writer))
        if writer:
            self._by_writer.setdefault(writer, {})[row] = None

    def renew(self, row: int, now_s: float) -> bool:
        """Promise ``lease_s`` from now; False when the reservation has lived its life."""
        write = self._writes[row]
        if now_s + self._lease_s > write.granted_s + self._life_s:
            return False
        self._put(row, write._replace(end_s=now_s + self._lease_s))
        return True

    def _put(self, row: int, write: Write) -> None:
        self._writes[row] = write
        heapq.heappush(self._ends, (write.end_s, row))
        if len(self._ends) > 2 * len(self._writes) + _ENDS_SLACK:
            self._ends = [(kept.end_s, row) for row, kept in self._writes.items()]
            heapq.heapify(self._ends)

    def abandon(self, row: int) -> None:
        """The writer has no more say; the end of the quarantine stays."""
        self._leave_writer(row, self._writes[row].writer)

    def finish(self, row: int) -> None:
        """The write is over; nothing is to happen at its end."""
        self._leave_writer(row, self._writes.pop(row).writer)

    def _leave_writer(self, row: int, writer: str) -> None:
        rows = self._by_writer.get(writer)
        if rows is not None:
            rows.pop(row, None)
            if not rows:
                del self._by_writer[writer]

    def of_writer(self, writer: str) -> list[int]:
        """The rows that ``writer`` has reserved, in the order of the reservations."""
        return list(self._by_writer.get(writer, ()))

    def expire(self, now_s: float) -> list[int]:
        """The rows whose end has come, for the caller to finish."""
        due: dict[int, None] = {}  # a row may have been reserved twice with the same end
        while self._ends and self._ends[0][0] <= now_s:
            end_s, row = heapq.heappop(self._ends)
            write = self._writes.get(row)
            if write is not None and write.end_s == end_s:
                due[row] = None
        return list(due)
