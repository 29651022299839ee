"""Sends the copies that one node owes to one other node.

Owns the tasks of one target: two, so that the next batch is leased while one is on its way, and so
that fresh pages do not wait for a batch of repair. Decides nothing: what to send is the
``CopyQueue``'s, which of it can be read is the own node's.

A target that does not answer is parked: its copies stay queued, nobody waits for them, and it is
asked again after its link's back-off.

A copy that is refused for a clear is offered again at once when a writer has put the page here
after the clear was begun there; else when the target refuses nothing for it any more. Till then it
is owed, and nobody waits for it.

A copy that the target has no room for *yet* (its SSD is at it) is offered again and again, at the
target's pace: each message makes some of its copies, or counts as a try of them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvstore.client.link import StoreLink, check_count
from kvstore.messages import (
    AcquirePages,
    LeasedPage,
    OpenStore,
    PageGrant,
    PagesAcquired,
    ReleasePages,
    StoreDone,
    StoreOpened,
)
from kvstore.page import PageKey
from kvstore.replication.clears import CLEARS_KEPT_MAX, FENCE_S_MAX, Fence
from kvstore.replication.copy_queue import CopyQueue
from kvstore.replication.holdings import KeptAs, OwnNode, now_s
from kvstore.replication.messages import CopiesTaken, CopyStatus, TakeCopies
from transfer.errors import RemoteFailed, TransferError
from transfer.identity import NodeId

log = logging.getLogger(__name__)

BATCH_PAGES_MAX = 128
BATCH_NBYTES = 8 << 20
LEASE_SHARE = 0.75  # of a lease that a copy may take; the rest is for the goodbye
RETRY_S = 0.5  # pause after a target has failed or refused
OWN_TIMEOUT_S = 2.0

_MADE = {CopyStatus.TAKEN, CopyStatus.PRESENT}
_AGAIN = {CopyStatus.WRITING, CopyStatus.TORN, CopyStatus.BROKEN}


class _Batch(NamedTuple):
    """Pages of one geometry and policy, under one lease of the own node."""

    kept_as: KeptAs
    pages: tuple[LeasedPage, ...]


class _Refused(NamedTuple):
    """Pages that may be what a clear covers, and when that was begun, at the latest."""

    pages: list[LeasedPage]
    fences: tuple[Fence, ...] = ()
    begun_s: float = 0.0


class CopySender:
    """The way of copies to one node.

    Args:
        sent: called when copies have arrived or were given up.
        park: called with the target when it does not answer.
    """

    def __init__(
        self,
        link: StoreLink,
        own: OwnNode,
        queue: CopyQueue,
        counters: Counter[str],
        sent: Callable[[], None],
        park: Callable[[NodeId], None],
    ) -> None:
        self.link = link
        self._own = own
        self._queue = queue
        self._counters = counters
        self._sent = sent
        self._park = park
        self._wake = [asyncio.Event(), asyncio.Event()]
        self._tasks: list[asyncio.Task[None]] = []
        self._resume: asyncio.TimerHandle | None = None

    @property
    def healthy(self) -> bool:
        """No task has ended by an error of ours: what is owed is being sent."""
        return not any(task.done() for task in self._tasks)

    @property
    def node_id(self) -> NodeId:
        return self.link.node_id

    def wake(self) -> None:
        """There is something to send."""
        for event in self._wake:
            event.set()
        if not self._tasks:
            for i, event in enumerate(self._wake):
                work = self._run(event, fresh_first=i == 0)
                name = f"{self._own.identity.node_id} copies to {self.node_id} {i}"
                self._tasks.append(asyncio.create_task(work, name=name))
                self._tasks[-1].add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._counters["copy_tasks_failed"] += 1
            log.error("copies to %s have stopped: %r", self.node_id, error, exc_info=error)

    async def _run(self, wake: asyncio.Event, *, fresh_first: bool) -> None:
        while True:
            await wake.wait()
            keys = self._queue.take(self.node_id, BATCH_PAGES_MAX, fresh_first=fresh_first)
            if not keys:
                wake.clear()
                continue
            try:
                await self._send(keys)
            except TransferError as error:
                await self._fail(error)
            self._sent()

    async def _fail(self, error: TransferError) -> None:
        """The target does not answer, or takes nothing: wait for better times."""
        self._counters["copies_interrupted"] += 1
        self._park(self.node_id)
        self._sent()
        log.debug("copies to %s wait: %s", self.node_id, error)
        answers = False
        while not answers:
            await asyncio.sleep(max(RETRY_S, self.link.backs_off_s))
            answers = await self._answers()
        self._queue.unpark(self.node_id)
        self.wake()

    async def _answers(self) -> bool:
        try:
            await self.link.call(OpenStore(), StoreOpened, deadline_s=now_s() + OWN_TIMEOUT_S)
        except TransferError:
            return False
        return True

    async def _send(self, keys: list[PageKey]) -> None:
        """Send what is still here of ``keys``; what is not has been evicted and owed to nobody."""
        limit = self._num_pages(keys)
        self._queue.put_back(self.node_id, keys[limit:])
        keys = keys[:limit]
        started_s, cleared = now_s(), self._own.clears.done()
        request = AcquirePages(keys=tuple(keys), touch=False)
        leased = await self._own.ask(request, PagesAcquired, deadline_s=started_s + OWN_TIMEOUT_S)
        corrupt: list[PageGrant] = []
        try:
            here = {page.record.key: page for page in leased.pages}
            self._sort_out([key for key in keys if key not in here], some=bool(here))
            end_s = started_s + leased.lease_s * LEASE_SHARE
            for batch in self._batches(here):
                await self._send_batch(batch, end_s, cleared, corrupt)
        finally:
            if leased.pages:
                await self._release(leased, tuple(corrupt))

    def _sort_out(self, keys: list[PageKey], *, some: bool) -> None:
        """What was not leased: it is gone, or on the SSD and there is no room for it just now.

        ``some``: others of the batch were leased.
        """
        gone = [key for key in keys if self._own.holdings.kept_as(key) is None]
        self._counters["copies_gone"] += len(gone)
        self._queue.settle(self.node_id, gone, made=False)
        here = [key for key in keys if self._own.holdings.kept_as(key) is not None]
        if some:
            self._queue.put_back(self.node_id, here)
        else:
            self._queue.retry(self.node_id, here)

    def _num_pages(self, keys: list[PageKey]) -> int:
        """How many of ``keys`` go with one message."""
        nbytes = 0
        for i, key in enumerate(keys):
            kept_as = self._own.holdings.kept_as(key)
            nbytes += 0 if kept_as is None else kept_as.spec.page_nbytes
            if nbytes > BATCH_NBYTES:
                return max(1, i)
        return len(keys)

    def _batches(self, here: dict[PageKey, LeasedPage]) -> list[_Batch]:
        groups: dict[KeptAs, list[LeasedPage]] = {}
        for key, page in here.items():
            kept_as = self._own.holdings.kept_as(key)
            if kept_as is not None:
                groups.setdefault(kept_as, []).append(page)
            else:  # gone since the lease was granted, so that it could not be kept as anything
                self._queue.settle(self.node_id, [key], made=False)
        return [_Batch(kept_as, tuple(pages)) for kept_as, pages in groups.items()]

    async def _send_batch(
        self, batch: _Batch, end_s: float, cleared: tuple[str, ...], corrupt: list[PageGrant]
    ) -> None:
        refused = await self._offer(batch, end_s, cleared, corrupt)
        times = self._own.put_times
        young = [p for p in refused.pages if times.is_after(p.record.key, refused.begun_s)]
        self._defer(refused._replace(pages=[p for p in refused.pages if p not in young]))
        if young:
            begun = tuple(fence.clear_id for fence in refused.fences)
            batch = batch._replace(pages=tuple(young))
            self._defer(await self._offer(batch, end_s, (*cleared, *begun), corrupt))

    async def _offer(
        self, batch: _Batch, end_s: float, cleared: tuple[str, ...], corrupt: list[PageGrant]
    ) -> _Refused:
        left_s = end_s - now_s()
        message = TakeCopies(
            spec=batch.kept_as.spec,
            policy=batch.kept_as.policy,
            read_token=self._own.read_token,
            lease_s=left_s,
            pages=batch.pages,
            clears=cleared,
        )
        reply = await self.link.call(
            message, CopiesTaken, deadline_s=end_s, wait_s=max(0.0, left_s)
        )
        check_count(reply.statuses, len(batch.pages))
        self._put_back(batch, reply)
        refused = []
        for page, status in zip(batch.pages, reply.statuses, strict=True):
            self._note(page, status)
            if status is CopyStatus.TORN:
                corrupt.append(PageGrant(page.record.key, page.generation))
            elif status is CopyStatus.CLEARED:
                refused.append(page)
        # the answer was sent before now: no clear that it names was begun later than this
        begun_s = now_s() - min((max(0.0, f.age_s) for f in reply.fences), default=0.0)
        return _Refused(refused, reply.fences[:CLEARS_KEPT_MAX], begun_s)

    def _put_back(self, batch: _Batch, reply: CopiesTaken) -> None:
        """Queue again what there was no room for yet."""
        pairs = zip(batch.pages, reply.statuses, strict=True)
        later = [page.record.key for page, status in pairs if status is CopyStatus.LATER]
        if any(status in _MADE for status in reply.statuses):
            self._queue.put_back(self.node_id, later)
        else:  # it waited in vain
            self._queue.retry(self.node_id, later)

    def _defer(self, refused: _Refused) -> None:
        """Offer these again when no clear that they were refused for can reach a node any more."""
        if not refused.pages:
            return
        self._queue.defer(self.node_id, [page.record.key for page in refused.pages])
        left_s = max((fence.left_s for fence in refused.fences), default=0.0)
        until_s = now_s() + min(max(RETRY_S, left_s), FENCE_S_MAX)
        if self._resume is not None:
            until_s = min(until_s, self._resume.when())
            self._resume.cancel()
        self._resume = asyncio.get_running_loop().call_at(until_s, self._offer_deferred)

    def _offer_deferred(self) -> None:
        self._resume = None
        self._queue.resume(self.node_id)
        self.wake()

    def _note(self, page: LeasedPage, status: CopyStatus) -> None:
        key = page.record.key
        self._counters[f"copies_{status}"] += 1
        if status in (CopyStatus.CLEARED, CopyStatus.LATER):
            return  # the batch's matter
        if status in _AGAIN:
            self._queue.retry(self.node_id, [key])
            return
        if status is CopyStatus.TAKEN:
            self._counters["copied_nbytes"] += page.record.page_nbytes
        self._queue.settle(self.node_id, [key], made=status in _MADE)

    async def _release(self, leased: PagesAcquired, corrupt: tuple[PageGrant, ...]) -> None:
        message = ReleasePages(
            incarnation=leased.incarnation, lease_id=leased.lease_id, corrupt=corrupt
        )
        try:
            await self._own.ask(message, StoreDone, deadline_s=now_s() + OWN_TIMEOUT_S)
        except RemoteFailed:
            self._counters["lost_releases"] += 1  # the node is closing

    async def close(self) -> None:
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.close()

    def abort(self) -> None:
        """Stop at once; leases end by themselves."""
        for task in self._tasks:
            task.cancel()
        if self._resume is not None:
            self._resume.cancel()
        self.link.abort()
