"""Bytes of a region that are on their way without having been copied.

Owns the count of them, and the wait until the last is back. tcp sends from a memfd by reference
(``FileSource``): until a peer has taken the bytes out of its socket, they are the region's own, and
what is stored there meanwhile is what the peer would get. So a region that is revoked waits for
the peer's word that it has them, and memory that a peer may still look at is left behind for it
(``shm_memory``). Knows no sockets.

::

    take ──give_back: the peer has emptied its socket, or is gone with it──▶ over
      └────lose: the connection ended on our side, the peer may still find them──▶ for good
"""

from __future__ import annotations

import threading

from transfer.cursor import FileSource

LOAN_PATIENCE_S = 0.5  # of a revocation; a peer that runs answers within milliseconds


class Loans:
    """Of one region. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_out = 0
        self._num_lost = 0

    @property
    def num_out(self) -> int:
        """Answers, whole or cut short, whose bytes a peer may still find, and will tell of."""
        return self._num_out

    def take(self) -> None:
        with self._changed:
            self._num_out += 1

    def give_back(self) -> None:
        with self._changed:
            self._num_out -= 1
            assert self._num_out >= 0, "a loan was given back twice"
            self._changed.notify_all()

    def lose(self) -> None:
        """Nobody will say when these bytes have been taken."""
        with self._changed:
            self._num_out -= 1
            assert self._num_out >= 0, "a loan was lost that was not out"
            self._num_lost += 1
            self._changed.notify_all()

    def wait_until_returned(self, patience_s: float | None = None) -> bool:
        """Block until nothing is out; False when something is lost, or the patience is over."""
        if patience_s is None:
            patience_s = LOAN_PATIENCE_S
        with self._changed:
            self._changed.wait_for(lambda: self._num_out == 0 or self._num_lost > 0, patience_s)
            return self._num_out == 0 and self._num_lost == 0


class LentFile:
    """A region's file as one answer sends from it: its first use is a loan.

    So an answer that waits for its turn on a slow connection holds nobody up.
    """

    def __init__(self, file: FileSource, loans: Loans) -> None:
        self._file = file
        self._loans = loans
        self._is_out = False

    def enter(self) -> tuple[int, int] | None:
        place = self._file.enter()
        if place is not None and not self._is_out:
            self._is_out = True
            self._loans.take()
        return place

    def leave(self) -> None:
        self._file.leave()

    @property
    def is_out(self) -> bool:
        """Bytes of it are on their way, or in the peer's socket."""
        return self._is_out

    def give_back(self) -> None:
        """None of them is in the peer's socket any more, or that is gone. Idempotent."""
        if self._is_out:
            self._is_out = False
            self._loans.give_back()

    def lose(self) -> None:
        """Nobody will say whether it has them."""
        if self._is_out:
            self._is_out = False
            self._loans.lose()
