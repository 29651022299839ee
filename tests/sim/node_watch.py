"""What one life of one simulated store node has promised, as its messages and its reads show it.

Owns ``NodeWatch``: the visibility, fencing and lease-safety checkers of ``tests/sim/checkers.py``,
which it reports to. Knows nothing of the node's own books.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvstore.checksum import checksum_of
from kvstore.messages import (
    AbortPages,
    AcquirePages,
    CommitPages,
    CommitStatus,
    LeasedPage,
    LeasesRenewed,
    MatchPages,
    PagesAcquired,
    PagesCommitted,
    PagesMatched,
    PagesReserved,
    PagesTaken,
    ReleasePages,
    RenewLeases,
    ReservePages,
    ReserveStatus,
    StoreDone,
    StoreOpened,
    TakePages,
    TakeStatus,
    states_of,
    unpack_keys,
)
from kvstore.page import PageKey, PageSpec
from kvstore.replication.messages import CopiesTaken, CopyStatus, TakeCopies
from kvstore.store import PageIdentity
from kvstore.verify import same_identity
from tests.sim.book import content
from tests.sim.checkers import StoreChecks
from tests.sim.tap import Hook, tap
from transfer.channel import Caller, Service
from transfer.identity import Role
from transfer.interface import Range

Name = tuple[PageKey, int]  # key, generation
FENCED = (CommitPages, AbortPages, ReleasePages, RenewLeases)  # refused at another incarnation
TELLING = (StoreOpened, PagesReserved, PagesAcquired)  # at which one the node is


class _Grant(NamedTuple):
    """Memory named by one generation, and until when it is promised to a writer."""

    offset: int
    nbytes: int
    num_tokens: int
    until_s: float


class _ReadLease(NamedTuple):
    incarnation: str
    until_s: float
    pages: dict[int, tuple[int, int]]  # by generation: first and last byte + 1


class NodeWatch:
    """What one life of one node has promised.

    Args:
        view: the segment's memory. on_ssd: whether the tier of this life has known a key.
        book: identities by key, of all pages that clients use.
        hooks: awaited before a message of their type is handled, for scenarios.
    """

    def __init__(
        self,
        name: str,
        checks: StoreChecks,
        *,
        view: Callable[[], memoryview],
        on_ssd: Callable[[PageKey], bool],
        book: dict[PageKey, PageIdentity],
        hooks: dict[type, Hook],
    ) -> None:
        self.name = name
        self._checks = checks
        self._view = view
        self._on_ssd = on_ssd
        self._book = book
        self._hooks = hooks
        self._grants: dict[Name, _Grant] = {}
        self._latest: dict[PageKey, int] = {}
        self._ready: dict[Name, None] = {}
        self._committed: dict[PageKey, None] = {}
        self._taken_s: dict[PageKey, float] = {}  # when the node last committed what it had read
        self._writes: dict[Name, None] = {}  # grants under a writer's promise
        self._owners: dict[int, tuple[int, int]] = {}  # by first byte: last byte + 1, generation
        self._leases: dict[int, _ReadLease] = {}
        self._generations: dict[int, PageKey] = {}
        self._asker: Role | None = None  # of the message that has just been answered
        self._incarnation: str | None = None  # that the node has said it is
        self._ended_s: dict[str, float] = {}  # by incarnation that it was before: until when
        self._before: dict[type, Callable[[Any], None]] = {
            AbortPages: self._aborting,
            AcquirePages: self._acquiring,
            ReleasePages: self._releasing,
        }
        self._after: dict[type, Callable[[Any, Any, float], None]] = {
            ReservePages: self._reserved,
            CommitPages: self._committing,
            AbortPages: self._aborted,
            AcquirePages: self._acquired,
            RenewLeases: self._renewed,
            MatchPages: self._matched,
            TakePages: self._taken,
            TakeCopies: self._copied,
        }

    def add_to(self, service: Service) -> None:
        """Look at what the handlers of ``service`` are asked and answer."""
        tap(service, self, self._hooks)

    def asked(self, message: Any) -> None:
        look = self._before.get(type(message))
        if look is not None:
            look(message)

    def answered(self, message: Any, caller: Caller, reply: Any, started_s: float) -> None:
        if type(reply) in TELLING:
            self._told(reply.incarnation)
        elif type(message) in FENCED:
            self._fenced(message, started_s)
        look = self._after.get(type(message))
        if look is not None:
            self._asker = caller.peer.role
            look(message, reply, started_s)
        if type(reply) is PagesCommitted and caller.peer.node_id == self.name:
            self._own_writes_end(message, reply)

    def failed(self, message: Any, error: BaseException) -> None:
        self._checks.report("soundness", f"{self.name}: {message!r:.200}: {error!r}")

    def _require(self, condition: bool, checker: str, *what: object) -> None:
        """``what`` is put into words only when it is said: this is asked by the million."""
        if not condition:
            self._broken(checker, *what)

    def _broken(self, checker: str, *what: object) -> None:
        self._checks.report(checker, " ".join([f"{self.name}:", *map(str, what)]))

    # ---- incarnations

    def _told(self, incarnation: str) -> None:
        if incarnation == self._incarnation:
            return
        if self._incarnation is not None:
            self._ended_s[self._incarnation] = _now_s()
        self._incarnation = incarnation

    def _fenced(self, message: Any, started_s: float) -> None:
        """What was asked of another incarnation is refused, whatever it was: it is not answered."""
        named = message.incarnation
        now = named == self._incarnation or self._ended_s.get(named, -1.0) >= started_s
        self._require(now, "fencing", "answered at", self._incarnation, "to", message)

    # ---- writers

    def _reserved(self, message: ReservePages, reply: PagesReserved, started_s: float) -> None:
        nbytes = message.spec.page_nbytes
        for page, grant in zip(message.pages, reply.grants, strict=True):
            if grant.status is ReserveStatus.PRESENT:
                self._require_present(page.key)
            if grant.status is not ReserveStatus.GRANTED:
                continue
            generation = grant.generation
            fresh = generation not in self._generations
            self._require(fresh, "fencing", "granted twice:", generation)
            self._claim(grant.offset, nbytes, generation)
            name = (page.key, generation)
            until_s = started_s + reply.lease_s
            self._grants[name] = _Grant(grant.offset, nbytes, page.num_tokens, until_s)
            self._latest[page.key] = generation
            self._generations[generation] = page.key
            self._writes[name] = None

    def reading_into(self, ranges: Sequence[Range]) -> Callable[[Range], None]:
        """The node begins to read into its own memory: what arrives belongs to who owns it now."""
        before = [owner for r in ranges for owner in self._owners_of(r)]

        def landed(piece: Range) -> None:
            for owner in self._owners_of(piece):
                self._require(owner in before, "lease safety", "read into what is", owner, "now")

        return landed

    def _owners_of(self, r: Range) -> list[tuple[int, int, int]]:
        """First byte, last byte + 1 and generation of the slots that a range touches."""
        start, stop = r.local_offset, r.local_offset + r.nbytes
        items = self._owners.items()
        return [(a, b, g) for a, (b, g) in items if a < stop and start < b]

    def _claim(self, offset: int, nbytes: int, generation: int) -> None:
        """This memory is one holder's now: nobody else may be promised it."""
        now_s, end = _now_s(), offset + nbytes
        for start, *_ in self._owners_of(Range(0, offset, nbytes)):
            del self._owners[start]
        self._owners[offset] = end, generation
        for name in list(self._writes):
            grant = self._grants[name]
            if grant.until_s <= now_s:
                del self._writes[name]
            elif (
                name[1] != generation
                and grant.offset < end
                and offset < grant.offset + grant.nbytes
            ):
                self._broken("lease safety", "granted again, but a writer's:", grant)
        for lease_id, lease in list(self._leases.items()):
            if lease.until_s <= now_s:
                del self._leases[lease_id]
                continue
            for other, (start, stop) in lease.pages.items():
                if other != generation and start < end and offset < stop:
                    self._broken("lease safety", "granted again, but leased:", offset, lease)

    def _committing(self, message: CommitPages, reply: PagesCommitted, started_s: float) -> None:
        for page, status in zip(message.pages, reply.statuses, strict=True):
            name = (page.key, page.generation)
            if status is CommitStatus.TORN and self._asker is Role.STORE:
                self._writes.pop(name, None)  # the node's own read has ended: nothing comes late
            if status is not CommitStatus.READY:
                continue
            current = self._latest.get(page.key) == page.generation and name in self._grants
            self._require(current, "fencing", "a commit by an old name:", page)
            self._require(name not in self._ready, "fencing", "a second commit of", page)
            self._ready[name] = self._committed[page.key] = None
            self._writes.pop(name, None)
            if not current:
                continue
            grant = self._grants[name]
            whole = self._holds(page.key, grant.offset, grant.nbytes, grant.num_tokens)
            self._require(whole, "visibility", "committed without the bytes of", page)

    def _own_writes_end(self, message: CommitPages, reply: PagesCommitted) -> None:
        """The node itself read what it commits: no byte of it is late, whatever became of it."""
        for page, status in zip(message.pages, reply.statuses, strict=True):
            self._writes.pop((page.key, page.generation), None)
            if status is CommitStatus.READY:
                self._taken_s[page.key] = _now_s()

    def _taken(self, message: TakePages, reply: PagesTaken, started_s: float) -> None:
        for page, status in zip(message.pages, reply.statuses, strict=True):
            if status is TakeStatus.TAKEN:
                self._require_taken(page.identity.key, started_s)
            elif status is TakeStatus.PRESENT:
                self._require_present(page.identity.key)

    def _copied(self, message: TakeCopies, reply: CopiesTaken, started_s: float) -> None:
        for page, status in zip(message.pages, reply.statuses, strict=True):
            if status is CopyStatus.TAKEN:
                self._require_taken(page.record.key, started_s)
            elif status is CopyStatus.PRESENT:
                self._require_present(page.record.key)

    def _require_taken(self, key: PageKey, started_s: float) -> None:
        taken = self._taken_s.get(key, -1.0) >= started_s
        self._require(taken, "visibility", "taken but not committed:", key.hex())

    def _require_present(self, key: PageKey) -> None:
        present = key in self._committed or self._on_ssd(key)
        self._require(present, "visibility", "present but never committed:", key.hex())

    def _holds(self, key: PageKey, offset: int, nbytes: int, num_tokens: int) -> bool:
        page = self._view()[offset : offset + nbytes]
        wanted = content(key, nbytes)
        if page == wanted:
            return True
        spec = _spec_of(nbytes)
        return checksum_of(spec, page, num_tokens) == checksum_of(
            spec, memoryview(wanted), num_tokens
        )

    def _aborting(self, message: AbortPages) -> None:
        if message.quiet:  # else the slot is the writer's until its time is over
            for page in message.pages:
                self._writes.pop((page.key, page.generation), None)

    def _aborted(self, message: AbortPages, reply: StoreDone, started_s: float) -> None:
        names = [(page.key, page.generation) for page in message.pages]
        good = [n for n in names if self._latest.get(n[0]) == n[1] and n not in self._ready]
        self._require(reply.count <= len(good), "fencing", "an abort by an old name:", names)

    # ---- readers

    def _acquiring(self, message: AcquirePages) -> None:
        if message.first is not None:
            self._releasing(message.first)

    def _acquired(self, message: AcquirePages, reply: PagesAcquired, started_s: float) -> None:
        if not reply.pages:
            return
        for page in reply.pages:
            self._lease_page(page)
        pages = {p.generation: (p.offset, p.offset + p.record.page_nbytes) for p in reply.pages}
        until_s = _now_s() + reply.lease_s
        new = reply.lease_id not in self._leases
        self._require(new, "fencing", "a lease granted twice:", reply.lease_id)
        self._leases[reply.lease_id] = _ReadLease(reply.incarnation, until_s, pages)

    def _lease_page(self, page: LeasedPage) -> None:
        key = page.record.key
        name = (key, page.generation)
        if name not in self._ready:
            promoted = page.generation not in self._generations and self._on_ssd(key)
            self._require(promoted, "visibility", "leased but never committed:", page)
            self._ready[name] = None
            self._generations[page.generation] = key
            self._latest[key] = page.generation
        self._claim(page.offset, page.record.page_nbytes, page.generation)
        identity = self._book.get(key)
        same = identity is None or same_identity(page.record, identity)
        self._require(same, "visibility", "a record of other tokens:", page.record)

    def _releasing(self, message: ReleasePages) -> None:
        for lease_id in (message.lease_id, *message.others):
            if self._lease_of(message.incarnation, lease_id) is not None:
                del self._leases[lease_id]

    def _lease_of(self, incarnation: str, lease_id: int) -> _ReadLease | None:
        """A number names another lease at another incarnation."""
        lease = self._leases.get(lease_id)
        return None if lease is None or lease.incarnation != incarnation else lease

    def _renewed(self, message: RenewLeases, reply: LeasesRenewed, started_s: float) -> None:
        until_s = started_s + reply.lease_s
        for lease_id, renewed in zip(message.lease_ids, reply.leases, strict=True):
            lease = self._lease_of(message.incarnation, lease_id)
            if renewed and lease is not None:
                self._leases[lease_id] = lease._replace(until_s=until_s)
        for page, renewed in zip(message.writes, reply.writes, strict=True):
            name = (page.key, page.generation)
            self._require(not renewed or name in self._grants, "fencing", "renewed:", page)
            if renewed and name in self._grants:
                self._grants[name] = self._grants[name]._replace(until_s=until_s)

    def _matched(self, message: MatchPages, reply: PagesMatched, started_s: float) -> None:
        keys = unpack_keys(message.keys)
        for key, state in zip(keys, states_of(reply.codes), strict=True):
            if state.present and key not in self._committed:
                self._require(self._on_ssd(key), "visibility", f"{key.hex()} is {state}")


def _spec_of(page_nbytes: int) -> PageSpec:
    """The spec of the simulated pages of this size."""
    return PageSpec(
        num_layers=2, num_kv_heads=2, head_dim=16, page_size=page_nbytes // 128, dtype="uint8"
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
