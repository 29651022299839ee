"""Progress of long work: a bar with rate and remaining time on a terminal, quiet lines otherwise.

Owns nothing but the presentation. Progress goes to stderr, so that stdout stays the command's
result. Knows nothing of the work: callers add units (bytes, tensors) as they are done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from launch.output import write_line

LINE_INTERVAL_S = 5.0  # without a terminal: at most one line per so many seconds


class Progress(Protocol):
    """What long work reports to. ``total`` may become known only after the start."""

    def advance(self, nbytes: int) -> None: ...

    def set_total(self, nbytes: int) -> None: ...


class _Lines:
    """One line at the start and the end, and one now and then between."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._started = self._printed = time.monotonic()

    def set_total(self, nbytes: int) -> None:
        self._total = nbytes

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._printed >= LINE_INTERVAL_S:
            self._printed = now
            say(f"{self._label}: {self._amount()}")

    def _amount(self) -> str:
        done = f"{self._done / 1e6:.0f} MB"
        return f"{done} of {self._total / 1e6:.0f} MB" if self._total else done

    def finish(self) -> None:
        elapsed = time.monotonic() - self._started
        say(f"{self._label}: done, {self._amount()} in {elapsed:.1f} s")


class _Bar:
    """A rich progress bar on stderr."""

    def __init__(self, label: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._progress.start()
        self._task = self._progress.add_task(label, total=total)

    def set_total(self, nbytes: int) -> None:
        self._progress.update(self._task, total=nbytes)

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)

    def finish(self) -> None:
        self._progress.stop()


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Progress]:
    """Report one piece of long work, counted in bytes."""
    shown = _Bar(label, total) if sys.stderr.isatty() else _Lines(label, total)
    try:
        yield shown
    except BaseException:
        if isinstance(shown, _Bar):
            shown.finish()
        raise
    else:
        shown.finish()


def say(line: str) -> None:
    """Print one line for people on stderr; lost where nobody can read it."""
    write_line(line, sys.stderr)
