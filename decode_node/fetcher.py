"""Pulls the missing pages of admitted sequences out of the store.

Owns one task per pulling sequence, and the gets in flight. Decides when to stop waiting; what to
do then is the scheduler's. Knows no steps.

One pull, as rounds of ``store.get``::

    leg alive ──▶ waiting round ──all there─────────────────────────────▶ end
                     │    │ page at the frontier failed ────────────────▶ end
                     │    │ published, and waited pull_timeout_s since ─▶ end
                     │ leg failed / will not publish
    no leg ──────────┴──▶ one more round that does not wait ────────────▶ end

* A full page that another sequence pulls now is *followed*, not pulled again: when it arrives it
  enters the page cache and is shared. When that get ends without it, a follower pulls it itself. A
  round that does not wait never follows one that does.
* The destination pages of a get are held by the get until it ended, whatever becomes of the
  sequence (so nobody else is given a page that is still written to).
* A pull ends before its sequence computes: no get writes into pages that a step writes to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from decode_node.page_holds import PageHolds
from decode_node.pull_plan import PullPlan
from decode_node.scheduler import Scheduler
from decode_node.sequence import Sequence
from kvstore.page import PageId, PageKey, PageSpec
from kvstore.store import GetOutcome, GetPage, PageStore
from transfer.interface import Region

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pull:
    """One sequence being pulled."""

    seq: Sequence
    plan: PullPlan
    deadline_s: float
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    live: bool = True
    in_flight: dict[int, None] = field(default_factory=dict)  # pages that own gets bring


@dataclass(slots=True, eq=False)
class _Get:
    """One ``store.get`` in flight: which pages of ``pull``, and who follows it."""

    pull: _Pull
    wait: bool
    indices: list[int]
    page_ids: list[PageId]
    keys: list[PageKey]
    followers: dict[_Pull, None] = field(default_factory=dict)
    num_read: int = 0
    ended: bool = False


class Fetcher:
    """See the module.

    Args:
        store: where pages come from.
        region: the pool's memory.
        spec: page geometry.
        scheduler: is told of every page that arrives.
        holds: references of the gets in flight.
        pull_timeout_s: see ``DecodeConfig``.
        on_ended: called when the pull of a sequence that was not stopped has ended.
    """

    def __init__(
        self,
        *,
        store: PageStore,
        region: Region,
        spec: PageSpec,
        scheduler: Scheduler,
        holds: PageHolds,
        pull_timeout_s: float,
        on_ended: Callable[[Sequence], None],
    ) -> None:
        self._store = store
        self._region = region
        self._spec = spec
        self._scheduler = scheduler
        self._holds = holds
        self._pull_timeout_s = pull_timeout_s
        self._on_ended = on_ended
        self._pulls: dict[Sequence, _Pull] = {}
        self._gets: dict[PageKey, _Get] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.counters = dict.fromkeys(("read", "absent", "corrupt", "failed", "followed"), 0)

    @property
    def num_pulling(self) -> int:
        return len(self._pulls)

    # ---- what the node calls

    def start(self, seq: Sequence, plan: PullPlan, deadline_s: float) -> None:
        """Begin to pull ``plan``; ``on_ended`` follows unless ``stop`` comes first."""
        pull = _Pull(seq, plan, deadline_s)
        self._pulls[seq] = pull
        pull.task = self._spawn(self._run(pull))

    def news(self, seq: Sequence) -> None:
        """The prefill leg of ``seq`` has news: think again."""
        pull = self._pulls.get(seq)
        if pull is not None:
            pull.changed.set()

    def stop(self, seq: Sequence) -> None:
        """Give up the pull of ``seq``, if there is one, without ``on_ended``."""
        pull = self._pulls.pop(seq, None)
        if pull is not None:
            pull.live = False
            assert pull.task is not None
            if pull.task is not asyncio.current_task():
                pull.task.cancel()

    async def close(self) -> None:
        """Cancel every pull and wait until none touches memory any more."""
        self.abort()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def abort(self) -> None:
        for seq in list(self._pulls):
            self.stop(seq)
        for task in list(self._tasks):
            task.cancel()

    # ---- one pull

    async def _run(self, pull: _Pull) -> None:
        began_s = asyncio.get_running_loop().time()
        news = pull.seq.news
        stopped_waiting = True
        if news.more_pages:
            await self._round(pull, wait=True)
            stopped_waiting = not news.more_pages
        if stopped_waiting and pull.live and not pull.plan.complete:
            pull.plan.try_again()
            await self._round(pull, wait=False)
        if pull.live:
            pull.live = False
            del self._pulls[pull.seq]
            pull.seq.stats.pull_s += asyncio.get_running_loop().time() - began_s
            self._on_ended(pull.seq)

    async def _round(self, pull: _Pull, *, wait: bool) -> None:
        """Get what is missing until it is there, cannot come, or may not be waited for."""
        began_s = asyncio.get_running_loop().time()
        gets: list[asyncio.Task[None]] = []
        try:
            while True:
                pull.changed.clear()
                self._share(pull)
                until_s = self._round_deadline(pull, wait, began_s)
                if pull.plan.complete or pull.plan.blocked or until_s is None:
                    return
                indices = self._nobodys(pull, wait)
                if indices:
                    gets.append(self._start_get(pull, indices, wait, until_s))
                if not self._follow(pull, wait) and not pull.in_flight:
                    return
                async with asyncio.timeout_at(until_s):
                    await pull.changed.wait()
        except TimeoutError:
            return
        finally:
            # Cancelled: each get holds its pages until it ended. Else: wait until all are quiet.
            running = [get for get in gets if not get.done()]
            for get in running:
                get.cancel()
            if running and pull.live:
                await asyncio.wait(running)

    def _round_deadline(self, pull: _Pull, wait: bool, began_s: float) -> float | None:
        """Until when the round may last; None when it is over now."""
        news = pull.seq.news
        until_s = pull.deadline_s
        if not wait:
            until_s = min(until_s, began_s + self._pull_timeout_s)
        elif not news.more_pages:
            return None
        elif news.published:
            since_s = max(began_s, news.published_s)  # it may have queued for pages in between
            until_s = min(until_s, since_s + self._pull_timeout_s)
        return until_s if asyncio.get_running_loop().time() < until_s else None

    def _share(self, pull: _Pull) -> None:
        """Take what other sequences brought into the cache."""
        while not pull.plan.complete:
            index = self._scheduler.share_next(pull.seq)
            if index is None:
                return
            self._recorded(pull, index, pull.plan.record(index, GetOutcome.READ) - 1)

    def _recorded(self, pull: _Pull, index: int, num_more: int) -> None:
        """The frontier went past ``index`` and ``num_more`` pages that were read before."""
        for later in range(index + 1, index + 1 + num_more):
            self._scheduler.page_pulled(pull.seq, later)

    def _nobodys(self, pull: _Pull, wait: bool) -> list[int]:
        """Missing pages that no get brings, neither an own one nor one to follow."""
        missing = [i for i in pull.plan.missing() if i not in pull.in_flight]
        return [i for i in missing if self._followable(pull, i, wait) is None]

    def _followable(self, pull: _Pull, index: int, wait: bool) -> _Get | None:
        """The get of another sequence that brings page ``index`` of this one."""
        get = self._gets.get(pull.plan.identity(index).key)
        return get if get is not None and get.pull is not pull and (wait or not get.wait) else None

    def _follow(self, pull: _Pull, wait: bool) -> bool:
        """Be woken by the gets that bring missing pages; False when there are none."""
        found = False
        for index in pull.plan.missing():
            get = None if index in pull.in_flight else self._followable(pull, index, wait)
            if get is not None:
                self.counters["followed"] += pull not in get.followers
                get.followers[pull] = None
                found = True
        return found

    # ---- one get

    def _start_get(
        self, pull: _Pull, indices: list[int], wait: bool, until_s: float
    ) -> asyncio.Task[None]:
        page_ids = [pull.seq.page_ids[i] for i in indices]
        get = _Get(pull, wait, indices, page_ids, [])
        for index in indices:
            identity = pull.plan.identity(index)
            if identity.num_tokens == self._spec.page_size and identity.key not in self._gets:
                self._gets[identity.key] = get
                get.keys.append(identity.key)
        pull.in_flight.update(dict.fromkeys(indices))
        self._holds.retain(page_ids)
        task = self._spawn(self._get(get, pull.deadline_s if wait else until_s))
        task.add_done_callback(lambda _: self._get_ended(get))
        return task

    async def _get(self, get: _Get, deadline_s: float) -> None:
        nbytes = self._spec.page_nbytes
        pages = [
            GetPage(get.pull.plan.identity(index), page_id * nbytes)
            for index, page_id in zip(get.indices, get.page_ids, strict=True)
        ]
        stats = get.pull.seq.stats
        moved_nbytes: int | None = None
        try:
            result = await self._store.get(
                pages,
                into=self._region,
                deadline_s=deadline_s,
                wait=get.wait,
                on_page=lambda i, outcome: self._page_done(get, i, outcome),
            )
            moved_nbytes = result.moved.nbytes
        finally:
            stats.pages_pulled += get.num_read
            stats.bytes_pulled += get.num_read * nbytes if moved_nbytes is None else moved_nbytes
            self._get_ended(get)

    def _page_done(self, get: _Get, position: int, outcome: GetOutcome) -> None:
        """One page of a get has its outcome."""
        pull, index = get.pull, get.indices[position]
        self.counters[outcome.value] += 1
        get.num_read += outcome is GetOutcome.READ
        if not pull.live or index not in pull.plan.missing():
            return  # given up, or shared from the cache meanwhile
        gained = pull.plan.record(index, outcome)
        if gained:
            self._scheduler.page_pulled(pull.seq, index)
            self._recorded(pull, index, gained - 1)
            for follower in get.followers:
                follower.changed.set()
        if gained or outcome is not GetOutcome.READ:
            pull.changed.set()

    def _get_ended(self, get: _Get) -> None:
        """The get touches nothing any more: let go of its pages, wake who waited for it.

        Idempotent: called by the get itself, and for one that was cancelled before it began.
        """
        if get.ended:
            return
        get.ended = True
        for key in get.keys:
            del self._gets[key]
        for index in get.indices:
            get.pull.in_flight.pop(index, None)
            if get.pull.live and index in get.pull.plan.missing():  # it was cancelled, or broke
                get.pull.plan.record(index, GetOutcome.FAILED)
        self._holds.release(get.page_ids)
        get.pull.changed.set()
        for follower in get.followers:
            follower.changed.set()

    # ---- tasks

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            logger.error("a pull broke", exc_info=task.exception())
