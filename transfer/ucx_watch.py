"""Looks after a ucx connection while something is outstanding on it.

Owns one timer; idle, there is none. Two things end a connection:

* silence: a peer that owes something has not answered ``MAX_UNANSWERED`` pings in a row. They are
  counted, not timed: while this process stands still, nothing is held against the peer;
* a piece that was called off (deadline, cancel, revocation) does not complete, and nothing else
  does either, for ``QUIET_LIMIT_S``: somebody waits for its memory to be quiet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transfer.errors import PeerLost, TransferError
from transfer.ucx_lifeline import Lifeline

WATCH_S = 0.05
QUIET_LIMIT_S = 0.15
PING_S = 0.25
MAX_UNANSWERED = 6  # pings: silent for 1.5 s


class LinkWatch:
    """Calls ``close(error)`` when the connection is to end."""

    def __init__(
        self,
        lifeline: Lifeline,
        is_busy: Callable[[], bool],
        has_unwanted: Callable[[], bool],
        close: Callable[[TransferError], None],
    ) -> None:
        """Args:
        is_busy: whether something of the peer is awaited, or is under way.
        has_unwanted: whether a piece under way was called off.
        """
        self._lifeline = lifeline
        self._is_busy = is_busy
        self._has_unwanted = has_unwanted
        self._close = close
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._moved = False
        self._stuck_s = self._since_ping_s = 0.0

    def start(self) -> None:
        """Look after the connection while it is busy. Idempotent."""
        if self._timer is None and self._is_busy():
            self._timer = self._loop.call_later(WATCH_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def moved(self) -> None:
        """Something has completed."""
        self._moved = True

    def _look(self) -> None:
        self._timer = None
        self._check_quiet()
        self._since_ping_s += WATCH_S
        if self._since_ping_s >= PING_S:
            self._since_ping_s = 0.0
            self._check_silence()
        if self._is_busy():
            self.start()
        else:
            self._lifeline.unanswered = 0

    def _check_quiet(self) -> None:
        stuck = not self._moved and self._has_unwanted()
        self._moved = False
        self._stuck_s = self._stuck_s + WATCH_S if stuck else 0.0
        if self._stuck_s >= QUIET_LIMIT_S:
            name = self._lifeline.name
            self._close(PeerLost(f"{name} did not let go of a piece that was called off"))

    def _check_silence(self) -> None:
        if self._lifeline.unanswered >= MAX_UNANSWERED:
            limit_s = MAX_UNANSWERED * PING_S
            self._close(PeerLost(f"{self._lifeline.name} has not answered for {limit_s} s"))
        else:
            self._lifeline.ping()
