"""One ``put``: reserve, write, commit; join pages that another writer is writing.

Owns the life of a single call. Every batch is reserved right before it is written, so that no
reservation waits for the wire longer than one batch takes::

    reserve ──present──▶ PRESENT       ──no room, other tokens──▶ REFUSED
       │ └──being written──▶ wait until settled ──ready──▶ PRESENT
       ▼ granted  ▲                          └──absent──┐
    write         └─────────────────────────────────────┘  (the other failed: take over)
       ▼
    commit ──▶ STORED              anything broken, torn or late ──▶ FAILED (reservation given up)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.checksum import PageBytes, checksums
from kvstore.client.link import StoreLink, check_count
from kvstore.client.links import ClientParts
from kvstore.messages import (
    AbortPages,
    AwaitPages,
    CommitPages,
    CommitStatus,
    PageCommit,
    PageGrant,
    PagesCommitted,
    PagesReserved,
    PageStates,
    ReservePages,
    ReserveStatus,
    StoreDone,
    WriteGrant,
)
from kvstore.page import PageKey
from kvstore.store import PageState, PutOutcome, PutPage, PutResult, TransferCount
from transfer.errors import TransferError
from transfer.interface import Range, Region

POLL_MARGIN_S = 0.1  # no other try when less than this is left

_OUTCOMES = {
    ReserveStatus.PRESENT: PutOutcome.PRESENT,
    ReserveStatus.REFUSED: PutOutcome.REFUSED,
    ReserveStatus.COLLISION: PutOutcome.REFUSED,
}


class _Granted(NamedTuple):
    position: int
    grant: WriteGrant


class PageWriter:
    """One call of ``StoreClient.put``."""

    def __init__(
        self, parts: ClientParts, pages: Sequence[PutPage], *, source: Region, deadline_s: float
    ) -> None:
        self._parts = parts
        self._pages = pages
        self._keys = [page.identity.key for page in pages]
        self._source = source
        self._deadline_s = deadline_s
        self._outcomes: dict[int, PutOutcome] = {}
        self._num_moved = 0

    async def run(self) -> PutResult:
        first: dict[PageKey, int] = {}
        for i, key in enumerate(self._keys):
            first.setdefault(key, i)
        async with asyncio.TaskGroup() as tasks:
            for link, indexes in self._parts.links.group(self._keys, list(first.values())):
                gate = asyncio.Semaphore(self._parts.config.num_batches)
                size = self._parts.num_pages_per_batch
                for start in range(0, len(indexes), size):
                    tasks.create_task(self._push(link, indexes[start : start + size], gate))
        outcomes = []
        for i, key in enumerate(self._keys):
            outcome = self._outcomes.get(first[key], PutOutcome.FAILED)
            again = i != first[key] and outcome is PutOutcome.STORED
            outcomes.append(PutOutcome.PRESENT if again else outcome)
            self._parts.counters[f"put_{outcomes[-1]}"] += 1
        moved = TransferCount(self._num_moved, self._num_moved * self._parts.spec.page_nbytes)
        return PutResult(outcomes, moved)

    async def _push(self, link: StoreLink, todo: list[int], gate: asyncio.Semaphore) -> None:
        """Store one batch on one node; whatever has no outcome at the end has FAILED."""
        try:
            while todo and _now_s() < self._deadline_s:
                async with gate:
                    todo = await self._write_new(link, todo)
                if todo:
                    todo = await self._join(link, todo)
                if self._deadline_s - _now_s() <= POLL_MARGIN_S:
                    return
        except TransferError:
            self._parts.counters["broken_puts"] += 1

    async def _join(self, link: StoreLink, todo: list[int]) -> list[int]:
        """Wait for other writers; returns the pages that are still not there."""
        wait_s = max(0.0, min(self._parts.config.poll_s, self._deadline_s - _now_s()))
        request = AwaitPages(keys=tuple(self._keys[i] for i in todo), wait_s=wait_s)
        reply = await link.call(request, PageStates, deadline_s=self._deadline_s, wait_s=wait_s)
        check_count(reply.states, len(todo))
        left = []
        for i, state in zip(todo, reply.states, strict=True):
            if state is PageState.READY:
                self._outcomes[i] = PutOutcome.PRESENT
            else:
                left.append(i)
        return left

    async def _write_new(self, link: StoreLink, todo: list[int]) -> list[int]:
        """Reserve ``todo`` and write what was granted; returns what others are writing."""
        sent_s = _now_s()
        pages = tuple(self._pages[i].identity for i in todo)
        request = ReservePages(spec=self._parts.spec, pages=pages)
        reply = await link.call(request, PagesReserved, deadline_s=self._deadline_s)
        check_count(reply.grants, len(todo))
        granted, joined = [], []
        for i, grant in zip(todo, reply.grants, strict=True):
            if grant.status is ReserveStatus.GRANTED:
                granted.append(_Granted(i, grant))
            elif grant.status is ReserveStatus.WRITING:
                joined.append(i)
            else:
                self._outcomes[i] = _OUTCOMES[grant.status]
        if granted:
            await self._write(link, reply, granted, min(sent_s + reply.lease_s, self._deadline_s))
        return joined

    async def _write(
        self, link: StoreLink, reply: PagesReserved, granted: list[_Granted], limit_s: float
    ) -> None:
        """Write and commit; gives the reservations up in the background if it does not get there.

        An interrupted write may still have bytes on the wire: the node fences those slots.
        """
        done = False
        try:
            token = link.tokens(reply.incarnation).write_token
            sums, error = await self._move(token, granted, limit_s)
            if error is not None:
                link.judge(error, waited_s=0.0)
                raise error
            self._num_moved += len(granted)
            commits = tuple(
                PageCommit(self._keys[i], grant.generation, digest)
                for (i, grant), digest in zip(granted, sums, strict=True)
            )
            message = CommitPages(incarnation=reply.incarnation, pages=commits)
            committed = await link.call(message, PagesCommitted, deadline_s=self._deadline_s)
            check_count(committed.statuses, len(granted))
            done = True
        finally:
            if not done:
                self._give_up(link, reply, granted)
        for (i, _), status in zip(granted, committed.statuses, strict=True):
            ready = status is CommitStatus.READY
            self._outcomes[i] = PutOutcome.STORED if ready else PutOutcome.FAILED
            self._parts.counters[f"commit_{status}"] += 1

    async def _move(
        self, token: bytes, granted: list[_Granted], limit_s: float
    ) -> tuple[list[bytes], TransferError | None]:
        """Write the pages while their checksums are computed."""
        nbytes = self._parts.spec.page_nbytes
        sources = [self._pages[i] for i, _ in granted]
        ranges = [
            Range(grant.offset, page.local_offset, nbytes)
            for (_, grant), page in zip(granted, sources, strict=True)
        ]
        blobs = [
            PageBytes(
                self._parts.spec,
                self._source.view[page.local_offset : page.local_offset + nbytes],
                page.identity.num_tokens,
            )
            for page in sources
        ]

        async def write() -> TransferError | None:
            transfer = self._parts.transfer
            try:
                await transfer.write(token, ranges, source=self._source, deadline_s=limit_s)
            except TransferError as error:
                return error
            return None

        async with asyncio.TaskGroup() as tasks:
            hashing = tasks.create_task(checksums(blobs))
            writing = tasks.create_task(write())
        return hashing.result(), writing.result()

    def _give_up(self, link: StoreLink, reply: PagesReserved, granted: list[_Granted]) -> None:
        grants = tuple(PageGrant(self._keys[i], grant.generation) for i, grant in granted)
        message = AbortPages(incarnation=reply.incarnation, pages=grants, quiet=False)
        work = abort_pages(self._parts, link, message)
        self._parts.background.spawn(work, f"abort at {link.node_id}")


async def abort_pages(parts: ClientParts, link: StoreLink, message: AbortPages) -> None:
    """Give reservations up; if it cannot be done, they end by themselves."""
    try:
        await link.call(message, StoreDone, deadline_s=_now_s() + parts.config.op_timeout_s)
    except TransferError:
        parts.counters["lost_aborts"] += 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()
