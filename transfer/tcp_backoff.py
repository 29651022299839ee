"""When a peer that could not be reached may be tried again. Sans-I/O: the time is passed in.

Owns the delay after failed connects to one peer. It doubles from ``BACKOFF_FIRST_S`` and stays at
``BACKOFF_MAX_S``: under a second, so that a peer that is back is usable within one. There is no
jitter: connects happen only when an operation asks, so the askers are spread already.

::

    may try ──failed──▶ refuses until now + delay ──time passes──▶ may try (delay doubled)
       ▲────────────────────────── succeeded ◀────────────────────────┘
"""

from __future__ import annotations

from transfer.errors import TransferError

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 0.5


class Backoff:
    """One per peer."""

    def __init__(self) -> None:
        self._delay_s = BACKOFF_FIRST_S
        self._until_s: float | None = None
        self._error: TransferError | None = None

    def failed(self, now_s: float, error: TransferError) -> None:
        """A connect ended with ``error``."""
        self._error = type(error)(str(error))  # without the traceback, which holds on to memory
        self._until_s = now_s + self._delay_s
        self._delay_s = min(2 * self._delay_s, BACKOFF_MAX_S)

    def succeeded(self) -> None:
        self._delay_s = BACKOFF_FIRST_S
        self._until_s = self._error = None

    def refusal(self, now_s: float) -> TransferError | None:
        """Return why no connect may be tried now, an error of the last one's kind; else None."""
        if self._until_s is None or self._error is None or now_s >= self._until_s:
            return None
        wait_ms = (self._until_s - now_s) * 1000
        return type(self._error)(f"{self._error} (next try in {wait_ms:.0f} ms)")
