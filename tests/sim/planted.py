"""Bugs planted on purpose in the store, to see whether the simulation finds them.

Owns small changes of the product's own code, each of a kind that a hurried change could make. A bug
names the checkers that may report it: the node's own books are not asked, a directory that is
wrong and consistent must be found out all the same.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from kvstore.checksum import PageBytes
from kvstore.client.lease import Lease as ClientLease
from kvstore.messages import CommitStatus, HoldSession, ReleasePages, StoreDone, TakeStatus
from kvstore.page import PageKey
from kvstore.replication import Replicator
from kvstore.replication.messages import CopyStatus
from kvstore.server.admission import Admission
from kvstore.server.directory import Directory
from kvstore.server.entry import Grant, Lease
from kvstore.server.handlers import StoreHandlers
from kvstore.server.leases import Leases
from kvstore.server.page_table import READY, WRITING
from kvstore.server.reading import Reading
from kvstore.server.sessions import Sessions
from kvstore.server.writes import Writes
from tests.sim.checkers import Violation
from tests.sim.faults import FaultPlan
from tests.sim.harness import Scenario, run_sim
from tests.sim.scripts import CALM, OFFERS, scenario_of
from tests.sim.store_world import CONFIG
from tests.sim.take_scripts import (
    LATE,
    TIGHT,
    TIGHT_PAIRS,
    a_foreign_release_comes_by_itself,
    a_foreign_release_comes_with_a_request,
    a_reservation_ends_before_its_bytes_are_committed,
    a_store_stands_still_in_a_copy,
    a_store_stands_still_in_a_take,
)
from transfer.channel import Caller

Patches = Callable[[], Sequence[Any]]


class Bug(NamedTuple):
    """A planted bug.

    Attributes:
        plant: makes the changes. found_by: checkers that may report it. num_seeds: by when.
        scenario, plan: where to look, if not under random faults.
    """

    plant: Patches
    found_by: tuple[str, ...]
    num_seeds: int
    scenario: Scenario | None = None
    plan: FaultPlan | None = None


class Found(NamedTuple):
    """Where a bug was found."""

    seed: int
    checker: str
    what: str


def find(bug: Bug, scenario: Scenario) -> Found | None:
    """Run seeds until a checker reports the bug; None when none does."""
    for seed in range(bug.num_seeds):
        try:
            with planted(bug), mock.patch("tests.sim.checkers.CHECK_EVERY", 1 << 60):
                run_sim(bug.scenario or scenario, seed, bug.plan)
        except Violation as violation:
            return Found(seed, violation.checker, str(violation))
    return None


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    patches = bug.plant()
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


# ---- skip the checksum


class _AnyDigest(bytes):
    """Equals every digest."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


async def _unhashed(pages: Sequence[PageBytes]) -> list[bytes]:
    return [_AnyDigest(16) for _ in pages]


def _unhashed_now(pages: Sequence[PageBytes]) -> list[bytes]:
    return [_AnyDigest(16) for _ in pages]


def _reader_skips_the_checksum() -> Sequence[Any]:
    return [mock.patch("kvstore.client.pulling.checksums", _unhashed)]


def _node_skips_the_checksum() -> Sequence[Any]:
    return [
        mock.patch("kvstore.server.handlers.checksums", _unhashed),
        mock.patch("kvstore.server.handlers.checksums_now", _unhashed_now),
    ]


# ---- ignore the generation


def _ignores_generation() -> Sequence[Any]:
    def writing(self: Admission, key: PageKey, generation: int) -> int:
        row = self._table.find(key)
        return row if row and self._table.state[row] == WRITING else 0

    find_exactly = Directory.find

    def find_any(self: Directory, key: PageKey, generation: int) -> Grant | None:
        row = self._table.find(key)
        return find_exactly(self, key, self._table.generation[row] if row else generation)

    return [
        mock.patch.object(Admission, "_writing", writing),
        mock.patch.object(Directory, "find", find_any),
    ]


# ---- serve what was not committed


class _Either(int):
    """READY, and equal to WRITING too."""

    def __eq__(self, other: object) -> bool:
        return other in (int(READY), int(WRITING))

    __hash__ = int.__hash__


def _serves_uncommitted() -> Sequence[Any]:
    acquire = Reading.acquire

    def acquire_any(self: Reading, *args: Any, **kwargs: Any) -> Lease | None:
        with mock.patch("kvstore.server.reading.READY", _Either(READY)):
            return acquire(self, *args, **kwargs)

    return [mock.patch.object(Reading, "acquire", acquire_any)]


# ---- evict what is leased


def _evicts_leased() -> Sequence[Any]:
    acquire = Reading.acquire

    def acquire_without_hold(self: Reading, *args: Any, **kwargs: Any) -> Lease | None:
        lease = acquire(self, *args, **kwargs)
        for row in lease.rows if lease is not None else ():
            self._ledger.unhold(row)
        return lease

    return [
        mock.patch.object(Reading, "acquire", acquire_without_hold),
        mock.patch.object(Reading, "_let_go", return_value=None),
    ]


# ---- forget to renew


def _client_forgets_to_renew() -> Sequence[Any]:
    return [mock.patch.object(ClientLease, "_renew_later", return_value=None)]


def _node_forgets_what_it_renewed() -> Sequence[Any]:
    def renew(self: Leases, lease_id: int, now_s: float) -> bool:
        return lease_id in self._leases

    return [mock.patch.object(Leases, "renew", renew)]


# ---- some more


def _frees_at_once_what_a_broken_writer_had() -> Sequence[Any]:
    abort = Admission.abort

    def quiet(self: Admission, key: PageKey, generation: int, *, quiet: bool) -> bool:
        return abort(self, key, generation, quiet=True)

    return [mock.patch.object(Admission, "abort", quiet)]


def _never_ends_a_reservation() -> Sequence[Any]:
    return [mock.patch.object(Writes, "expire", return_value=[])]


def _forgets_to_copy() -> Sequence[Any]:
    return [mock.patch.object(Replicator, "committed", return_value=None)]


def _take_does_not_hold_its_slot() -> Sequence[Any]:
    return [mock.patch.object(Directory, "hold", return_value=None)]


def _first_ignores_the_incarnation() -> Sequence[Any]:
    def end_first(self: StoreHandlers, ended: ReleasePages | None) -> None:
        if ended is not None:
            self._end_leases(ended)

    return [mock.patch.object(StoreHandlers, "_end_first", end_first)]


def _ignores_the_incarnation(handler: str) -> Sequence[Any]:
    """The handler does, and no other one."""
    handle = getattr(StoreHandlers, handler)

    def unfenced(self: StoreHandlers, message: Any, caller: Caller) -> Any:
        with mock.patch.object(StoreHandlers, "_fence", return_value=None):
            return handle(self, message, caller)

    return [mock.patch.object(StoreHandlers, handler, unfenced)]


# ---- say what is not so


def _torn_is_said_to_be_taken() -> Sequence[Any]:
    lie = {CommitStatus.TORN: TakeStatus.TAKEN}
    return [mock.patch.dict("kvstore.server.taking._OUTCOMES", lie)]


def _stale_is_said_to_be_taken() -> Sequence[Any]:
    lie = {CommitStatus.STALE: TakeStatus.TAKEN}
    return [mock.patch.dict("kvstore.server.taking._OUTCOMES", lie)]


def _torn_copy_is_said_to_be_taken() -> Sequence[Any]:
    lie = {CommitStatus.TORN: CopyStatus.TAKEN}
    return [mock.patch.dict("kvstore.replication.receiving._OUTCOMES", lie)]


def _no_session_is_held() -> Sequence[Any]:
    async def hold(
        self: Sessions, message: HoldSession, caller: Caller
    ) -> AsyncIterator[StoreDone]:
        raise KeyError(caller.peer.incarnation)
        yield StoreDone()

    return [mock.patch.object(Sessions, "hold", hold)]


FENCED_OFF = {
    "a release": "_release",
    "a renewal": "_renew",
    "a commit": "_commit",
    "an abort": "_abort",
}
BUGS = {
    "a reader skips the checksum": Bug(_reader_skips_the_checksum, ("integrity",), 40),
    "a node skips the checksum": Bug(_node_skips_the_checksum, ("visibility",), 40),
    "ignore generation": Bug(_ignores_generation, ("fencing",), 40),
    "serve uncommitted": Bug(_serves_uncommitted, ("visibility",), 40),
    "evict leased": Bug(_evicts_leased, ("lease safety",), 40),
    "a client forgets to renew": Bug(_client_forgets_to_renew, ("liveness",), 40),
    "a node forgets what it renewed": Bug(
        _node_forgets_what_it_renewed, ("lease safety", "liveness"), 40
    ),
    "free at once what a broken writer had": Bug(
        _frees_at_once_what_a_broken_writer_had, ("lease safety",), 40
    ),
    "never end a reservation": Bug(_never_ends_a_reservation, ("quiescence",), 40),
    "forget to copy": Bug(_forgets_to_copy, ("replicas",), 40),
    "a take does not hold its slot": Bug(
        _take_does_not_hold_its_slot,
        ("lease safety",),
        4,
        scenario_of(a_store_stands_still_in_a_take, TIGHT, client_config=OFFERS),
        LATE,
    ),
    "a copy does not hold its slot": Bug(
        _take_does_not_hold_its_slot,
        ("lease safety",),
        4,
        scenario_of(a_store_stands_still_in_a_copy, TIGHT_PAIRS),
        LATE,
    ),
    "first ignores the incarnation": Bug(
        _first_ignores_the_incarnation,
        ("lease safety",),
        4,
        scenario_of(a_foreign_release_comes_with_a_request, CONFIG),
        CALM,
    ),
    **{
        f"{what} ignores the incarnation": Bug(
            functools.partial(_ignores_the_incarnation, handler),
            ("fencing",),
            4,
            scenario_of(a_foreign_release_comes_by_itself, CONFIG),
            CALM,
        )
        for what, handler in FENCED_OFF.items()
    },
    "what has arrived torn is said to be taken": Bug(
        _torn_is_said_to_be_taken, ("visibility",), 40
    ),
    "a take that came too late is said to be taken": Bug(
        _stale_is_said_to_be_taken,
        ("visibility",),
        4,
        scenario_of(a_reservation_ends_before_its_bytes_are_committed, TIGHT, client_config=OFFERS),
        CALM,
    ),
    "a copy that has arrived torn is said to be taken": Bug(
        _torn_copy_is_said_to_be_taken, ("visibility",), 40
    ),
    "no session is held": Bug(_no_session_is_held, ("soundness",), 4),
}
