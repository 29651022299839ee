"""Takes copies that another node offers: reserve, read from its segment, commit.

Owns one request at a time of a bounded number of senders. The page becomes visible only when the
bytes that arrived hash to the record that came with them (the own node's commit checks that), so a
sender with damaged memory cannot spread the damage.

A node whose SSD has to make room first grants a few slots of a batch at a time. It is served in
*rounds*, so that one message brings all it can::

    reserve what is left ──▶ read, commit ──▶ the next round ──▶ nothing left: answered
       │ no time for it                          │ SERVE_S are over, or a round brought nothing
       ▼                                         ▼
    LATER for what is left: offer it again

No round is begun that the sender's promise may not outlast: what a reservation pushes out to make
room would go for a read that is not made.

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
    AwaitPages,
    CommitPages,
    CommitStatus,
    LeasedPage,
    PageCommit,
    PageGrant,
    PagesCommitted,
    PagesReserved,
    PageStates,
    ReservePages,
    ReserveStatus,
    StoreDone,
)
from kvstore.page import PageKey
from kvstore.replication.clears import CLEARS_KEPT_MAX, Fence
from kvstore.replication.holdings import OwnNode, now_s
from kvstore.replication.messages import CopiesTaken, CopyStatus, TakeCopies
from kvstore.store import PageIdentity, PageState
from transfer.channel import Caller
from transfer.errors import RemoteFailed, TransferError
from transfer.interface import Priority, Range, Transfer

TAKES_MAX = 4  # batches of copies that arrive at once
CLEARS_NAMED_MAX = 2 * CLEARS_KEPT_MAX  # the sender's own, and those of a refusal
SERVE_S = 2.0  # of one batch: its pages stay in the sender's memory meanwhile, and others wait
ROOM_WAIT_S = 1.0  # for an SSD to make room in memory, at most, in each round
WRITE_WAIT_S = 0.2  # for another writer who is at a page, when all else of the batch is settled
READ_S = 0.5  # left for the read, at least, when there is room at last
LEASE_SHARE = 0.9  # of the sender's promise that a read may use
ROOM_SHARE, READ_SHARE = 0.5, 0.25  # of a short promise, for the two times above

_REFUSALS = {
    ReserveStatus.PRESENT: CopyStatus.PRESENT,
    ReserveStatus.WRITING: CopyStatus.WRITING,
    ReserveStatus.REFUSED: CopyStatus.REFUSED,
    ReserveStatus.LATER: CopyStatus.LATER,
    ReserveStatus.COLLISION: CopyStatus.REFUSED,
}
_OUTCOMES = {
    CommitStatus.READY: CopyStatus.TAKEN,
    CommitStatus.STALE: CopyStatus.BROKEN,
    CommitStatus.TORN: CopyStatus.TORN,
}
_OPEN = {CopyStatus.LATER, CopyStatus.WRITING}  # another round may bring them


class _Time(NamedTuple):
    """What one batch may take.

    Attributes:
        end_s: no read lasts longer, as the sender's promise is nearly over.
        room_s: how long a reservation waits for room.
        read_s: what must be left then.
    """

    end_s: float
    room_s: float
    read_s: float

    @property
    def has_left(self) -> bool:
        """A whole round fits in."""
        return now_s() + self.room_s + self.read_s < self.end_s


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
        time = _time(message, caller)
        statuses = [CopyStatus.LATER] * len(message.pages)
        fences: tuple[Fence, ...] = ()
        async with self._gate:
            until_s = now_s() + SERVE_S
            left = _open(statuses)
            while left and time.has_left:
                before = list(statuses)
                fences = await self._round(message, left, statuses, time)
                if fences or statuses == before or now_s() >= until_s:
                    break
                left = _open(statuses)
        return CopiesTaken(tuple(statuses), fences)

    async def _round(
        self, message: TakeCopies, left: list[int], statuses: list[CopyStatus], time: _Time
    ) -> tuple[Fence, ...]:
        """Take of the pages ``left`` what there is room for; returns what clears stand against
        them."""
        if not (fences := self._fences(message)):
            reserved = await self._reserve(message, left, time)
            granted = _sort(message, left, reserved, statuses)
            if granted:
                limit_s = min(time.end_s, now_s() + reserved.lease_s)
                outcomes = await self._copy(message, reserved, granted, limit_s)
                for grant, outcome in zip(granted, outcomes, strict=True):
                    statuses[grant.position] = outcome
            fences = self._fences(message)
        if fences:  # since the first look: what has just come goes, too
            self._forget(message, left, statuses)
        self._counters["copies_received"] += sum(statuses[i] is CopyStatus.TAKEN for i in left)
        if not fences:
            await self._written(message, statuses, time)
        return fences

    async def _written(self, message: TakeCopies, statuses: list[CopyStatus], time: _Time) -> None:
        """When all that is left is being written by others, wait a little for one of them."""
        left = _open(statuses)
        if not left or any(statuses[i] is CopyStatus.LATER for i in left):
            return
        keys = tuple(message.pages[i].record.key for i in left)
        request = AwaitPages(keys=keys, wait_s=min(WRITE_WAIT_S, time.room_s))
        try:
            settled = await self._own.ask(request, PageStates, deadline_s=time.end_s)
        except RemoteFailed:
            return  # too many wait, or the node is closing
        for i, state in zip(left, settled.states, strict=True):
            if state is not PageState.WRITING:
                statuses[i] = CopyStatus.PRESENT if state.present else CopyStatus.LATER

    def _fences(self, message: TakeCopies) -> tuple[Fence, ...]:
        return self._own.clears.fences(message.policy.namespace, message.clears, now_s())

    def _forget(self, message: TakeCopies, left: list[int], statuses: list[CopyStatus]) -> None:
        for i in left:
            if statuses[i] is CopyStatus.TAKEN:
                self._own.holdings.forget([message.pages[i].record.key])
            if statuses[i] is CopyStatus.TAKEN or statuses[i] in _OPEN:
                statuses[i] = CopyStatus.CLEARED

    async def _reserve(self, message: TakeCopies, left: list[int], time: _Time) -> PagesReserved:
        pages = tuple(
            PageIdentity(key=r.key, parent=r.parent, depth=r.depth, tokens=r.tokens)
            for r in (message.pages[i].record for i in left)
        )
        request = ReservePages(
            spec=message.spec, pages=pages, policy=message.policy, wait_s=time.room_s
        )
        reserved = await self._own.ask(request, PagesReserved, deadline_s=time.end_s)
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


def _time(message: TakeCopies, caller: Caller) -> _Time:
    lease_s = min(message.lease_s, LEASE_S_MAX) if message.lease_s > 0 else 0.0
    return _Time(
        end_s=min(now_s() + lease_s * LEASE_SHARE, caller.deadline_s),
        room_s=min(ROOM_WAIT_S, lease_s * ROOM_SHARE),
        read_s=min(READ_S, lease_s * READ_SHARE),
    )


def _open(statuses: list[CopyStatus]) -> list[int]:
    """The positions that another round may bring."""
    return [i for i, status in enumerate(statuses) if status in _OPEN]


def _sort(
    message: TakeCopies, left: list[int], reserved: PagesReserved, statuses: list[CopyStatus]
) -> list[_Granted]:
    """Note what was refused; returns what was granted."""
    granted = []
    for i, grant in zip(left, reserved.grants, strict=True):
        if grant.status is ReserveStatus.GRANTED:
            granted.append(_Granted(i, message.pages[i], grant.offset, grant.generation))
        else:
            statuses[i] = _REFUSALS[grant.status]
    return granted


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
