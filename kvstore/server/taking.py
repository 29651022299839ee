"""Takes pages that a writer offers: reserve, read from the writer's memory, commit.

Owns one ``TakePages`` at a time of each writer's requests. A put, or a batch of one, is one message
so, where reserving, writing and committing are three steps with two round trips.

::

    reserve ──present, being written, no room, other tokens──▶ said so; nothing was moved
       ▼ granted
    read ──not possible──▶ UNREAD, the slot is free at once
       ▼
    commit (hashes what has arrived) ──▶ TAKEN, or TORN

No slot is ever granted to another process: the writer cannot write late, and when it dies, the
read fails. This node owes a slot to itself for as long as it reads into it, even when the
reservation runs out meanwhile (the process stood still): it is not granted again before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.checksum import CHECKSUM_NBYTES
from kvstore.messages import (
    AbortPages,
    CommitPages,
    CommitStatus,
    OfferedPage,
    PageCommit,
    PageGrant,
    PagesCommitted,
    PagesReserved,
    PagesTaken,
    ReservePages,
    ReserveStatus,
    StoreDone,
    TakePages,
    TakeStatus,
    WriteGrant,
)
from kvstore.replication.holdings import OwnNode
from kvstore.server.polls import now_s
from transfer.channel import Caller, Service
from transfer.errors import RemoteFailed, TransferError
from transfer.interface import Priority, Range, Transfer

READ_S_MAX = 0.5  # of one read, and what its bytes take: who cannot be read soon had better write
SLOW_NBYTES_PER_S = 32 << 20
URGENT_NBYTES_MAX = 512 * 1024  # more do not go before what is read for somebody who waits
ANSWER_MARGIN_S = 0.05  # an answer leaves this much before its caller would give up

_REFUSALS = {
    ReserveStatus.PRESENT: TakeStatus.PRESENT,
    ReserveStatus.WRITING: TakeStatus.WRITING,
    ReserveStatus.REFUSED: TakeStatus.REFUSED,
    ReserveStatus.LATER: TakeStatus.LATER,
    ReserveStatus.COLLISION: TakeStatus.COLLISION,
    ReserveStatus.GRANTED: TakeStatus.UNREAD,  # until it has been read
}
_OUTCOMES = {
    CommitStatus.READY: TakeStatus.TAKEN,
    CommitStatus.STALE: TakeStatus.UNREAD,
    CommitStatus.TORN: TakeStatus.TORN,
}


class _Granted(NamedTuple):
    position: int
    page: OfferedPage
    grant: WriteGrant


class PageTaker:
    """Answers ``TakePages``.

    Args:
        own: answers the messages of the three steps, as if the writer had sent them.
        counters: gets ``taken`` and ``unread_takes``.
    """

    def __init__(self, own: OwnNode, transfer: Transfer, counters: Counter[str]) -> None:
        self._own = own
        self._transfer = transfer
        self._counters = counters

    def add_to(self, service: Service) -> None:
        service.on(TakePages, self.take)

    async def take(self, message: TakePages, caller: Caller) -> PagesTaken:
        _check(message)
        request = ReservePages(
            spec=message.spec,
            pages=tuple(page.identity for page in message.pages),
            policy=message.policy,
            wait_s=message.wait_s,
        )
        reserved = await self._own.ask(request, PagesReserved, deadline_s=caller.deadline_s)
        statuses = [_REFUSALS[grant.status] for grant in reserved.grants]
        granted = [
            _Granted(i, message.pages[i], grant)
            for i, grant in enumerate(reserved.grants)
            if grant.status is ReserveStatus.GRANTED
        ]
        if granted:
            limit_s = read_limit_s(
                len(granted) * message.spec.page_nbytes,
                lease_s=reserved.lease_s,
                deadline_s=caller.deadline_s,
                at_s=now_s(),
            )
            taken = await self._fill(message, reserved.incarnation, granted, limit_s)
            for one, status in zip(granted, taken, strict=True):
                statuses[one.position] = status
        return PagesTaken(tuple(statuses))

    async def _fill(
        self, message: TakePages, incarnation: str, granted: list[_Granted], limit_s: float
    ) -> Sequence[TakeStatus]:
        """Read and commit; what was not committed is given up, whatever happens."""
        nbytes = message.spec.page_nbytes
        urgent = len(granted) * nbytes <= URGENT_NBYTES_MAX
        ranges = [Range(page.offset, grant.offset, nbytes) for _, page, grant in granted]
        grants = tuple(PageGrant(p.identity.key, grant.generation) for _, p, grant in granted)
        done = False
        with self._own.holding(grants):
            try:
                await self._transfer.read(
                    message.read_token,
                    ranges,
                    into=self._own.region,
                    deadline_s=limit_s,
                    priority=Priority.NOW if urgent else Priority.BACKGROUND,
                )
                statuses = await self._commit(incarnation, granted, limit_s)
                done = True
            except TransferError:
                self._counters["unread_takes"] += 1
                return [TakeStatus.UNREAD] * len(granted)
            finally:
                if not done:
                    await self._give_up(incarnation, grants)
        return statuses

    async def _commit(
        self, incarnation: str, granted: list[_Granted], limit_s: float
    ) -> list[TakeStatus]:
        commits = tuple(
            PageCommit(page.identity.key, grant.generation, page.checksum)
            for _, page, grant in granted
        )
        message = CommitPages(incarnation=incarnation, pages=commits)
        committed = await self._own.ask(message, PagesCommitted, deadline_s=limit_s)
        self._counters["taken"] += committed.statuses.count(CommitStatus.READY)
        return [_OUTCOMES[status] for status in committed.statuses]

    async def _give_up(self, incarnation: str, grants: tuple[PageGrant, ...]) -> None:
        """A read that has ended or was cancelled touches the slots no more."""
        message = AbortPages(incarnation=incarnation, pages=grants, quiet=True)
        try:
            await self._own.ask(message, StoreDone, deadline_s=now_s() + READ_S_MAX)
        except RemoteFailed:
            return  # the node is closing


def read_limit_s(nbytes: int, *, lease_s: float, deadline_s: float, at_s: float) -> float:
    """When a read of ``nbytes`` that begins at ``at_s`` has to have ended, the commit included."""
    read_s = READ_S_MAX + nbytes / SLOW_NBYTES_PER_S
    return min(at_s + min(read_s, lease_s), deadline_s - ANSWER_MARGIN_S)


def _check(message: TakePages) -> None:
    """Refuse what cannot be an offer; the reservation checks the pages themselves.

    Raises:
        RemoteFailed: a number is impossible.
    """
    for page in message.pages:
        if page.offset < 0 or len(page.checksum) != CHECKSUM_NBYTES:
            raise RemoteFailed("bad_page", f"no page can be read at offset {page.offset}")
