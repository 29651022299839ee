"""What makes a ucx connection take its next turn: its worker's descriptor, or the end of a pause.

Owns the place of the descriptor in the loop, and one timer. Knows no UCX: ``Rest`` says how long a
pause is. In a pause the descriptor is left alone: it could not be armed, or was readable for
nothing, again and again.

::

    listening ──pause()──▶ deaf ──pause is over: a turn, or end_pause()──▶ listening
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls ``turn()`` on the loop that it was made in, until ``stop()``."""

    def __init__(self, fileno: int, turn: Callable[[], None]) -> None:
        self._fileno = fileno
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._listen()

    def pause(self, pause_s: float) -> None:
        """Take a turn when ``pause_s`` is over. One that has begun goes on as it was."""
        if self._timer is None:
            self._loop.remove_reader(self._fileno)
            self._timer = self._loop.call_later(pause_s, self._on_time)

    def end_pause(self) -> None:
        """Something has happened, or the descriptor is armed. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._listen()

    def stop(self) -> None:
        """Take no more turns."""
        self._loop.remove_reader(self._fileno)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _listen(self) -> None:
        self._loop.add_reader(self._fileno, self._turn)

    def _on_time(self) -> None:
        self.end_pause()
        self._turn()
