"""Pages from one node: acquire, read into place, verify, release.

Owns one visit of one node at a time, for one ``get``: the lease (renewed while reading), the
batches, the second try of a read whose connection broke, and the report of what did not verify.
Which node, and what becomes of pages it did not give, is the ``PageReader``'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.checksum import PageBytes, checksums
from kvstore.client.all_of import all_of
from kvstore.client.lease import Lease
from kvstore.client.link import StoreLink
from kvstore.client.links import ClientParts
from kvstore.messages import (
    AcquirePages,
    LeasedPage,
    PageGrant,
    PagesAcquired,
)
from kvstore.page import PageKey
from kvstore.store import GetOutcome, GetPage
from kvstore.verify import believable
from transfer.errors import DeadlineExceeded, TransferError
from transfer.interface import Range, Region

BULK_TRIES = 3  # of one read, before the node counts as failed for this page


class _Granted(NamedTuple):
    position: int
    page: LeasedPage


class _Visit(NamedTuple):
    """What the batches of one acquire share."""

    link: StoreLink
    reply: PagesAcquired
    lease: Lease
    corrupt: list[PageGrant]


class Pull:
    """Pulls pages of one ``get`` from single nodes.

    Args:
        read: called with the index of each page that has arrived and verified.
        spoiled: called with pages that were there and could not be read, or did not verify.
    """

    def __init__(
        self,
        parts: ClientParts,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        read: Callable[[int], None],
        spoiled: Callable[[Sequence[int], GetOutcome], None],
    ) -> None:
        self.num_moved = 0
        self._parts = parts
        self._pages = pages
        self._into = into
        self._deadline_s = deadline_s
        self._read_page = read
        self._spoiled = spoiled

    async def once(self, link: StoreLink, todo: Sequence[int], *, wait_s: float) -> list[int]:
        """Acquire once and read what was ready; returns pages to ask for again: those whose lease
        grew too short, and those that the node had no room for besides these.

        Raises:
            TransferError: the node did not answer, or its memory could not be read.
        """
        by_key: dict[PageKey, list[int]] = {}
        for i in todo:
            by_key.setdefault(self._pages[i].identity.key, []).append(i)
        sent_s = _now_s()
        ended = self._parts.releases.claim(link)
        request = AcquirePages(keys=tuple(by_key), wait_s=wait_s, first=ended)
        reply = await link.call(request, PagesAcquired, deadline_s=self._deadline_s, wait_s=wait_s)
        if not reply.pages:
            return []
        lease = Lease(
            link,
            self._parts.config,
            incarnation=reply.incarnation,
            # not from the answer's arrival: this process may have stood still since the grant
            sent_s=sent_s + min(max(0.0, reply.waited_s), _now_s() - sent_s),
            lease_s=reply.lease_s,
            lease_ids=(reply.lease_id,),
        )
        visit = _Visit(link, reply, lease, [])
        try:
            async with lease:
                granted = self._believed(reply, by_key)
                later = [i for some in by_key.values() for i in some] if reply.num_spilled else []
                return await self._read(visit, granted) + (later if granted else [])
        finally:
            self._parts.releases.add(link, reply.incarnation, reply.lease_id, tuple(visit.corrupt))

    def _believed(self, reply: PagesAcquired, by_key: dict[PageKey, list[int]]) -> list[_Granted]:
        """The granted pages whose records are what the caller expects, in the caller's order."""
        granted = []
        for page in reply.pages:
            for i in by_key.pop(page.record.key, ()):  # each key once, whatever the node says
                if believable(page.record, self._pages[i].identity, self._parts.spec):
                    granted.append(_Granted(i, page))
                else:
                    self._parts.counters["collisions"] += 1
                    self._spoiled([i], GetOutcome.CORRUPT)
        if len(reply.spread) == len(reply.pages):
            for page, num_nodes in zip(reply.pages, reply.spread, strict=True):
                if num_nodes:
                    self._parts.links.hot.note(page.record.key, num_nodes, _now_s())
        return sorted(granted, key=lambda grant: grant.position)

    async def _read(self, visit: _Visit, granted: list[_Granted]) -> list[int]:
        token = visit.link.tokens(visit.reply.incarnation).read_token
        gate = asyncio.Semaphore(self._parts.config.num_batches)
        lapsed: list[int] = []
        errors: list[TransferError] = []

        async def read(batch: list[_Granted]) -> None:
            async with gate:
                if visit.lease.short:
                    lapsed.extend(grant.position for grant in batch)
                elif (error := await self._read_batch(visit, token, batch)) is not None:
                    errors.append(error)

        size = self._parts.num_pages_per_batch
        await all_of([read(granted[i : i + size]) for i in range(0, len(granted), size)])
        if errors:
            raise errors[0]
        return lapsed

    async def _read_batch(
        self, visit: _Visit, token: bytes, batch: list[_Granted]
    ) -> TransferError | None:
        nbytes = self._parts.spec.page_nbytes
        targets = [self._pages[grant.position] for grant in batch]
        ranges = [
            Range(grant.page.offset, target.local_offset, nbytes)
            for grant, target in zip(batch, targets, strict=True)
        ]
        error = await self._move(visit, token, ranges)
        if error is not None:
            return error
        self.num_moved += len(batch)
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
                self._read_page(grant.position)
            else:
                visit.corrupt.append(PageGrant(grant.page.record.key, grant.page.generation))
                self._spoiled([grant.position], GetOutcome.CORRUPT)
        return None

    async def _move(self, visit: _Visit, token: bytes, ranges: list[Range]) -> TransferError | None:
        """Read the bytes; at once again when the connection broke: the lease still holds them."""
        for _ in range(BULK_TRIES):
            started_s = _now_s()
            try:
                async with visit.lease.hold():
                    await self._parts.transfer.read(
                        token, ranges, into=self._into, deadline_s=self._deadline_s
                    )
            except TransferError as error:
                visit.link.judge_bulk(error, started_s=started_s)
                if isinstance(error, DeadlineExceeded) or not visit.link.usable:
                    return error
                failure: TransferError = error
            else:
                visit.link.bulk_done()
                return None
        return failure


def _now_s() -> float:
    return asyncio.get_running_loop().time()
