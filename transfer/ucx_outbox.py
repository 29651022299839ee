"""Control messages of one ucx connection on their way out, in the order in which they were given.

Owns those that UCX has not taken, as it is out of resources, and counts those that the peer has
not taken. Knows no requests. A message that waits here holds up those behind it, and the pieces
that the connection has to send: the peer drops a piece of which it has not been told before.
"""

from __future__ import annotations

from collections import deque

from transfer.errors import TransferError
from transfer.ucx_binding import Worker
from transfer.ucx_codec import Control, encode_control
from transfer.ucx_flights import Flights

MAX_CONTROL_FLIGHTS = 4096  # control messages that wait for UCX, or for a peer to take them


class Outbox:
    """That of one connection."""

    def __init__(self, worker: Worker, flights: Flights, tag: int) -> None:
        """Args:
        tag: under which the peer looks for control messages.
        """
        self._worker = worker
        self._flights = flights
        self._tag = tag
        self._waiting: deque[bytes] = deque()
        self._num_flights = 0

    def __len__(self) -> int:
        """Return how many messages UCX has not taken."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) + self._num_flights >= MAX_CONTROL_FLIGHTS

    def put(self, message: Control) -> None:
        self._waiting.append(encode_control(message))

    def post(self) -> bool:
        """Send what waits; False if nothing does.

        Raises:
            BlockingIOError: UCX is out of resources; the rest waits for the next call.
            TransferError: the connection is broken.
        """
        if not self._waiting:
            return False
        while self._waiting:
            flight = self._worker.send(self._waiting[0], self._tag)
            self._waiting.popleft()
            self._num_flights += 1
            self._flights.post(flight, None, self._settle)
        return True

    def _settle(self, _error: TransferError | None) -> None:
        self._num_flights -= 1
