"""A door to a piece of memory that can be shut for good.

Whoever touches the memory is inside for the time of one bounded piece; ``close`` shuts the door and
returns only when nobody is inside any more. It is how a cancelled operation, and a revoked region,
become quiet *before* the caller goes on::

    open ──close()──▶ closing (waits for those inside, at most one piece) ──▶ closed

Thread-safe. ``close`` must not be called by somebody who is inside.
"""

from __future__ import annotations

import threading


class Gate:
    """Counts those inside; refuses entry once closed."""

    __slots__ = ("_inside", "_lock", "_open", "_quiet")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._open = True
        self._quiet: threading.Event | None = None  # made by a close that has to wait

    @property
    def is_open(self) -> bool:
        return self._open

    def enter(self) -> bool:
        """Go inside; False if the gate is closed. Every True needs one ``leave``."""
        with self._lock:
            if self._open:
                self._inside += 1
            return self._open

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            assert self._inside >= 0, "left a gate that was not entered"
            if self._quiet is not None and self._inside == 0:
                self._quiet.set()

    def shut(self) -> None:
        """Refuse entry from now on; those inside stay. Idempotent, does not wait."""
        with self._lock:
            self._open = False

    def close(self) -> None:
        """Shut the gate and wait until nobody is inside. Idempotent."""
        with self._lock:
            self._open = False
            if self._inside == 0:
                return
            if self._quiet is None:
                self._quiet = threading.Event()
        self._quiet.wait()


def closed_gate() -> Gate:
    """Return a gate that lets nobody in."""
    gate = Gate()
    gate.close()
    return gate
