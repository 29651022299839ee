"""Stores pages of sequences in the background: generated ones as they fill, the last at the end.

Owns the queue of pages on their way into the store, bounded in pages, and the puts in flight,
bounded in number. A page in the queue is held by it, whatever becomes of its sequence. A page that
does not fit into the queue, or that the store does not take, is counted and forgotten: it costs
its next reader a recompute. Knows no sequences beyond the counters it adds to, and that one such
object is one sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from decode_node.page_holds import PageHolds
from decode_node.sequence import SeqStats
from kvstore.page import PageId, PageKey, PageSpec
from kvstore.store import (
    DEFAULT_POLICY,
    PageIdentity,
    PageStore,
    PutOutcome,
    PutPage,
    PutPolicy,
)
from transfer.interface import Region

logger = logging.getLogger(__name__)

PUT_PAGES_MAX = 64  # pages of one put


@dataclass(slots=True, eq=False)
class Ticket:
    """The pages of one sequence that are on their way, those that joined a put included.

    ``done`` is set when the store has answered for all of them, or they were given up.
    """

    stats: SeqStats
    num_left: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Item:
    identity: PageIdentity
    page_id: PageId
    stats: SeqStats
    policy: PutPolicy
    tickets: list[Ticket]  # of the sequence that brought the page, and of those that joined


class WriteBack:
    """See the module.

    Args:
        store: where pages go.
        region: the pool's memory.
        spec: page geometry.
        holds: references of queued pages.
        num_workers: puts in flight at one time.
        num_pages_max: pages queued and in flight at one time.
        timeout_s: deadline of one put.
    """

    def __init__(
        self,
        *,
        store: PageStore,
        region: Region,
        spec: PageSpec,
        holds: PageHolds,
        num_workers: int,
        num_pages_max: int,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._region = region
        self._spec = spec
        self._holds = holds
        self._num_workers = num_workers
        self._num_pages_max = num_pages_max
        self._timeout_s = timeout_s
        self._queue: deque[_Item] = deque()
        self._in_flight: dict[PageKey, _Item] = {}
        self._tickets: dict[int, Ticket] = {}  # open ones; a ticket keeps the stats of its id alive
        self._workers: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self.counters = dict.fromkeys(
            ("stored", "present", "refused", "failed", "dropped", "joined"), 0
        )

    @property
    def num_pages(self) -> int:
        """Pages queued and in flight."""
        return len(self._in_flight)

    def submit(
        self,
        pages: Seq[tuple[PageIdentity, PageId]],
        stats: SeqStats,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> Ticket:
        """Queue pages; takes a reference on each. Never waits, never fails.

        Returns the ticket of all pages of the sequence (of ``stats``) that are on their way, also
        of earlier calls. A page that is on its way already is waited for, and held and counted by
        the sequence that brought it.
        """
        ticket = self._tickets.setdefault(id(stats), Ticket(stats))
        for identity, page_id in pages:
            item = self._in_flight.get(identity.key)
            if item is not None:
                self.counters["joined"] += 1
                item.tickets.append(ticket)
            elif self._closed or len(self._in_flight) >= self._num_pages_max:
                self.counters["dropped"] += 1
                continue
            else:
                self._holds.retain([page_id])
                item = _Item(identity, page_id, stats, policy, [ticket])
                self._in_flight[identity.key] = item
                self._queue.append(item)
            ticket.num_left += 1
        self._end_if_done(ticket)
        self._start_workers()
        return ticket

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued has been answered for; False when time ran out."""
        workers = list(self._workers)
        if workers:
            _, pending = await asyncio.wait(workers, timeout=timeout_s)
            return not pending
        return True

    async def close(self) -> None:
        """Give up what is queued, cancel the puts in flight and wait for their end."""
        self.abort()
        while self._workers:
            await asyncio.wait(list(self._workers))

    def abort(self) -> None:
        self._closed = True
        dropped, self._queue = list(self._queue), deque()
        self.counters["dropped"] += len(dropped)
        self._settle(dropped)
        for worker in list(self._workers):
            worker.cancel()

    # ---- workers: they live while there is something to store

    def _start_workers(self) -> None:
        idle = self._num_workers - len(self._workers)
        for _ in range(min(idle, -(-len(self._queue) // PUT_PAGES_MAX))):
            worker = asyncio.get_running_loop().create_task(self._work())
            self._workers[worker] = None
            worker.add_done_callback(self._reap)

    async def _work(self) -> None:
        while self._queue:
            items = self._next_items()
            try:
                await self._put(items)
            finally:
                self._settle(items)

    def _next_items(self) -> list[_Item]:
        """Take the pages of the next put: those at the front that are to be kept alike."""
        items = [self._queue.popleft()]
        while self._queue and len(items) < PUT_PAGES_MAX:
            if self._queue[0].policy != items[0].policy:
                break
            items.append(self._queue.popleft())
        return items

    async def _put(self, items: Seq[_Item]) -> None:
        nbytes = self._spec.page_nbytes
        result = await self._store.put(
            [PutPage(item.identity, item.page_id * nbytes) for item in items],
            source=self._region,
            deadline_s=asyncio.get_running_loop().time() + self._timeout_s,
            policy=items[0].policy,
        )
        for item, outcome in zip(items, result.outcomes, strict=True):
            self.counters[outcome.value] += 1
            if outcome is PutOutcome.STORED:
                item.stats.pages_pushed += 1
                item.stats.bytes_pushed += nbytes

    def _settle(self, items: Seq[_Item]) -> None:
        """The store does not touch these pages any more."""
        for item in items:
            del self._in_flight[item.identity.key]
            for ticket in item.tickets:
                ticket.num_left -= 1
                self._end_if_done(ticket)
        self._holds.release([item.page_id for item in items])

    def _end_if_done(self, ticket: Ticket) -> None:
        if not ticket.num_left and not ticket.done.is_set():
            ticket.done.set()
            del self._tickets[id(ticket.stats)]

    def _reap(self, worker: asyncio.Task[None]) -> None:
        del self._workers[worker]
        if not worker.cancelled() and worker.exception() is not None:
            self.counters["failed"] += 1
            logger.error("a write-back broke", exc_info=worker.exception())
        if self._queue:
            self._start_workers()
