"""How many pieces one ucx connection has under way in one direction: few long ones, more short.

Owns the two counts. Knows no pieces and no UCX.
"""

from __future__ import annotations


class Quota:
    """Bounded in number, and in bytes: another begins while there are fewer of both."""

    def __init__(self, max_pieces: int, max_nbytes: int) -> None:
        self._max_pieces = max_pieces
        self._max_nbytes = max_nbytes
        self._num_pieces = self._nbytes = 0

    @property
    def has_room(self) -> bool:
        return self._num_pieces < self._max_pieces and self._nbytes < self._max_nbytes

    def begin(self, nbytes: int) -> None:
        self._num_pieces += 1
        self._nbytes += nbytes

    def end(self, nbytes: int) -> None:
        self._num_pieces -= 1
        self._nbytes -= nbytes
