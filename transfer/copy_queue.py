"""Which copy gets the next turn on a copy thread. Sans-I/O: no threads, no clock, no memory.

Owns the order of the copies that wait. Each copy is cut into pieces and one turn is one piece, so
a small copy is never stuck behind a huge one. Several threads may work on one copy, as many as it
allows; while they do, it is not in the queue.

::

    now         a1 b1 a2 b2 a3 ...   copies of one priority take turns
    background  c1 c2 c3 ...         one turn in BACKGROUND_TURN while urgent copies wait as well,
                                     every turn when none does

            add()                     next(), wants another turn
    away ───────────▶ waiting ◀───────────────────────────────┐
      ▲                  └──────────next(), wants no more─────┴──▶ away
      └───── drop() ─────┘

Invariants: while both priorities wait, at most ``BACKGROUND_TURN - 1`` urgent turns go by before a
background one; a copy waits at most once. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from transfer.interface import Priority

BACKGROUND_TURN = 8


class Turns(Protocol):
    """A copy, cut into pieces."""

    @property
    def wants_turn(self) -> bool:
        """True while there are pieces that nobody has taken, and another thread may take one."""
        ...


Job = TypeVar("Job", bound=Turns)
Taken = TypeVar("Taken")


class CopyQueue(Generic[Job]):
    """The jobs that wait for a turn. Nothing here looks through them: there may be thousands."""

    def __init__(self) -> None:
        self._now: OrderedDict[Job, None] = OrderedDict()
        self._background: OrderedDict[Job, None] = OrderedDict()
        self._urgent_turns = 0  # in a row, while background jobs wait

    def __len__(self) -> int:
        return len(self._now) + len(self._background)

    def add(self, job: Job, priority: Priority) -> None:
        """Let ``job`` wait for a turn, if it wants one. Idempotent: it keeps its place."""
        if job.wants_turn:
            jobs = self._now if priority is Priority.NOW else self._background
            jobs.setdefault(job)

    def drop(self, job: Job) -> None:
        """Give ``job`` no more turns. Idempotent."""
        self._now.pop(job, None)
        self._background.pop(job, None)

    def next(self, take: Callable[[Job], Taken]) -> Taken | None:
        """Return ``take(job)``, one piece of the job whose turn it is; None if none waits."""
        if not self:
            return None
        jobs = self._now or self._background
        if self._background and self._urgent_turns >= BACKGROUND_TURN - 1:
            jobs = self._background
        urgent_goes_first = bool(self._background) and jobs is self._now
        self._urgent_turns = self._urgent_turns + 1 if urgent_goes_first else 0
        job, _ = jobs.popitem(last=False)
        taken = take(job)
        if job.wants_turn:
            jobs[job] = None
        return taken
