"""One ``put``: reserve, write, commit, wait for the copies; join pages that others are writing.

A batch of up to ``offer_nbytes_max`` is offered instead: the node takes the three steps itself
(``offering.py``).

Owns the life of a single call. Every batch is reserved right before it is written, so that no
reservation waits for the wire longer than one batch takes. A page goes to the first node of its
ranking that can be reached::

    reserve ──present──▶ PRESENT       ──no room, other tokens──▶ REFUSED
       │ │└─room is being made──▶ reserved anew, when those granted are written (a wait that brings
       │ │                        nothing is a try); all waits of a put have one end
       │ └──being written──▶ wait until settled ──ready──▶ PRESENT
       ▼ granted  ▲                          └──absent──┐
    write         ├─────────────────────────────────────┘  (the other failed: take over)
       │ └─broken─┤ given up, fenced; reserved anew, ``TRIES_MAX`` times in all
       ▼          │
    commit ─torn──┘
       ▼
    copies made (or not possible now) ──▶ STORED
                  the node is lost, or broke too often ──▶ next in rank ──none──▶ FAILED
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.checksum import INLINE_NBYTES_MAX
from kvstore.client.all_of import all_of
from kvstore.client.lease import Lease
from kvstore.client.link import StoreLink, check_count
from kvstore.client.links import ClientParts
from kvstore.client.offering import OUTCOMES, digests_of, offer, worth_offering
from kvstore.config import WAIT_S_MAX
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
    TakeStatus,
    WriteGrant,
)
from kvstore.page import PageKey
from kvstore.replication.messages import AwaitCopies, CopiesAwaited
from kvstore.store import PutOutcome, PutPage, PutPolicy, PutResult, TransferCount
from transfer.errors import TransferError
from transfer.interface import Range, Region

POLL_MARGIN_S = 0.1  # no other try when less than this is left
PATIENCE = 0.75  # of a put's time, for room: then pages without a copy go, while there is time
ROOM_WAIT_S_MIN = 0.001  # of one who has no patience left: asks that room be made at once
TRIES_MAX = 3  # of writing one batch to one node, and of waiting in vain for its room

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
        self,
        parts: ClientParts,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy,
    ) -> None:
        self._parts = parts
        self._policy = policy
        self._pages = pages
        self._keys = [page.identity.key for page in pages]
        self._source = source
        self._deadline_s = deadline_s
        self._outcomes: dict[int, PutOutcome] = {}
        self._digests: dict[int, bytes] = {}  # of pages that were hashed, for when they go again
        self._num_moved = 0
        self._patient_until_s: float | None = None  # once a page has found no room

    async def run(self) -> PutResult:
        first: dict[PageKey, int] = {}
        for i, key in enumerate(self._keys):
            first.setdefault(key, i)
        await self._push_all(list(first.values()))
        outcomes = []
        for i, key in enumerate(self._keys):
            outcome = self._outcomes.get(first[key], PutOutcome.FAILED)
            again = i != first[key] and outcome is PutOutcome.STORED
            outcomes.append(PutOutcome.PRESENT if again else outcome)
            self._parts.counters[f"put_{outcomes[-1]}"] += 1
        moved = TransferCount(self._num_moved, self._num_moved * self._parts.spec.page_nbytes)
        return PutResult(outcomes, moved)

    async def _push_all(self, todo: list[int]) -> None:
        """Store all pages; those that a node could not take go to the next in rank."""
        course = self._parts.links.writing(self._keys)
        while todo and not self._late() and (groups := course.groups(todo)):
            size = self._parts.num_pages_per_batch
            pushes = []
            for link, indexes in groups:
                gate = asyncio.Semaphore(self._parts.config.num_batches)
                for start in range(0, len(indexes), size):
                    pushes.append(self._push(link, indexes[start : start + size], gate))
            await all_of(pushes)
            todo = [i for i in todo if i not in self._outcomes]
            course.unreachable(todo)
            if todo:
                self._parts.counters["puts_moved_on"] += len(todo)

    async def _push(self, link: StoreLink, todo: list[int], gate: asyncio.Semaphore) -> None:
        """Store one batch on one node; what has no outcome at the end was not stored there."""
        num_tries, wait_s = 0, 0.0
        settled: dict[int, PutOutcome] = {}
        try:
            while todo and not self._late() and num_tries < TRIES_MAX:
                async with gate:
                    if worth_offering(self._parts, link, len(todo)):
                        written = await self._offer(link, todo, settled, wait_s)
                    else:
                        written = await self._write_new(link, todo, settled, wait_s)
                num_asked, todo = len(todo), [i for i in todo if i not in settled]
                in_vain = written.later and wait_s > 0.0 and len(todo) == num_asked
                num_tries += written.broken or in_vain
                wait_s = self._room_wait_s() if written.later or wait_s else 0.0
                if written.joined and not self._closing():
                    await self._join(link, written.joined, settled)
                    todo = [i for i in todo if i not in settled]
                if todo and self._closing():
                    break
            await self._secure(link, settled)
        except TransferError:
            self._parts.counters["broken_puts"] += 1

    async def _secure(self, link: StoreLink, settled: dict[int, PutOutcome]) -> None:
        """Wait until the pages survive the loss of ``link``'s node, as far as that can be had."""
        held = [i for i, outcome in settled.items() if outcome is not PutOutcome.REFUSED]
        links, config = self._parts.links, self._parts.config
        if held and config.put_waits_for_replicas and links.replicas > 1:
            wait_s = max(0.0, self._deadline_s - _now_s() - POLL_MARGIN_S)
            request = AwaitCopies(keys=tuple(self._keys[i] for i in held), wait_s=wait_s)
            reply = await link.call(
                request, CopiesAwaited, deadline_s=self._deadline_s, wait_s=wait_s
            )
            check_count(reply.made, len(held))
            self._parts.counters["puts_without_copies"] += reply.made.count(0)
        self._outcomes.update(settled)

    async def _join(
        self, link: StoreLink, joined: list[int], settled: dict[int, PutOutcome]
    ) -> None:
        """Wait for other writers for one poll's time."""
        wait_s = max(0.0, min(self._parts.config.poll_s, self._deadline_s - _now_s()))
        request = AwaitPages(keys=tuple(self._keys[i] for i in joined), wait_s=wait_s)
        reply = await link.call(request, PageStates, deadline_s=self._deadline_s, wait_s=wait_s)
        check_count(reply.states, len(joined))
        for i, state in zip(joined, reply.states, strict=True):
            if state.present:
                settled[i] = PutOutcome.PRESENT

    def _room_wait_s(self) -> float:
        """For a node to make room: what is left of this put's patience, which ends once for all."""
        now_s = _now_s()
        if self._patient_until_s is None:
            wait_s, limit_s = PATIENCE * (self._deadline_s - now_s), self._parts.config.room_wait_s
            self._patient_until_s = now_s + (wait_s if limit_s is None else min(limit_s, wait_s))
        return min(max(ROOM_WAIT_S_MIN, self._patient_until_s - now_s), WAIT_S_MAX)

    async def _offer(
        self, link: StoreLink, todo: list[int], settled: dict[int, PutOutcome], wait_s: float
    ) -> _Written:
        """Let the node take ``todo``."""
        statuses = await offer(
            self._parts,
            link,
            [self._pages[i] for i in todo],
            await self._sums(todo),
            source=self._source,
            policy=self._policy,
            deadline_s=self._deadline_s,
            wait_s=wait_s,
        )
        joined, broken = [], False
        for i, status in zip(todo, statuses, strict=True):
            if status in OUTCOMES:
                settled[i] = OUTCOMES[status]
            elif status is TakeStatus.WRITING:
                joined.append(i)
            elif status is not TakeStatus.LATER:
                broken = True
                if status is TakeStatus.TORN:
                    del self._digests[i]  # should the bytes have changed, these are what counts
        self._num_moved += statuses.count(TakeStatus.TAKEN)
        return _Written(joined, broken, TakeStatus.LATER in statuses)

    async def _write_new(
        self, link: StoreLink, todo: list[int], settled: dict[int, PutOutcome], wait_s: float
    ) -> _Written:
        """Reserve ``todo`` and write what was granted."""
        sent_s = _now_s()
        pages = tuple(self._pages[i].identity for i in todo)
        request = ReservePages(
            spec=self._parts.spec, pages=pages, policy=self._policy, wait_s=wait_s
        )
        reply = await link.call(request, PagesReserved, deadline_s=self._deadline_s, wait_s=wait_s)
        check_count(reply.grants, len(todo))
        later = any(grant.status is ReserveStatus.LATER for grant in reply.grants)
        granted, joined = [], []
        for i, grant in zip(todo, reply.grants, strict=True):
            if grant.status is ReserveStatus.GRANTED:
                granted.append(_Granted(i, grant))
            elif grant.status is ReserveStatus.WRITING:
                joined.append(i)
            elif grant.status is not ReserveStatus.LATER:
                settled[i] = _OUTCOMES[grant.status]
        broken = False
        if granted:
            broken = not await self._write(link, reply, granted, sent_s, settled)
        return _Written(joined, broken, later)

    async def _write(
        self,
        link: StoreLink,
        reply: PagesReserved,
        granted: list[_Granted],
        sent_s: float,
        settled: dict[int, PutOutcome],
    ) -> bool:
        """Write and commit; False when the bytes did not get there whole.

        Reservations that are not committed are given up: awaited when another try may follow, else
        in the background. An interrupted write may still have bytes on the wire: the node fences
        those slots.
        """
        grants = tuple(PageGrant(self._keys[i], grant.generation) for i, grant in granted)
        abort = AbortPages(incarnation=reply.incarnation, pages=grants, quiet=False)
        done = False
        try:
            lease = Lease(
                link,
                self._parts.config,
                incarnation=reply.incarnation,
                sent_s=sent_s,
                lease_s=reply.lease_s,
                writes=grants,
            )
            async with lease:
                sums = await self._move(link, reply.incarnation, lease, granted)
                if sums is None:
                    await link.call(abort, StoreDone, deadline_s=self._deadline_s)
                    done = True
                    return False
                self._num_moved += len(granted)
                statuses = await self._commit(link, reply.incarnation, grants, sums)
            done = True
        finally:
            if not done:
                work = abort_pages(self._parts, link, abort)
                self._parts.background.spawn(work, f"abort at {link.node_id}")
        for (i, _), status in zip(granted, statuses, strict=True):
            if status is CommitStatus.READY:
                settled[i] = PutOutcome.STORED
            elif status is CommitStatus.TORN:
                del self._digests[i]
            self._parts.counters[f"commit_{status}"] += 1
        return all(status is CommitStatus.READY for status in statuses)

    async def _commit(
        self, link: StoreLink, incarnation: str, grants: Sequence[PageGrant], sums: list[bytes]
    ) -> tuple[CommitStatus, ...]:
        commits = tuple(
            PageCommit(grant.key, grant.generation, digest)
            for grant, digest in zip(grants, sums, strict=True)
        )
        message = CommitPages(incarnation=incarnation, pages=commits)
        committed = await link.call(message, PagesCommitted, deadline_s=self._deadline_s)
        check_count(committed.statuses, len(grants))
        return committed.statuses

    async def _move(
        self, link: StoreLink, incarnation: str, lease: Lease, granted: list[_Granted]
    ) -> list[bytes] | None:
        """Write the pages while their checksums are computed; None when the write broke."""
        token = link.tokens(incarnation).write_token
        nbytes = self._parts.spec.page_nbytes
        indexes = [i for i, _ in granted]
        ranges = [Range(grant.offset, self._pages[i].local_offset, nbytes) for i, grant in granted]
        if len(indexes) * nbytes <= INLINE_NBYTES_MAX:  # not worth two tasks
            sums = await self._sums(indexes)
            return sums if await self._write_ranges(link, token, ranges, lease) else None
        async with asyncio.TaskGroup() as tasks:
            hashing = tasks.create_task(self._sums(indexes))
            writing = tasks.create_task(self._write_ranges(link, token, ranges, lease))
        return hashing.result() if writing.result() else None

    async def _sums(self, indexes: Sequence[int]) -> list[bytes]:
        """The checksums of these pages, each hashed once however often it is sent."""
        new = [i for i in indexes if i not in self._digests]
        digests = await digests_of(self._parts, [self._pages[i] for i in new], self._source)
        self._digests.update(zip(new, digests, strict=True))
        return [self._digests[i] for i in indexes]

    async def _write_ranges(
        self, link: StoreLink, token: bytes, ranges: list[Range], lease: Lease
    ) -> bool:
        started_s = _now_s()
        try:
            async with lease.hold():
                await self._parts.transfer.write(
                    token, ranges, source=self._source, deadline_s=self._deadline_s
                )
        except TransferError as error:
            link.judge_bulk(error, started_s=started_s)
            return False
        link.bulk_done()
        return True

    def _closing(self) -> bool:
        return self._deadline_s - _now_s() <= POLL_MARGIN_S

    def _late(self) -> bool:
        return _now_s() >= self._deadline_s


class _Written(NamedTuple):
    """Outcome of one try: pages that others are writing, whether something broke, and whether
    there is room for some pages only later."""

    joined: list[int]
    broken: bool
    later: bool


async def abort_pages(parts: ClientParts, link: StoreLink, message: AbortPages) -> None:
    """Give reservations up; if it cannot be done, they end by themselves."""
    try:
        await link.call(message, StoreDone, deadline_s=_now_s() + parts.config.op_timeout_s)
    except TransferError:
        parts.counters["lost_aborts"] += 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()
