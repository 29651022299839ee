"""What must hold in a simulated store cluster whatever happens, checked from outside.

Owns ``StoreChecks`` (verdicts over all nodes and calls) and ``NodeWatch`` (what one life of one
node has promised). Both see messages and results only: a directory that keeps its books wrongly and
consistently is still found out. Each checker has a name; a broken one ends the run with it::

    integrity     what a reader was told it has READ are the bytes that belong to the key
    visibility    nothing is matched or leased that was not committed (or on the SSD), whole
    lease safety  memory promised to a reader or a writer is not granted to another meanwhile
    fencing       a commit or abort by an old name changes nothing; a name is never used twice
    conservation  the node's own books: free + writing + ready + owed = total
    completion    every call ends once, by its deadline, with one outcome for each page
    quiescence    when everybody has finished, no promise is left
    liveness      without faults everything works again
    replicas      what was stored on R nodes survives the loss of one
    soundness     no handler fails by an error of its own

Promises are counted as nodes state them, without the grace that nodes add for themselves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isawaitable
from typing import Any, NamedTuple, cast

import msgspec

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
    ReleasePages,
    RenewLeases,
    ReservePages,
    ReserveStatus,
    StoreDone,
    states_of,
    unpack_keys,
)
from kvstore.page import PageKey, PageSpec
from kvstore.store import PageIdentity
from kvstore.verify import same_identity
from tests.sim.book import content
from tests.sim.loop import CURRENT_LIFE, OUR_ERRORS, SimLoop
from transfer.channel import Caller, Service
from transfer.identity import Role

CHECK_EVERY = 40  # deliveries between two checks of one node's own books
LATE_S = 0.5  # how much later than its deadline a call may end: it waits for its own clean-up

Name = tuple[PageKey, int]  # key, generation
Handler = Callable[[Any, Caller], Any]  # its answer, or an awaitable of it
Hook = Callable[[str, Any], Awaitable[None]]


class Violation(AssertionError):
    """A checker was broken; ``checker`` is its name."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(f"{checker}: {what}")
        self.checker = checker


def require(condition: bool, checker: str, what: str) -> None:
    """Raise ``Violation`` unless ``condition``."""
    if not condition:
        raise Violation(checker, what)


class _Grant(NamedTuple):
    """Memory named by one generation, and until when it is promised to a writer."""

    offset: int
    nbytes: int
    num_tokens: int
    until_s: float


class _ReadLease(NamedTuple):
    until_s: float
    pages: dict[int, tuple[int, int]]  # by generation: first and last byte + 1


class StoreChecks:
    """The checkers of one run.

    Args:
        loop: a violation inside of a handler, which would answer it as an error, goes there.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.num_open = 0
        self.counts: Counter[str] = Counter()
        self._loop = loop
        self._nodes: dict[str, tuple[Callable[[], bool], Callable[[], None]]] = {}
        self._turn = 0

    def report(self, checker: str, what: str) -> None:
        """End the run, from where an exception would be answered or wrapped."""
        self._loop.failures.append(Violation(checker, what))

    # ---- conservation

    def follow(self, name: str, alive: Callable[[], bool], check: Callable[[], None]) -> None:
        """Check the books of this life of a node from now on."""
        self._nodes[name] = alive, check

    def after_delivery(self) -> None:
        """Check one node now and then, each in its turn: a broken book stays broken."""
        self._turn += 1
        number, rest = divmod(self._turn, CHECK_EVERY)
        if not rest and self._nodes:
            self._check(list(self._nodes)[number % len(self._nodes)])

    def check_all(self) -> None:
        for name in self._nodes:
            self._check(name)

    def _check(self, name: str) -> None:
        alive, check = self._nodes[name]
        if not alive():
            return
        try:
            check()
        except AssertionError as error:
            raise Violation("conservation", f"{name}: {error!r}") from error

    # ---- integrity and completion

    @contextmanager
    def call(self, what: str, deadline_s: float) -> Iterator[None]:
        """One call of a client; it must end by its deadline, unless its process stood still."""
        life = CURRENT_LIFE.get()
        num_pauses = life.num_pauses if life is not None else 0
        self.num_open += 1
        self.counts[what] += 1
        try:
            yield
        finally:
            self.num_open -= 1
            paused = life is not None and (life.num_pauses != num_pauses or life.paused)
            late_s = self._loop.time() - deadline_s
            if not paused and late_s > LATE_S:
                self.report("completion", f"{what} ended {late_s:.3f} s late")

    def finish(self) -> None:
        """The run is over: all calls have ended."""
        require(not self.num_open, "completion", f"{self.num_open} calls have not ended")
        self.check_all()


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
        self._name = name
        self._checks = checks
        self._view = view
        self._on_ssd = on_ssd
        self._book = book
        self._hooks = hooks
        self._grants: dict[Name, _Grant] = {}
        self._latest: dict[PageKey, int] = {}
        self._ready: dict[Name, None] = {}
        self._committed: dict[PageKey, None] = {}
        self._writes: dict[Name, None] = {}  # grants under a writer's promise
        self._leases: dict[int, _ReadLease] = {}
        self._generations: dict[int, PageKey] = {}
        self._asker: Role | None = None  # of the message that has just been answered
        self._incarnation = ""  # that the last leases are of

    def add_to(self, service: Service) -> None:
        """Look at what the handlers of ``service`` are asked and answer."""
        requests = cast(dict[type[msgspec.Struct], Handler], service.requests)
        watched = {
            ReservePages: (None, self._reserved),
            CommitPages: (None, self._committing),
            AbortPages: (self._aborting, self._aborted),
            AcquirePages: (self._acquiring, self._acquired),
            ReleasePages: (self._releasing, None),
            RenewLeases: (None, self._renewed),
            MatchPages: (None, self._matched),
        }
        for kind, handler in list(requests.items()):
            requests[kind] = self._between(handler, *watched.get(kind, (None, None)))
        cast(dict[type[msgspec.Struct], Any], service.prompt).clear()  # all go through ``requests``

    def _between(self, handler: Handler, before: Any, after: Any) -> Handler:
        async def watched(message: Any, caller: Caller) -> Any:
            hook = self._hooks.get(type(message))
            if hook is not None:
                await hook(self._name, message)
            started_s = _now_s()
            if before is not None:
                before(message)
            try:
                reply = handler(message, caller)
                if isawaitable(reply):
                    reply = await reply
            except OUR_ERRORS as error:  # would be answered as an internal error
                self._checks.report("soundness", f"{self._name}: {message!r:.200}: {error!r}")
                raise
            if after is not None:
                self._asker = caller.peer.role
                after(message, reply, started_s)
            if isinstance(reply, PagesCommitted) and caller.peer.node_id == self._name:
                self._own_writes_end(message)
            return reply

        return watched

    def _require(self, condition: bool, checker: str, what: str) -> None:
        if not condition:
            self._checks.report(checker, f"{self._name}: {what}")

    # ---- writers

    def _reserved(self, message: ReservePages, reply: PagesReserved, started_s: float) -> None:
        nbytes = message.spec.page_nbytes
        for page, grant in zip(message.pages, reply.grants, strict=True):
            if grant.status is not ReserveStatus.GRANTED:
                continue
            generation = grant.generation
            fresh = generation not in self._generations
            self._require(fresh, "fencing", f"generation {generation} was granted twice")
            self._claim(grant.offset, nbytes, generation)
            name = (page.key, generation)
            until_s = started_s + reply.lease_s
            self._grants[name] = _Grant(grant.offset, nbytes, page.num_tokens, until_s)
            self._latest[page.key] = generation
            self._generations[generation] = page.key
            self._writes[name] = None

    def _claim(self, offset: int, nbytes: int, generation: int) -> None:
        """This memory is one holder's now: nobody else may be promised it."""
        now_s, end = _now_s(), offset + nbytes
        for name in list(self._writes):
            grant = self._grants[name]
            if grant.until_s <= now_s:
                del self._writes[name]
            elif name[1] != generation and offset < grant.offset + grant.nbytes:
                free = end <= grant.offset
                self._require(free, "lease safety", f"a writer's {grant} was granted again")
        for lease_id, lease in list(self._leases.items()):
            if lease.until_s <= now_s:
                del self._leases[lease_id]
                continue
            for other, (start, stop) in lease.pages.items():
                free = other == generation or end <= start or stop <= offset
                self._require(free, "lease safety", f"{offset}+{nbytes} of {lease} granted again")

    def _committing(self, message: CommitPages, reply: PagesCommitted, started_s: float) -> None:
        for page, status in zip(message.pages, reply.statuses, strict=True):
            name = (page.key, page.generation)
            if status is CommitStatus.TORN and self._asker is Role.STORE:
                self._writes.pop(name, None)  # the node's own read has ended: nothing comes late
            if status is not CommitStatus.READY:
                continue
            current = self._latest.get(page.key) == page.generation and name in self._grants
            self._require(current, "fencing", f"a commit by an old name: {page}")
            self._require(name not in self._ready, "fencing", f"a second commit of {page}")
            self._ready[name] = self._committed[page.key] = None
            self._writes.pop(name, None)
            if not current:
                continue
            grant = self._grants[name]
            whole = self._holds(page.key, grant.offset, grant.nbytes, grant.num_tokens)
            self._require(whole, "visibility", f"committed without the bytes of {page.key.hex()}")

    def _own_writes_end(self, message: CommitPages) -> None:
        """The node itself read what it commits: no byte of it is late, whatever became of it."""
        for page in message.pages:
            self._writes.pop((page.key, page.generation), None)

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
        self._require(reply.count <= len(good), "fencing", f"an abort by an old name: {names}")

    # ---- readers

    def _acquiring(self, message: AcquirePages) -> None:
        if message.first is not None and message.first.incarnation == self._incarnation:
            self._releasing(message.first)

    def _acquired(self, message: AcquirePages, reply: PagesAcquired, started_s: float) -> None:
        if not reply.pages:
            return
        self._incarnation = reply.incarnation
        for page in reply.pages:
            self._lease_page(page)
        pages = {p.generation: (p.offset, p.offset + p.record.page_nbytes) for p in reply.pages}
        until_s = _now_s() + reply.lease_s
        new = reply.lease_id not in self._leases
        self._require(new, "fencing", f"lease {reply.lease_id} was granted twice")
        self._leases[reply.lease_id] = _ReadLease(until_s, pages)

    def _lease_page(self, page: LeasedPage) -> None:
        key = page.record.key
        name = (key, page.generation)
        if name not in self._ready:
            promoted = page.generation not in self._generations and self._on_ssd(key)
            self._require(promoted, "visibility", f"leased but never committed: {page}")
            self._ready[name] = None
            self._generations[page.generation] = key
            self._latest[key] = page.generation
        self._claim(page.offset, page.record.page_nbytes, page.generation)
        identity = self._book.get(key)
        same = identity is None or same_identity(page.record, identity)
        self._require(same, "visibility", f"a record of other tokens: {page.record}")

    def _releasing(self, message: ReleasePages) -> None:
        for lease_id in (message.lease_id, *message.others):
            self._leases.pop(lease_id, None)

    def _renewed(self, message: RenewLeases, reply: LeasesRenewed, started_s: float) -> None:
        until_s = started_s + reply.lease_s
        for lease_id, renewed in zip(message.lease_ids, reply.leases, strict=True):
            if renewed and lease_id in self._leases:
                self._leases[lease_id] = self._leases[lease_id]._replace(until_s=until_s)
        for page, renewed in zip(message.writes, reply.writes, strict=True):
            name = (page.key, page.generation)
            self._require(not renewed or name in self._grants, "fencing", f"renewed: {page}")
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


def check_quiet(name: str, numbers: dict[str, float], promises: Sequence[str]) -> None:
    """All work is done: nothing is promised to anybody."""
    for promise in promises:
        require(not numbers[promise], "quiescence", f"{name}: {promise}={numbers[promise]}")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
