"""Which request goes on the wire next: the window of one peer. Sans-I/O, for every wire.

Owns the order of the operations ("jobs") that wait for one peer, and the count of what is in
flight. Knows no wire: it hands out requests, its user sends them and says when they are done.

Two classes, each a queue in which operations take turns, one request each, so that a small one is
not stuck behind a huge one. ``NOW`` goes before ``BACKGROUND``, with two promises kept in bytes:

* Background is never starved: of the bytes that start while both wait, it gets one in
  ``BACKGROUND_SHARE``. When its turn has come, urgent requests wait until it fits.
* Background never fills the window: ``1 / NOW_RESERVE`` of it is left for urgent requests, so a
  small read does not wait for a push to end.

::

    in flight:  0 ....background.... (1 - 1/NOW_RESERVE) ....... limit_nbytes
                0 ....background and now, together ............. limit_nbytes
                next() adds                         done() takes away

Invariants: at most ``limit_nbytes`` and ``limit_requests`` are in flight, except that a single
request may always go; requests of one job leave in its own order; every job ends up taken from
until it has nothing left, whatever else is added, as long as requests get done.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from transfer.interface import Priority

MAX_REQUESTS_IN_FLIGHT = 256
BACKGROUND_SHARE = 8  # one byte in eight, while urgent requests wait as well
NOW_RESERVE = 4  # a quarter of the window is closed to background requests


class Sized(Protocol):
    """One request."""

    @property
    def nbytes(self) -> int: ...


R_co = TypeVar("R_co", bound=Sized, covariant=True)
R = TypeVar("R", bound=Sized)


class Job(Protocol[R_co]):
    """An operation that is cut into requests."""

    def take(self) -> R_co | None:
        """Return the next request; None when all were taken."""
        ...


class _Queue(Generic[R]):
    """Jobs of one class, in turns; the next request is taken ahead of its time to know its size.

    Nothing here looks through the jobs: thousands may end together, when a peer is lost.
    """

    def __init__(self) -> None:
        self.jobs: OrderedDict[Job[R], None] = OrderedDict()
        self._head: tuple[Job[R], R] | None = None
        self.nbytes = 0  # in flight
        self.num_requests = 0  # in flight

    def __len__(self) -> int:
        return len(self.jobs) + (self._head is not None)

    def __bool__(self) -> bool:
        return bool(self.jobs) or self._head is not None

    def peek(self) -> R | None:
        while self._head is None and self.jobs:
            job, _ = self.jobs.popitem(last=False)
            request = job.take()
            if request is not None:
                self._head = (job, request)
        return None if self._head is None else self._head[1]

    def start(self) -> R:
        assert self._head is not None, "started a request that was not looked at"
        (job, request), self._head = self._head, None
        self.jobs[job] = None
        self.nbytes += request.nbytes
        self.num_requests += 1
        return request

    def drop(self, job: Job[R]) -> None:
        if self._head is not None and self._head[0] is job:
            self._head = None
        self.jobs.pop(job, None)

    def done(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self.num_requests -= 1
        assert self.nbytes >= 0, "more bytes done than were sent"
        assert self.num_requests >= 0, "more requests done than were sent"


class BackgroundShare:
    """Whose turn it is while both classes wait, counted in bytes."""

    def __init__(self) -> None:
        self._credit_nbytes = 0.0

    def is_due(self, background_nbytes: int) -> bool:
        """True when background has earned ``background_nbytes``."""
        return self._credit_nbytes >= background_nbytes

    def started(self, priority: Priority, nbytes: int, *, both_wait: bool) -> None:
        """``nbytes`` of one class went; only what went past somebody who waits counts."""
        if not both_wait:
            self._credit_nbytes = 0.0
        elif priority is Priority.NOW:
            self._credit_nbytes += nbytes / (BACKGROUND_SHARE - 1)
        else:
            self._credit_nbytes = max(0.0, self._credit_nbytes - nbytes)


class RequestWindow(Generic[R]):
    """Not thread-safe: lives on one thread."""

    def __init__(self, limit_nbytes: int, limit_requests: int = MAX_REQUESTS_IN_FLIGHT) -> None:
        self._limit_nbytes = limit_nbytes
        self._limit_requests = limit_requests
        self._now: _Queue[R] = _Queue()
        self._background: _Queue[R] = _Queue()
        self._share = BackgroundShare()

    @property
    def num_jobs(self) -> int:
        return len(self._now) + len(self._background)

    @property
    def nbytes(self) -> int:
        """Bytes in flight."""
        return self._now.nbytes + self._background.nbytes

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return self._now.num_requests + self._background.num_requests

    def _queue(self, priority: Priority) -> _Queue[R]:
        return self._now if priority is Priority.NOW else self._background

    def add(self, job: Job[R], priority: Priority = Priority.NOW) -> None:
        """Let ``job`` take turns from now on, behind those that wait; once for each job."""
        self._queue(priority).jobs[job] = None

    def drop(self, job: Job[R]) -> None:
        """Take no more requests from ``job``."""
        self._now.drop(job)
        self._background.drop(job)

    def done(self, nbytes: int, priority: Priority = Priority.NOW) -> None:
        """A request of ``nbytes``, of a job added with ``priority``, is no longer in flight."""
        self._queue(priority).done(nbytes)

    def next(self) -> R | None:
        """Return the request to send now; None if there is no room or nothing to send."""
        if not (self._now or self._background):
            return None
        priority = self._choose(self._now.peek(), self._background.peek())
        if priority is None:
            return None
        both_wait = bool(self._now and self._background)
        request = self._queue(priority).start()
        self._share.started(priority, request.nbytes, both_wait=both_wait)
        return request

    def _choose(self, urgent: R | None, background: R | None) -> Priority | None:
        """Return the class that may start now. The other never slips into room left too small."""
        if (
            background is not None
            and self._leaves_reserve(background.nbytes)
            and (urgent is None or self._share.is_due(background.nbytes))
        ):
            return Priority.BACKGROUND if self._fits(background.nbytes) else None
        if urgent is not None and self._fits(urgent.nbytes):
            return Priority.NOW
        return None

    def _fits(self, nbytes: int) -> bool:
        if self.num_requests == 0:
            return True
        room = self._limit_nbytes - self.nbytes
        return nbytes <= room and self.num_requests < self._limit_requests

    def _leaves_reserve(self, nbytes: int) -> bool:
        queue = self._background
        if queue.num_requests == 0:
            return True
        part = 1 - 1 / NOW_RESERVE
        return (
            queue.nbytes + nbytes <= self._limit_nbytes * part
            and queue.num_requests < self._limit_requests * part
        )
