"""What a store node answers: messages in, directory decisions, messages out.

Owns the translation between the wire vocabulary and the ``Directory``, the checksum of committed
bytes, and long polls. Knows the segment's bytes as a memoryview; knows no membership, no listening
(``kvstore/server/node.py``).

A page becomes ready only when the bytes in its slot hash to what the writer declared: a torn,
misplaced or fenced-off write never becomes visible.

What takes microseconds is answered in the turn of the loop in which it was asked; only many bytes
to hash, a page to be promoted and long polls are waited for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from msgspec import structs

from kvstore.checksum import PageBytes, checksums, checksums_now, fit_inline
from kvstore.config import (
    LEASES_MAX,
    MATCH_KEYS_MAX,
    PAGES_PER_MESSAGE_MAX,
)
from kvstore.events import CacheCleared, ClearCache
from kvstore.messages import (
    AbortPages,
    AcquirePages,
    AwaitPages,
    ClearStore,
    CommitPages,
    CommitStatus,
    HoldSession,
    LeasesRenewed,
    MatchPages,
    OpenStore,
    PagesAcquired,
    PagesCommitted,
    PagesMatched,
    PagesPinned,
    PagesReserved,
    PageStates,
    PinPages,
    ReadStats,
    ReleasePages,
    RenewLeases,
    ReservePages,
    StoreDone,
    StoreOpened,
    StoreStats,
    UnpinPages,
    unpack_keys,
)
from kvstore.page import KEY_NBYTES, PageKey
from kvstore.replication.clears import Clears
from kvstore.server.directory import Directory
from kvstore.server.entry import Grant, Lease
from kvstore.server.polls import REPLY_MARGIN_S, changed, now_s, poll_end_s
from kvstore.server.reserving import Reserving, answered
from kvstore.server.room import Room
from kvstore.server.sessions import Sessions
from kvstore.store import PageState
from kvstore.verify import well_formed
from transfer.channel import Caller, Service
from transfer.errors import RemoteFailed
from transfer.interface import Region


class _Commit(NamedTuple):
    message: CommitPages
    found: Sequence[Grant | None]
    own: bool  # this node wrote the bytes


class StoreHandlers:
    """The message handlers of one node, over one directory and one region.

    Args:
        directory: the core; nobody else changes it while the node is open.
        region: the segment's memory.
        incarnation: of this node's process.
        lease_s: what clients are told; the directory adds the grace.
        numbers, facts: return the node's stats, and what it says of itself in words.
    """

    def __init__(
        self,
        directory: Directory,
        region: Region,
        *,
        incarnation: str,
        lease_s: float,
        numbers: Callable[[], dict[str, float]],
        facts: Callable[[], dict[str, str]] = dict,
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
        self._facts = facts
        self.counters: Counter[str] = Counter()
        self.committed: Callable[[Sequence[PageKey]], None] = lambda keys: None
        self.dropped: Callable[[Sequence[PageKey]], None] = lambda keys: None
        self.spread: Callable[[Sequence[PageKey]], bytes] = lambda keys: b""
        self.promote: Callable[[Sequence[PageKey], float], Awaitable[None]] | None = None
        self.adopted: Callable[[], Awaitable[bool]] = _at_once
        self.flush: Callable[[], Awaitable[bool]] = _at_once
        self.room: Room | None = None
        self.sessions = Sessions(lambda writer: directory.bury(writer, now_s()))
        self.clears = Clears()
        self.draining = False
        self.closed = False

    def renew(self, incarnation: str) -> None:
        """Be another incarnation: what was granted before is refused from now on."""
        self._incarnation = incarnation
        self._opened = structs.replace(self._opened, incarnation=incarnation)

    def add_to(self, service: Service) -> None:
        service.on_prompt(OpenStore, self._open)
        service.on_prompt(MatchPages, self._match)
        service.on(AwaitPages, self._await)
        service.on_prompt(ReservePages, self._reserve)
        service.on_prompt(CommitPages, self._commit)
        service.on_prompt(AbortPages, self._abort)
        service.on_prompt(AcquirePages, self._acquire)
        service.on_prompt(ReleasePages, self._release)
        service.on_prompt(RenewLeases, self._renew)
        service.on_prompt(PinPages, self._pin)
        service.on_prompt(UnpinPages, self._unpin)
        service.on_stream(HoldSession, self.sessions.hold)
        service.on(ReadStats, self._stats)
        service.on(ClearStore, self._clear)
        service.on(ClearCache, self._clear_cache)

    # ---- looking

    def _open(self, message: OpenStore, caller: Caller) -> StoreOpened:
        self._admit(0)
        return self._opened

    def _match(self, message: MatchPages, caller: Caller) -> PagesMatched:
        self._admit_packed(message.keys)
        return PagesMatched(self._directory.match(message.keys, now_s(), touch=message.touch))

    async def _stats(self, message: ReadStats, caller: Caller) -> StoreStats:
        largest = await self._directory.usage().counted(message.num_namespaces)
        return StoreStats(numbers=self._numbers(), facts=self._facts(), namespaces=largest)

    async def _clear_cache(self, message: ClearCache, caller: Caller) -> CacheCleared:
        """Likewise, as every node with a cache is asked by the gateway."""
        done = await self._clear(ClearStore(message.namespace, message.clear_id), caller)
        return CacheCleared(num_pages=done.count)

    async def _clear(self, message: ClearStore, caller: Caller) -> StoreDone:
        count = 0
        until_s = caller.deadline_s  # after it, no node begins this clear any more
        self.clears.begin(message.clear_id, message.namespace, until_s=until_s, now_s=now_s())
        known = await self.adopted()  # what is to go may be on the SSD, and not indexed yet
        for num_cleared in self._directory.clearing(message.namespace):
            count += num_cleared
            await asyncio.sleep(0)  # a million pages take seconds: others are served meanwhile
        self.clears.end(message.clear_id)
        if not await self.flush() or not known:
            text = f"{count} pages forgotten, but some may come back from the SSD after a restart"
            raise RemoteFailed("not_durable", text)
        return StoreDone(count)

    # ---- writing

    def _reserve(
        self, message: ReservePages, caller: Caller
    ) -> PagesReserved | Awaitable[PagesReserved]:
        self._admit_new(len(message.pages))
        for page in message.pages:
            if not well_formed(page, message.spec):
                raise RemoteFailed("bad_page", f"{page} is not a page of {message.spec}")
        reserving = Reserving(self._directory, message, caller, self.room, self._admit_new)
        reserved = reserving.at_once()
        if reserved is None:
            return self._reserve_later(reserving)
        return answered(reserved, self._incarnation, self._lease_s)

    async def _reserve_later(self, reserving: Reserving) -> PagesReserved:
        return answered(await reserving.later(), self._incarnation, self._lease_s)

    def _commit(
        self, message: CommitPages, caller: Caller
    ) -> PagesCommitted | Awaitable[PagesCommitted]:
        self._admit(len(message.pages))
        self._fence(message.incarnation)
        found = [self._directory.find(page.key, page.generation) for page in message.pages]
        written = [self._bytes_of(grant) for grant in found if grant is not None]
        own = caller.peer.incarnation == self._incarnation  # its reads have ended: nothing is late
        commit = _Commit(message, found, own)
        if fit_inline(written):
            return self._publish(commit, checksums_now(written))
        return self._commit_many(commit, written)

    async def _commit_many(self, commit: _Commit, written: Sequence[PageBytes]) -> PagesCommitted:
        return self._publish(commit, await checksums(written))

    def _publish(self, commit: _Commit, sums: Sequence[bytes]) -> PagesCommitted:
        """Make visible what hashes to what the writer declared; ``sums`` are of those found."""
        left = iter(sums)
        statuses = []
        pages = commit.message.pages
        for page, grant in zip(pages, commit.found, strict=True):
            if grant is not None and next(left) != page.checksum:
                statuses.append(self._torn(grant, quiet=commit.own))
            elif self._directory.commit(page.key, page.generation, page.checksum):
                statuses.append(CommitStatus.READY)
            else:
                statuses.append(CommitStatus.STALE)
        ready = CommitStatus.READY
        self.committed([p.key for p, s in zip(pages, statuses, strict=True) if s is ready])
        if self.room is not None and ready in statuses:
            self.room.committed()
        return PagesCommitted(tuple(statuses))

    def _torn(self, grant: Grant, *, quiet: bool) -> CommitStatus:
        """The slot does not hold what the writer declared. A ready page is left alone."""
        self.counters["torn_writes"] += 1
        self._directory.abort(grant.key, grant.slot.generation, quiet=quiet)
        return CommitStatus.TORN

    def _abort(self, message: AbortPages, caller: Caller) -> StoreDone:
        self._admit(len(message.pages))
        self._fence(message.incarnation)
        aborted = [
            self._directory.abort(page.key, page.generation, quiet=message.quiet)
            for page in message.pages
        ]
        return StoreDone(sum(aborted))

    # ---- reading

    def _acquire(
        self, message: AcquirePages, caller: Caller
    ) -> PagesAcquired | Awaitable[PagesAcquired]:
        self._admit(len(message.keys))
        self._end_first(message.first)
        if self._directory.num_leases >= LEASES_MAX:
            raise RemoteFailed("busy", f"this store node holds {LEASES_MAX} leases already")
        if self._directory.num_spilled:
            return self._acquire_later(message, caller)
        lease = self._directory.acquire(message.keys, now_s(), touch=message.touch)
        if lease is None and message.wait_s > 0:
            return self._acquire_later(message, caller)
        return self._leased(message, lease)

    async def _acquire_later(self, message: AcquirePages, caller: Caller) -> PagesAcquired:
        """Once what is on the SSD has been read, and once there is something to lease."""
        asked_s, until_s = now_s(), poll_end_s(message.wait_s, caller)
        if self.promote is not None:
            await self.promote(message.keys, caller.deadline_s - REPLY_MARGIN_S)
        granted_s = now_s()
        lease = self._directory.acquire(message.keys, granted_s, touch=message.touch)
        while lease is None and await self._changed(message.keys, until_s):
            granted_s = now_s()
            lease = self._directory.acquire(message.keys, granted_s, touch=message.touch)
        num_spilled = self._states(message.keys).count(PageState.SPILLED)
        leased = self._leased(message, lease)
        return structs.replace(leased, num_spilled=num_spilled, waited_s=granted_s - asked_s)

    def _leased(self, message: AcquirePages, lease: Lease | None) -> PagesAcquired:
        pages = () if lease is None else self._directory.leased(lease)
        read = [page.record.key for page in pages] if message.touch else []
        return PagesAcquired(
            incarnation=self._incarnation,
            lease_id=0 if lease is None else lease.lease_id,
            lease_s=self._lease_s,
            pages=pages,
            spread=self.spread(read),
        )

    async def _await(self, message: AwaitPages, caller: Caller) -> PageStates:
        self._admit(len(message.keys))
        until_s = poll_end_s(message.wait_s, caller)
        states = self._states(message.keys)
        while all(state is PageState.WRITING for state in states):
            if not await self._changed(message.keys, until_s):
                break
            states = self._states(message.keys)
        return PageStates(tuple(states))

    def _states(self, keys: Sequence[PageKey]) -> list[PageState]:
        return [self._directory.state(key) for key in keys]

    def _release(self, message: ReleasePages, caller: Caller) -> StoreDone | Awaitable[StoreDone]:
        self._admit(len(message.corrupt) + len(message.others))
        self._fence(message.incarnation)
        if message.corrupt:
            return self._release_corrupt(message)
        self._end_leases(message)
        return StoreDone()

    async def _release_corrupt(self, message: ReleasePages) -> StoreDone:
        dropped = await self._drop_corrupt(message)
        self._end_leases(message)
        return StoreDone(dropped)

    def _end_first(self, ended: ReleasePages | None) -> None:
        if ended is not None and ended.incarnation == self._incarnation:
            self._admit(len(ended.others))
            self._end_leases(ended)

    def _end_leases(self, message: ReleasePages) -> None:
        for lease_id in (message.lease_id, *message.others):
            self._directory.release(lease_id)

    async def _drop_corrupt(self, message: ReleasePages) -> int:
        """Hash the reported pages again; drop those that really do not verify here.

        A report that is not confirmed was damage on the wire or in the reader's memory.
        """
        found = [self._directory.find(page.key, page.generation) for page in message.corrupt]
        grants = [grant for grant in found if grant is not None and grant.ready]
        sums = await checksums([self._bytes_of(grant) for grant in grants])
        damaged = [g for g, digest in zip(grants, sums, strict=True) if digest != g.checksum]
        dropped = [g.key for g in damaged if self._directory.drop(g.key, g.slot.generation)]
        self.counters["corrupt_reports"] += len(message.corrupt)
        self.counters["corrupt_dropped"] += len(dropped)
        self.dropped(dropped)
        return len(dropped)

    # ---- holding

    def _renew(self, message: RenewLeases, caller: Caller) -> LeasesRenewed:
        self._admit(len(message.lease_ids) + len(message.writes))
        self._fence(message.incarnation)
        directory, at_s = self._directory, now_s()
        return LeasesRenewed(
            lease_s=self._lease_s,
            leases=tuple(directory.renew_lease(lease, at_s) for lease in message.lease_ids),
            writes=tuple(
                directory.renew_write(page.key, page.generation, at_s) for page in message.writes
            ),
        )

    def _pin(self, message: PinPages, caller: Caller) -> PagesPinned:
        return PagesPinned(bytes(self._directory.pin(self._unpack(message.keys))))

    def _unpin(self, message: UnpinPages, caller: Caller) -> PagesPinned:
        return PagesPinned(bytes(self._directory.unpin(self._unpack(message.keys))))

    # ---- shared

    def _admit(self, num_pages: int, num_pages_max: int = PAGES_PER_MESSAGE_MAX) -> None:
        if self.closed:
            raise RemoteFailed("closed", "this store node is shutting down")
        if num_pages > num_pages_max:
            text = f"{num_pages} pages in one message; send at most {num_pages_max}"
            raise RemoteFailed("too_many_pages", text)

    def _admit_new(self, num_pages: int = 0) -> None:
        self._admit(num_pages)
        if self.draining:
            raise RemoteFailed("draining", "this store node takes no new pages")

    def _unpack(self, packed: bytes) -> list[PageKey]:
        self._admit_packed(packed)
        return unpack_keys(packed)

    def _admit_packed(self, packed: bytes) -> None:
        if len(packed) % KEY_NBYTES:
            text = f"{len(packed)} bytes are no whole number of keys of {KEY_NBYTES}"
            raise RemoteFailed("bad_keys", text)
        self._admit(len(packed) // KEY_NBYTES, MATCH_KEYS_MAX)

    def _fence(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            self.counters["fenced"] += 1
            text = f"the grant is of incarnation {incarnation}, this is {self._incarnation}"
            raise RemoteFailed("stale_incarnation", text)

    async def _changed(self, keys: Sequence[PageKey], until_s: float) -> bool:
        return await changed(self._directory.watches, keys, until_s) and not self.closed

    def _bytes_of(self, grant: Grant) -> PageBytes:
        slot = grant.slot
        page = self._view[slot.offset : slot.offset + slot.nbytes]
        return PageBytes(grant.spec, page, grant.num_tokens)


async def _at_once() -> bool:
    """There is no SSD to wait for."""
    return True
