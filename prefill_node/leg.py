"""One client's view of one request: the events that its stream yields.

Owns the hand-over between the step loop (which never waits for a client) and the stream handler
(which does). Holds at most two events and one error. Knows no pages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.request import ErrorCode, FirstToken, PrefillDone, PrefillEvent
from kvstore.store import PutPolicy
from prefill_node.publish_queue import Publication
from prefill_node.request_state import PrefillJob
from transfer.errors import RemoteFailed


class Leg:
    """Events of one request, in order: ``FirstToken``, then ``PrefillDone``, or an error."""

    def __init__(self, job: PrefillJob, on_published: Callable[[Leg], None]) -> None:
        self.job = job
        self.publication = Publication(
            job.request.request_id,
            lambda: on_published(self),
            PutPolicy(namespace=job.namespace),
        )
        self.error: RemoteFailed | None = None
        self.exhausted = False  # PrefillDone was taken
        self._events: deque[PrefillEvent] = deque()
        self._first_s = 0.0
        self._news = asyncio.Event()

    def first_token(self, event: FirstToken, now_s: float) -> None:
        self._first_s = now_s
        self._events.append(event)
        self._news.set()

    def finish(self, now_s: float) -> None:
        """The publication has ended: its outcome is the last event."""
        done = PrefillDone(
            published=self.publication.ok,
            pages_pushed=self.publication.pages_pushed,
            bytes_pushed=self.publication.bytes_pushed,
            push_s=now_s - self._first_s,
        )
        self._events.append(done)
        self._news.set()

    def fail(self, error: RemoteFailed) -> None:
        """Events that are there already still arrive; the first error counts."""
        if self.error is None:
            self.error = error
            self._news.set()

    async def next_event(self, deadline_s: float) -> PrefillEvent:
        """Return the next event.

        Raises:
            RemoteFailed: the request failed, or ``deadline_exceeded``.
        """
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._news.wait()
        except TimeoutError:
            text = "the request's deadline passed in prefill"
            raise RemoteFailed(ErrorCode.DEADLINE_EXCEEDED, text) from None
        if not self._events:
            assert self.error is not None
            raise self.error
        event = self._events.popleft()
        self.exhausted = isinstance(event, PrefillDone)
        if not self._events and self.error is None:
            self._news.clear()
        return event
