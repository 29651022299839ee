"""Takes copies that another node offers: reserve, read from its segment, commit.

Owns one request at a time of a bounded number of senders. The page becomes visible only when the
bytes that arrived hash to the record that came with them (the own node's commit checks that), so a
sender with damaged memory cannot spread the damage.

The bytes move with background priority: a copy is slowed by readers, never the reverse.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

from kvstore.checksum import CHECKSUM_NBYTES
from kvstore.client.link import check_count
from kvstore.config import LEASE_S_MAX, PAGES_PER_MESSAGE_MAX
from kvstore.messages import (
    AbortPages,
    CommitPages,
    CommitStatus,
    LeasedPage,
    PageCommit,
    PageGrant,
    PagesCommitted,
    PagesReserved,
    ReservePages,
    ReserveStatus,
    StoreDone,
)
from kvstore.page import PageKey
from kvstore.replication.clears import CLEARS_KEPT_MAX, Fence
from kvstore.replication.holdings import OwnNode, now_s
from kvstore.replication.messages import CopiesTaken, CopyStatus, TakeCopies
from kvstore.store import PageIdentity
from transfer.channel import Caller
from transfer.errors import RemoteFailed, TransferError
from transfer.interface import Priority, Range, Transfer

TAKES_MAX = 4  # batches of copies that arrive at once
CLEARS_NAMED_MAX = 2 * CLEARS_KEPT_MAX  # the sender's own, and those of a refusal
ROOM_WAIT_S = 1.0  # for an SSD to make room in memory
LEASE_SHARE = 0.9  # of the sender's promise that a read may use

_REFUSALS = {
    ReserveStatus.PRESENT: CopyStatus.PRESENT,
    ReserveStatus.WRITING: CopyStatus.WRITING,
    ReserveStatus.REFUSED: CopyStatus.REFUSED,
    ReserveStatus.LATER: CopyStatus.WRITING,  # likewise to be offered again
    ReserveStatus.COLLISION: CopyStatus.REFUSED,
}
_OUTCOMES = {
    CommitStatus.READY: CopyStatus.TAKEN,
    CommitStatus.STALE: CopyStatus.BROKEN,
    CommitStatus.TORN: CopyStatus.TORN,
}


class _Granted(NamedTuple):
    position: int
    page: LeasedPage
    offset: int
    generation: int


class CopyReceiver:
    """Answers ``TakeCopies``.

    Args:
        arriving: holds the keys whose commit is a copy's, so that they are not copied on.
    """

    def __init__(
        self,
        own: OwnNode,
        transfer: Transfer,
        counters: Counter[str],
        arriving: dict[PageKey, None],
    ) -> None:
        self._own = own
        self._transfer = transfer
        self._counters = counters
        self._arriving = arriving
        self._gate = asyncio.Semaphore(TAKES_MAX)

    async def take(self, message: TakeCopies, caller: Caller) -> CopiesTaken:
        """Copy what is missing here."""
        _check(message)
        lease_s = min(message.lease_s, LEASE_S_MAX) if message.lease_s > 0 else 0.0
        end_s = min(now_s() + lease_s * LEASE_SHARE, caller.deadline_s)
        async with self._gate:
            if fences := self._fences(message):
                return CopiesTaken((CopyStatus.CLEARED,) * len(message.pages), fences)
            reserved = await self._reserve(message, end_s)
            statuses = [_REFUSALS.get(g.status, CopyStatus.BROKEN) for g in reserved.grants]
            granted = [
                _Granted(i, message.pages[i], grant.offset, grant.generation)
                for i, grant in enumerate(reserved.grants)
                if grant.status is ReserveStatus.GRANTED
            ]
            if granted:
                limit_s = min(end_s, now_s() + reserved.lease_s)
                outcomes = await self._copy(message, reserved, granted, limit_s)
                for grant, outcome in zip(granted, outcomes, strict=True):
                    statuses[grant.position] = outcome
        if fences := self._fences(message):  # since the first look: what has just come goes, too
            self._forget(message, statuses)
        self._counters["copies_received"] += statuses.count(CopyStatus.TAKEN)
        return CopiesTaken(tuple(statuses), fences)

    def _fences(self, message: TakeCopies) -> tuple[Fence, ...]:
        return self._own.clears.fences(message.policy.namespace, message.clears, now_s())

    def _forget(self, message: TakeCopies, statuses: list[CopyStatus]) -> None:
        for i, status in enumerate(statuses):
            if status is CopyStatus.TAKEN:
                self._own.holdings.forget([message.pages[i].record.key])
                statuses[i] = CopyStatus.CLEARED

    async def _reserve(self, message: TakeCopies, end_s: float) -> PagesReserved:
        pages = tuple(
            PageIdentity(key=r.key, parent=r.parent, depth=r.depth, tokens=r.tokens)
            for r in (page.record for page in message.pages)
        )
        request = ReservePages(
            spec=message.spec, pages=pages, policy=message.policy, wait_s=ROOM_WAIT_S
        )
        reserved = await self._own.ask(request, PagesReserved, deadline_s=end_s)
        check_count(reserved.grants, len(pages))
        return reserved

    async def _copy(
        self,
        message: TakeCopies,
        reserved: PagesReserved,
        granted: list[_Granted],
        limit_s: float,
    ) -> list[CopyStatus]:
        nbytes = message.spec.page_nbytes
        ranges = [Range(grant.page.offset, grant.offset, nbytes) for grant in granted]
        grants = tuple(PageGrant(grant.page.record.key, grant.generation) for grant in granted)
        done = False
        with self._own.holding(grants):
            try:
                await self._transfer.read(
                    message.read_token,
                    ranges,
                    into=self._own.region,
                    deadline_s=limit_s,
                    priority=Priority.BACKGROUND,
                )
                statuses = await self._commit(reserved, granted, limit_s)
                done = True
            except TransferError:
                self._counters["copies_unread"] += 1
                return [CopyStatus.BROKEN] * len(granted)
            finally:
                if not done:
                    await self._give_up(reserved, grants)
        return statuses

    async def _commit(
        self, reserved: PagesReserved, granted: list[_Granted], limit_s: float
    ) -> list[CopyStatus]:
        keys = [grant.page.record.key for grant in granted]
        commits = tuple(
            PageCommit(grant.page.record.key, grant.generation, grant.page.record.checksum)
            for grant in granted
        )
        message = CommitPages(incarnation=reserved.incarnation, pages=commits)
        self._arriving.update(dict.fromkeys(keys))
        try:
            committed = await self._own.ask(message, PagesCommitted, deadline_s=limit_s)
        finally:
            for key in keys:
                self._arriving.pop(key, None)
        return [_OUTCOMES[status] for status in committed.statuses]

    async def _give_up(self, reserved: PagesReserved, grants: tuple[PageGrant, ...]) -> None:
        """Free the slots at once: a read that has ended or was cancelled touches them no more."""
        message = AbortPages(incarnation=reserved.incarnation, pages=grants, quiet=True)
        try:
            await self._own.ask(message, StoreDone, deadline_s=now_s() + 1.0)
        except RemoteFailed:
            return  # the node is closing


def _check(message: TakeCopies) -> None:
    """Refuse what cannot be pages of the stated geometry.

    Raises:
        RemoteFailed: with the remedy.
    """
    if len(message.clears) > CLEARS_NAMED_MAX:
        raise RemoteFailed("too_many_clears", f"name at most {CLEARS_NAMED_MAX} clears")
    if len(message.pages) > PAGES_PER_MESSAGE_MAX:
        raise RemoteFailed("too_many_pages", f"send at most {PAGES_PER_MESSAGE_MAX} copies at once")
    for page in message.pages:
        fits = page.record.page_nbytes == message.spec.page_nbytes and page.offset >= 0
        if not fits or len(page.record.checksum) != CHECKSUM_NBYTES:
            raise RemoteFailed("bad_page", f"{page.record.key.hex()} is no page of {message.spec}")
