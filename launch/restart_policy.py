"""When a child process is started again: the sans-I/O core of the supervisor.

Owns the life of each child as states; knows no processes, no clock (times are passed in).

::

                 ready
    STARTING ───────────▶ RUNNING ──exit──▶ WAITING(delay) ──due──▶ STARTING
        │ exit                │ exit 2                               (restarted)
        ▼                     ▼
      FAILED ◀────────────────┘          any ──stopping──▶ STOPPED on exit

Before the cluster has been ready once, any exit fails the start: the person is there and sees it.
Afterwards a child that dies comes back after a delay that doubles up to ``DELAY_MAX_S`` and starts
over when the child has lived for ``STABLE_S``; a child that says its configuration is wrong
(exit code 2) never comes back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from launch.errors import EXIT_CONFIG

DELAY_MIN_S = 0.5
DELAY_MAX_S = 30.0
STABLE_S = 60.0


class ChildState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    STOPPED = "stopped"


class Restart(NamedTuple):
    """Start the child again after ``delay_s``."""

    delay_s: float


class Fail(NamedTuple):
    """Never start it again; the whole cluster could not start if ``fatal``."""

    fatal: bool


class Done(NamedTuple):
    """It was told to stop, and did."""


Decision = Restart | Fail | Done


class RestartPolicy:
    """Decides for one child."""

    def __init__(self) -> None:
        self.state = ChildState.STARTING
        self._stopping = False
        self._was_ready = False
        self._started_at = 0.0
        self._deaths = 0

    @property
    def num_deaths(self) -> int:
        """Deaths in a row, each within ``STABLE_S`` of its start."""
        return self._deaths

    def on_started(self, now: float) -> None:
        self._started_at = now
        self.state = ChildState.RUNNING if self._was_ready else ChildState.STARTING

    def on_cluster_ready(self) -> None:
        """The cluster serves: from now on a death is an accident, not a failed start."""
        self._was_ready = True
        if self.state is ChildState.STARTING:
            self.state = ChildState.RUNNING

    def on_stopping(self) -> None:
        self._stopping = True

    def on_exit(self, code: int, now: float) -> Decision:
        """Decide what follows the exit of the child; ``code`` is negative for a signal."""
        if self._stopping:
            self.state = ChildState.STOPPED
            return Done()
        if code == EXIT_CONFIG or not self._was_ready:
            self.state = ChildState.FAILED
            return Fail(fatal=not self._was_ready)
        self._deaths = 1 if now - self._started_at >= STABLE_S else self._deaths + 1
        self.state = ChildState.WAITING
        return Restart(min(DELAY_MIN_S * 2 ** (self._deaths - 1), DELAY_MAX_S))
