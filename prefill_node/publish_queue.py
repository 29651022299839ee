"""Which pages go to the store next: the core of the publisher.

Owns, per request (``Publication``), the pages still to push and the outcome so far, and one
reference on every page from ``add`` until its put has ended. Sans-I/O; knows no store.

    open ──close()──▶ closed ──nothing pending, nothing in flight──▶ ended: ``on_end()``
      │  a page was refused or failed, or the deadline passed: what is pending is dropped
      └─ cancel(): the same, at once; puts in flight run to their end and release then

Publications take turns (first in, first served, one batch each), so that a long prompt does not
hold up a short one. Bound: each queued page holds a page of the pool, so the queue cannot exceed
the pool; the scheduler admits nothing while the pool is full of pages that wait here.

Invariant: refs taken == pages pending + pages in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.page_allocator import PageAllocator
from engine.request import RequestId
from kvstore.page import PageId
from kvstore.store import DEFAULT_POLICY, PageIdentity, PutOutcome, PutPolicy, PutResult

_GOOD = (PutOutcome.STORED, PutOutcome.PRESENT)


class QueuedPage(NamedTuple):
    identity: PageIdentity
    page_id: PageId


class Batch(NamedTuple):
    """Consecutive pages of one publication, for one put. Owes ``complete``."""

    publication: Publication
    pages: list[QueuedPage]
    deadline_s: float


class Publication:
    """The pages of one request on their way to the store. Mutated by ``PublishQueue`` only.

    Attributes:
        policy: how the store is to keep them.
        ok: no page was refused, failed or dropped so far.
        deadline_s: when pages that are still pending are given up; None while open.
    """

    def __init__(
        self,
        request_id: RequestId,
        on_end: Callable[[], None],
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> None:
        self.request_id = request_id
        self.on_end = on_end
        self.policy = policy
        self.pending: deque[QueuedPage] = deque()
        self.num_in_flight = 0
        self.ok = True
        self.closed = False
        self.ended = False
        self.deadline_s: float | None = None
        self.pages_pushed = 0
        self.bytes_pushed = 0


class PublishQueue:
    """Turn-taking queue of pages to push."""

    def __init__(self, allocator: PageAllocator, *, batch_pages: int, timeout_s: float) -> None:
        self._allocator = allocator
        self._batch_pages = batch_pages
        self._timeout_s = timeout_s
        self._turns: deque[Publication] = deque()  # publications with pending pages
        self._in_flight: dict[int, Batch] = {}

    @property
    def num_pending_pages(self) -> int:
        return sum(len(publication.pending) for publication in self._turns)

    def add(self, publication: Publication, pages: Sequence[QueuedPage]) -> None:
        """Queue pages, each retained here; after a failure they would be in vain: no effect."""
        assert not publication.closed
        if not publication.ok or not pages:
            return
        self._allocator.retain([page.page_id for page in pages])
        if not publication.pending:
            self._turns.append(publication)
        publication.pending.extend(pages)

    def close(self, publication: Publication, now_s: float) -> None:
        """No more pages will come; idempotent."""
        if not publication.closed:
            publication.closed = True
            publication.deadline_s = now_s + self._timeout_s
            self._end_if_idle(publication)

    def cancel(self, publication: Publication) -> None:
        """Drop what is pending; idempotent."""
        publication.closed = True
        self._drop(publication)
        self._end_if_idle(publication)

    def take(self, now_s: float) -> Batch | None:
        """Return the next batch to put, or None when nothing is pending."""
        while self._turns:
            publication = self._turns.popleft()
            deadline_s = publication.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._drop(publication)
                self._end_if_idle(publication)
                continue
            pages = self._consecutive(publication)
            if publication.pending:
                self._turns.append(publication)
            publication.num_in_flight += len(pages)
            batch = Batch(publication, pages, deadline_s or now_s + self._timeout_s)
            self._in_flight[id(batch)] = batch
            return batch
        return None

    def complete(self, batch: Batch, result: PutResult | None) -> None:
        """A put has ended (None: it raised or was cancelled): release its pages, count, go on."""
        del self._in_flight[id(batch)]
        publication = batch.publication
        publication.num_in_flight -= len(batch.pages)
        self._allocator.release([page.page_id for page in batch.pages])
        if result is not None:
            publication.pages_pushed += result.moved.num_pages
            publication.bytes_pushed += result.moved.nbytes
        if result is None or any(outcome not in _GOOD for outcome in result.outcomes):
            self._drop(publication)
            publication.ok = False
        self._end_if_idle(publication)

    def held(self) -> Iterator[PageId]:
        """Every page on which the queue holds a reference."""
        for publication in self._turns:
            yield from (page.page_id for page in publication.pending)
        for batch in self._in_flight.values():
            yield from (page.page_id for page in batch.pages)

    def _consecutive(self, publication: Publication) -> list[QueuedPage]:
        pages = [publication.pending.popleft()]
        while publication.pending and len(pages) < self._batch_pages:
            if publication.pending[0].identity.depth != pages[-1].identity.depth + 1:
                break
            pages.append(publication.pending.popleft())
        return pages

    def _drop(self, publication: Publication) -> None:
        if publication.pending:
            publication.ok = False
            self._allocator.release([page.page_id for page in publication.pending])
            publication.pending.clear()
            if publication in self._turns:
                self._turns.remove(publication)

    def _end_if_idle(self, publication: Publication) -> None:
        idle = not publication.pending and publication.num_in_flight == 0
        if publication.closed and idle and not publication.ended:
            publication.ended = True
            publication.on_end()
