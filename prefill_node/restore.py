"""Pulling prefix pages that other nodes have computed, when that is cheaper than computing them.

Owns the conversation with the store for one request: look, decide, pull. Knows no scheduling: the
job's pages are reserved, private and written by nobody else until ``restore`` has returned.

    all missing pages ──decide──▶ match ──▶ leading READY (and WRITING) pages ──decide──▶ get

What comes back is the number of *leading* pages that were read and verified; whatever failed, was
corrupt, or late ends the run there, and the rest is recomputed. Every store call is bounded by the
decision's timeout, at most ``restore_timeout_s``, so that a slow tier costs no more than about what
recomputing would have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from engine.page_pool import PagePool
from kvstore.store import GetOutcome, GetPage, GetResult, PageState, PageStore, TransferCount
from prefill_node.config import STORE_GRACE_S, PrefillConfig
from prefill_node.request_state import PrefillJob
from prefill_node.restore_model import Decision, RestoreModel
from prefill_node.stats import PrefillStats
from transfer.errors import TransferError
from transfer.interface import Region

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """Leading missing pages that are there now, and what really moved."""

    num_pages: int = 0
    pages_pulled: int = 0
    bytes_pulled: int = 0


class Restorer:
    """Restores jobs into one pool. Cancelling ``restore`` leaves the pages quiet."""

    def __init__(
        self,
        config: PrefillConfig,
        *,
        store: PageStore,
        pool: PagePool,
        region: Region,
        model: RestoreModel,
        stats: PrefillStats,
    ) -> None:
        self._config = config
        self._store = store
        self._pool = pool
        self._region = region
        self._model = model
        self._stats = stats

    async def restore(self, job: PrefillJob) -> Restored:
        """Pull what is worth pulling of the job's missing pages; never raises for the store."""
        decision = self._decide(job, job.num_pages - job.num_valid_full_pages)
        if not decision.restore:
            self._stats.record(job.request.request_id, decision)
            return Restored()
        started_s = asyncio.get_running_loop().time()
        states = await self._match(job, started_s + self._timeout_s(decision))
        usable = list(takewhile(lambda state: state is not PageState.ABSENT, states))
        if not decision.probe:
            decision = self._decide(job, len(usable))
        num_pages = min(decision.num_pages, len(usable))
        self._stats.record(job.request.request_id, decision._replace(restore=num_pages > 0))
        if num_pages == 0:
            return Restored()
        return await self._pull(job, usable[:num_pages], decision)

    def _decide(self, job: PrefillJob, num_pages: int) -> Decision:
        end = min((job.num_valid_full_pages + num_pages) * job.page_size, job.num_tokens)
        return self._model.decide(
            num_pages=num_pages,
            page_nbytes=self._pool.spec.page_nbytes,
            num_tokens=end - job.num_valid,
        )

    def _timeout_s(self, decision: Decision) -> float:
        return min(decision.timeout_s, self._config.restore_timeout_s)

    async def _match(self, job: PrefillJob, deadline_s: float) -> list[PageState]:
        keys = job.keys[job.num_valid_full_pages :]
        try:
            async with asyncio.timeout_at(deadline_s + STORE_GRACE_S):
                return await self._store.match(keys, deadline_s=deadline_s)
        except (TransferError, TimeoutError) as error:
            logger.warning("restore of %s: match failed: %r", job.request.request_id, error)
            return []

    async def _pull(
        self, job: PrefillJob, states: Sequence[PageState], decision: Decision
    ) -> Restored:
        """Get the pages; count the leading ones that verified."""
        wait = PageState.WRITING in states
        timeout_s = self._timeout_s(decision)
        if wait:  # somebody computes them right now: worth at most what recomputing would cost
            timeout_s = min(self._config.restore_wait_s, max(decision.recompute_s, timeout_s))
        started_s = asyncio.get_running_loop().time()
        result = await self._get(job, len(states), started_s + timeout_s, wait)
        elapsed_s = asyncio.get_running_loop().time() - started_s
        if not wait:
            self._learn(result, elapsed_s, late=elapsed_s >= timeout_s)
        good = list(takewhile(lambda outcome: outcome is GetOutcome.READ, result.outcomes))
        self._stats.count_restore(result.outcomes, num_used=len(good), elapsed_s=elapsed_s)
        return Restored(len(good), result.moved.num_pages, result.moved.nbytes)

    def _learn(self, result: GetResult, elapsed_s: float, *, late: bool) -> None:
        nbytes = result.moved.nbytes
        num_pages = len(result.outcomes) if late else result.moved.num_pages
        wanted_nbytes = max(nbytes, num_pages * self._pool.spec.page_nbytes)
        self._model.observe_restore(nbytes, wanted_nbytes, elapsed_s)

    async def _get(
        self, job: PrefillJob, num_pages: int, deadline_s: float, wait: bool
    ) -> GetResult:
        first = job.num_valid_full_pages
        wanted = job.identities(first, first + num_pages)
        table = job.page_ids[first : first + num_pages]
        pages = [
            GetPage(identity, self._pool.offset_of(page_id))
            for identity, page_id in zip(wanted, table, strict=True)
        ]
        outcomes = [GetOutcome.FAILED] * num_pages

        def note(index: int, outcome: GetOutcome) -> None:
            outcomes[index] = outcome

        try:
            async with asyncio.timeout_at(deadline_s + STORE_GRACE_S):
                return await self._store.get(
                    pages, into=self._region, deadline_s=deadline_s, wait=wait, on_page=note
                )
        except (TransferError, TimeoutError) as error:
            logger.warning("restore of %s: get failed: %r", job.request.request_id, error)
            num_read = sum(outcome is GetOutcome.READ for outcome in outcomes)
            moved = TransferCount(num_read, num_read * self._pool.spec.page_nbytes)
            return GetResult(outcomes, moved)
