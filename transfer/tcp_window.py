"""Which request goes on the wire next: the window of one tcp connection. Sans-I/O.

Operations take turns, one request each, so that a small one is not stuck behind a huge one. At most
``limit_nbytes`` of payload and ``limit_requests`` requests are in flight; a single request may
always go.

    in flight:  0 ......... nbytes ......... limit_nbytes
                next() adds         done() takes away
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

MAX_REQUESTS_IN_FLIGHT = 256


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


class RequestWindow(Generic[R]):
    """Not thread-safe; lives on the I/O loop."""

    def __init__(self, limit_nbytes: int, limit_requests: int = MAX_REQUESTS_IN_FLIGHT) -> None:
        self._limit_nbytes = limit_nbytes
        self._limit_requests = limit_requests
        self._jobs: deque[Job[R]] = deque()
        self._ahead: R | None = None  # taken from its job, waits for room
        self._ahead_job: Job[R] | None = None
        self.nbytes = 0
        self.num_requests = 0

    @property
    def num_jobs(self) -> int:
        return len(self._jobs) + (self._ahead_job is not None)

    def add(self, job: Job[R]) -> None:
        self._jobs.append(job)

    def drop(self, job: Job[R]) -> None:
        """Take no more requests from ``job``."""
        if self._ahead_job is job:
            self._ahead = self._ahead_job = None
        if job in self._jobs:
            self._jobs.remove(job)

    def next(self) -> R | None:
        """Return the request to send now; None if there is no room or nothing to send."""
        request = self._peek()
        if request is None:
            return None
        full = self.nbytes + request.nbytes > self._limit_nbytes
        if self.num_requests and (full or self.num_requests >= self._limit_requests):
            return None
        job, self._ahead, self._ahead_job = self._ahead_job, None, None
        assert job is not None, "a request without its job"
        self._jobs.append(job)
        self.nbytes += request.nbytes
        self.num_requests += 1
        return request

    def _peek(self) -> R | None:
        while self._ahead is None and self._jobs:
            job = self._jobs.popleft()
            self._ahead = job.take()
            self._ahead_job = job if self._ahead is not None else None
        return self._ahead

    def done(self, nbytes: int) -> None:
        """A request of ``nbytes`` is no longer in flight."""
        self.nbytes -= nbytes
        self.num_requests -= 1
        assert self.nbytes >= 0, "more bytes done than were sent"
        assert self.num_requests >= 0, "more requests done than were sent"
