"""One ``get``: acquire, read into place, verify, release; again while it waits for pages.

Owns the life of a single call. Nodes are worked on in parallel; on each, pages become usable batch
by batch. A page ends with exactly one outcome::

    acquire ──record is of other tokens──▶ CORRUPT (nothing is read)
       │ └──not ready──▶ wait (long poll, then placed anew) ──deadline──▶ ABSENT
       ▼
    read ──broken──▶ FAILED          lease too short for the rest ──▶ acquire again
       ▼
    hash ──mismatch──▶ CORRUPT (reported; the node checks and drops it)
       └──▶ READ

When cancelled, reads in flight end before the call does, and leases are released in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.checksum import PageBytes, checksums
from kvstore.client.link import StoreLink
from kvstore.client.links import ClientParts
from kvstore.messages import (
    AcquirePages,
    LeasedPage,
    PageGrant,
    PagesAcquired,
    ReleasePages,
    StoreDone,
)
from kvstore.page import PageKey
from kvstore.store import GetOutcome, GetPage, GetResult, TransferCount
from kvstore.verify import believable
from transfer.errors import DeadlineExceeded, TransferError
from transfer.interface import Range, Region

OnPage = Callable[[int, GetOutcome], None]
POLL_MARGIN_S = 0.1  # a long poll ends this long before its caller's deadline, at the latest
LEASE_RESERVE = 0.25  # no batch starts in the last quarter of a lease


class _Granted(NamedTuple):
    position: int
    page: LeasedPage


class PageReader:
    """One call of ``StoreClient.get``."""

    def __init__(
        self,
        parts: ClientParts,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        wait: bool,
        on_page: OnPage | None,
    ) -> None:
        self._parts = parts
        self._pages = pages
        self._keys = [page.identity.key for page in pages]
        self._into = into
        self._deadline_s = deadline_s
        self._wait = wait
        self._on_page = on_page
        self._outcomes: dict[int, GetOutcome] = {}
        self._num_moved = 0

    async def run(self) -> GetResult:
        todo: list[int] = list(range(len(self._pages)))
        while todo and not self._late():
            groups = self._parts.links.group(self._keys, todo)
            if not groups:
                break
            async with asyncio.TaskGroup() as tasks:
                for link, indexes in groups:
                    tasks.create_task(self._pull(link, indexes))
            todo = self._unfinished(todo)
            if not self._wait or self._closing():
                break
        self._finish_all(todo, GetOutcome.ABSENT)
        moved = TransferCount(self._num_moved, self._num_moved * self._parts.spec.page_nbytes)
        return GetResult([self._outcomes[i] for i in range(len(self._pages))], moved)

    async def _pull(self, link: StoreLink, todo: list[int]) -> None:
        """Read what one node has of ``todo``, until all is read, time is up or nodes changed."""
        epoch = self._parts.links.epoch
        while todo and not self._late() and epoch == self._parts.links.epoch:
            try:
                lapsed = await self._pull_once(link, todo)
            except TransferError as error:
                if not self._wait or epoch == self._parts.links.epoch:  # else: place them anew
                    self._finish_all(self._unfinished(todo), self._verdict(error))
                return
            todo = self._unfinished(todo) if self._wait and not self._closing() else lapsed

    async def _pull_once(self, link: StoreLink, todo: list[int]) -> list[int]:
        """Acquire once and read what is ready; returns pages whose lease grew too short."""
        remaining_s = self._deadline_s - _now_s()
        wait_s = min(self._parts.config.poll_s, remaining_s) if self._wait else 0.0
        by_key: dict[PageKey, list[int]] = {}
        for i in todo:
            by_key.setdefault(self._keys[i], []).append(i)
        request = AcquirePages(keys=tuple(by_key), wait_s=wait_s)
        reply = await link.call(request, PagesAcquired, deadline_s=self._deadline_s, wait_s=wait_s)
        if not reply.pages:
            return []
        corrupt: list[PageGrant] = []
        try:
            granted = self._believed(reply, by_key)
            return await self._read(link, reply, granted, corrupt)
        finally:
            self._parts.background.spawn(
                release(self._parts, link, reply, tuple(corrupt)), f"release at {link.node_id}"
            )

    def _believed(self, reply: PagesAcquired, by_key: dict[PageKey, list[int]]) -> list[_Granted]:
        """The granted pages whose records are what the caller expects, in the caller's order."""
        granted = []
        for page in reply.pages:
            for i in by_key.pop(page.record.key, ()):  # each key once, whatever the node says
                if believable(page.record, self._pages[i].identity, self._parts.spec):
                    granted.append(_Granted(i, page))
                else:
                    self._parts.counters["collisions"] += 1
                    self._finish(i, GetOutcome.CORRUPT)
        return sorted(granted, key=lambda grant: grant.position)

    async def _read(
        self,
        link: StoreLink,
        reply: PagesAcquired,
        granted: list[_Granted],
        corrupt: list[PageGrant],
    ) -> list[int]:
        token = link.tokens(reply.incarnation).read_token
        end_s = _now_s() + reply.lease_s
        last_start_s = end_s - reply.lease_s * LEASE_RESERVE
        gate = asyncio.Semaphore(self._parts.config.num_batches)
        lapsed: list[int] = []

        async def read(batch: list[_Granted]) -> None:
            async with gate:
                if _now_s() < last_start_s:
                    await self._read_batch(link, token, batch, end_s, corrupt)
                else:
                    lapsed.extend(grant.position for grant in batch)

        size = self._parts.num_pages_per_batch
        async with asyncio.TaskGroup() as tasks:
            for start in range(0, len(granted), size):
                tasks.create_task(read(granted[start : start + size]))
        return lapsed

    async def _read_batch(
        self,
        link: StoreLink,
        token: bytes,
        batch: list[_Granted],
        end_s: float,
        corrupt: list[PageGrant],
    ) -> None:
        nbytes = self._parts.spec.page_nbytes
        targets = [self._pages[grant.position] for grant in batch]
        ranges = [
            Range(grant.page.offset, target.local_offset, nbytes)
            for grant, target in zip(batch, targets, strict=True)
        ]
        started_s = _now_s()
        limit_s = min(end_s, self._deadline_s)
        try:
            await self._parts.transfer.read(token, ranges, into=self._into, deadline_s=limit_s)
        except TransferError as error:
            link.judge(error, waited_s=_now_s() - started_s)
            self._finish_all([grant.position for grant in batch], self._verdict(error))
            return
        self._num_moved += len(batch)
        view = self._into.view
        sums = await checksums(
            [
                PageBytes(
                    self._parts.spec,
                    view[target.local_offset : target.local_offset + nbytes],
                    target.identity.num_tokens,
                )
                for target in targets
            ]
        )
        for grant, digest in zip(batch, sums, strict=True):
            if digest == grant.page.record.checksum:
                self._finish(grant.position, GetOutcome.READ)
            else:
                corrupt.append(PageGrant(grant.page.record.key, grant.page.generation))
                self._finish(grant.position, GetOutcome.CORRUPT)

    # ---- outcomes

    def _verdict(self, error: TransferError) -> GetOutcome:
        """ABSENT when the caller's own deadline ended the call, FAILED when the node did."""
        late = isinstance(error, DeadlineExceeded) and self._late()
        return GetOutcome.ABSENT if late else GetOutcome.FAILED

    def _finish(self, index: int, outcome: GetOutcome) -> None:
        assert index not in self._outcomes, f"page {index} has an outcome already"
        self._outcomes[index] = outcome
        self._parts.counters[f"get_{outcome}"] += 1
        if self._on_page is not None:
            self._on_page(index, outcome)

    def _finish_all(self, indexes: Sequence[int], outcome: GetOutcome) -> None:
        for index in indexes:
            self._finish(index, outcome)

    def _unfinished(self, indexes: Sequence[int]) -> list[int]:
        return [index for index in indexes if index not in self._outcomes]

    def _closing(self) -> bool:
        """True when the time left is too short for another long poll."""
        return self._deadline_s - _now_s() <= POLL_MARGIN_S

    def _late(self) -> bool:
        return _now_s() >= self._deadline_s


async def release(
    parts: ClientParts, link: StoreLink, reply: PagesAcquired, corrupt: tuple[PageGrant, ...]
) -> None:
    """End a lease and report corrupt pages; if it cannot be done, the lease ends by itself."""
    message = ReleasePages(incarnation=reply.incarnation, lease_id=reply.lease_id, corrupt=corrupt)
    try:
        await link.call(message, StoreDone, deadline_s=_now_s() + parts.config.op_timeout_s)
    except TransferError:
        parts.counters["lost_releases"] += 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()
