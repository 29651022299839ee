"""What a store node answers: messages in, directory decisions, messages out.

Owns the translation between the wire vocabulary and the ``Directory``, the checksum of committed
bytes, and long polls. Knows the segment's bytes as a memoryview; knows no membership, no listening
(``kvstore/server/node.py``).

A page becomes ready only when the bytes in its slot hash to what the writer declared: a torn,
misplaced or fenced-off write never becomes visible.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.checksum import PageBytes, checksums
from kvstore.config import LEASES_MAX, PAGES_PER_MESSAGE_MAX, WAIT_S_MAX, WATCHES_MAX
from kvstore.messages import (
    AbortPages,
    AcquirePages,
    AwaitPages,
    ClearStore,
    CommitPages,
    CommitStatus,
    LeasedPage,
    MatchPages,
    OpenStore,
    PagesAcquired,
    PagesCommitted,
    PagesReserved,
    PageStates,
    ReadStats,
    ReleasePages,
    ReservePages,
    StoreDone,
    StoreOpened,
    StoreStats,
    WriteGrant,
)
from kvstore.page import PageKey
from kvstore.server.directory import Directory
from kvstore.server.entry import Entry
from kvstore.store import PageState
from kvstore.verify import well_formed
from transfer.channel import Caller, Service
from transfer.errors import RemoteFailed
from transfer.interface import Region

REPLY_MARGIN_S = 0.05  # a long poll answers this much before its caller would give up


class StoreHandlers:
    """The message handlers of one node, over one directory and one region.

    Args:
        directory: the core; nobody else changes it while the node is open.
        region: the segment's memory.
        incarnation: of this node's process.
        lease_s: what clients are told; the directory adds the grace.
        numbers: returns the node's stats.
    """

    def __init__(
        self,
        directory: Directory,
        region: Region,
        *,
        incarnation: str,
        lease_s: float,
        numbers: Callable[[], dict[str, float]],
    ) -> None:
        self._directory = directory
        self._view = region.view
        self._opened = StoreOpened(
            incarnation=incarnation,
            read_token=region.export("r"),
            write_token=region.export("w"),
        )
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._numbers = numbers
        self.counters: Counter[str] = Counter()
        self.draining = False
        self.closed = False

    def add_to(self, service: Service) -> None:
        service.on(OpenStore, self._open)
        service.on(MatchPages, self._match)
        service.on(AwaitPages, self._await)
        service.on(ReservePages, self._reserve)
        service.on(CommitPages, self._commit)
        service.on(AbortPages, self._abort)
        service.on(AcquirePages, self._acquire)
        service.on(ReleasePages, self._release)
        service.on(ReadStats, self._stats)
        service.on(ClearStore, self._clear)

    # ---- looking

    async def _open(self, message: OpenStore, caller: Caller) -> StoreOpened:
        self._admit(0)
        return self._opened

    async def _match(self, message: MatchPages, caller: Caller) -> PageStates:
        self._admit(len(message.keys))
        return PageStates(tuple(self._directory.match(message.keys)))

    async def _stats(self, message: ReadStats, caller: Caller) -> StoreStats:
        return StoreStats(numbers=self._numbers())

    async def _clear(self, message: ClearStore, caller: Caller) -> StoreDone:
        return StoreDone(self._directory.clear())

    # ---- writing

    async def _reserve(self, message: ReservePages, caller: Caller) -> PagesReserved:
        self._admit(len(message.pages))
        if self.draining:
            raise RemoteFailed("draining", "this store node takes no new pages")
        for page in message.pages:
            if not well_formed(page, message.spec):
                raise RemoteFailed("bad_page", f"{page} is not a page of {message.spec}")
        reserved = self._directory.reserve(message.pages, message.spec, _now_s())
        return PagesReserved(
            incarnation=self._incarnation,
            lease_s=self._lease_s,
            grants=tuple(
                WriteGrant(r.status, r.slot.offset, r.slot.generation)
                if r.slot is not None
                else WriteGrant(r.status)
                for r in reserved
            ),
        )

    async def _commit(self, message: CommitPages, caller: Caller) -> PagesCommitted:
        self._admit(len(message.pages))
        self._fence(message.incarnation)
        found = [self._directory.find(page.key, page.generation) for page in message.pages]
        entries = [entry for entry in found if entry is not None]
        sums = iter(await checksums([self._bytes_of(entry) for entry in entries]))
        statuses = []
        for page, entry in zip(message.pages, found, strict=True):
            if entry is not None and next(sums) != page.checksum:
                statuses.append(self._torn(entry))
            elif self._directory.commit(page.key, page.generation, page.checksum):
                statuses.append(CommitStatus.READY)
            else:
                statuses.append(CommitStatus.STALE)
        return PagesCommitted(tuple(statuses))

    def _torn(self, entry: Entry) -> CommitStatus:
        """The slot does not hold what the writer declared. A ready page is left alone."""
        self.counters["torn_writes"] += 1
        self._directory.abort(entry.key, entry.slot.generation, quiet=False)
        return CommitStatus.TORN

    async def _abort(self, message: AbortPages, caller: Caller) -> StoreDone:
        self._admit(len(message.pages))
        self._fence(message.incarnation)
        aborted = [
            self._directory.abort(page.key, page.generation, quiet=message.quiet)
            for page in message.pages
        ]
        return StoreDone(sum(aborted))

    # ---- reading

    async def _acquire(self, message: AcquirePages, caller: Caller) -> PagesAcquired:
        self._admit(len(message.keys))
        if self._directory.num_leases >= LEASES_MAX:
            raise RemoteFailed("busy", f"this store node holds {LEASES_MAX} leases already")
        until_s = _poll_end_s(message.wait_s, caller)
        lease = self._directory.acquire(message.keys, _now_s())
        while lease is None and await self._changed(message.keys, until_s):
            lease = self._directory.acquire(message.keys, _now_s())
        return PagesAcquired(
            incarnation=self._incarnation,
            lease_id=0 if lease is None else lease.lease_id,
            lease_s=self._lease_s,
            pages=() if lease is None else tuple(_leased(entry) for entry in lease.entries),
        )

    async def _await(self, message: AwaitPages, caller: Caller) -> PageStates:
        self._admit(len(message.keys))
        until_s = _poll_end_s(message.wait_s, caller)
        states = self._states(message.keys)
        while all(state is PageState.WRITING for state in states):
            if not await self._changed(message.keys, until_s):
                break
            states = self._states(message.keys)
        return PageStates(tuple(states))

    def _states(self, keys: Sequence[PageKey]) -> list[PageState]:
        return [self._directory.state(key) for key in keys]

    async def _release(self, message: ReleasePages, caller: Caller) -> StoreDone:
        self._admit(len(message.corrupt))
        self._fence(message.incarnation)
        dropped = await self._drop_corrupt(message) if message.corrupt else 0
        self._directory.release(message.lease_id)
        return StoreDone(dropped)

    async def _drop_corrupt(self, message: ReleasePages) -> int:
        """Hash the reported pages again; drop those that really do not verify here.

        A report that is not confirmed was damage on the wire or in the reader's memory.
        """
        found = [self._directory.find(page.key, page.generation) for page in message.corrupt]
        entries = [entry for entry in found if entry is not None and entry.ready]
        sums = await checksums([self._bytes_of(entry) for entry in entries])
        dropped = 0
        for entry, digest in zip(entries, sums, strict=True):
            if entry.record is not None and digest != entry.record.checksum:
                dropped += self._directory.drop(entry.key, entry.slot.generation)
        self.counters["corrupt_reports"] += len(message.corrupt)
        self.counters["corrupt_dropped"] += dropped
        return dropped

    # ---- shared

    def _admit(self, num_pages: int) -> None:
        if self.closed:
            raise RemoteFailed("closed", "this store node is shutting down")
        if num_pages > PAGES_PER_MESSAGE_MAX:
            text = f"{num_pages} pages in one message; send at most {PAGES_PER_MESSAGE_MAX}"
            raise RemoteFailed("too_many_pages", text)

    def _fence(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            self.counters["fenced"] += 1
            text = f"the grant is of incarnation {incarnation}, this is {self._incarnation}"
            raise RemoteFailed("stale_incarnation", text)

    def _bytes_of(self, entry: Entry) -> PageBytes:
        slot = entry.slot
        page = self._view[slot.offset : slot.offset + slot.nbytes]
        return PageBytes(entry.spec, page, entry.identity.num_tokens)

    async def _changed(self, keys: Sequence[PageKey], until_s: float) -> bool:
        """Wait until the state of one of ``keys`` changes; False when the time is over."""
        if _now_s() >= until_s:
            return False
        watches = self._directory.watches
        if watches.num_keys + len(keys) > WATCHES_MAX:
            raise RemoteFailed("busy", f"this store node holds {watches.num_keys} waits already")
        changed = asyncio.Event()
        watch_id = watches.add(keys, changed.set)
        try:
            async with asyncio.timeout_at(until_s):
                await changed.wait()
        except TimeoutError:
            return False
        finally:
            watches.remove(watch_id)
        return not self.closed


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _poll_end_s(wait_s: float, caller: Caller) -> float:
    wait_s = min(wait_s, WAIT_S_MAX) if wait_s > 0.0 else 0.0  # a peer's number: may be NaN
    return min(_now_s() + wait_s, caller.deadline_s - REPLY_MARGIN_S)


def _leased(entry: Entry) -> LeasedPage:
    assert entry.record is not None
    return LeasedPage(entry.record, entry.slot.offset, entry.slot.generation)
