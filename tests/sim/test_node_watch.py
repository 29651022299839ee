"""What a node says in its answers is judged: a lie of any kind is told, and under its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.messages import (
    AbortPages,
    AcquirePages,
    CommitPages,
    CommitStatus,
    LeasedPage,
    LeasesRenewed,
    OfferedPage,
    OpenStore,
    PageCommit,
    PageGrant,
    PagesAcquired,
    PagesCommitted,
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
    WriteGrant,
)
from kvstore.replication.messages import CopiesTaken, CopyStatus, TakeCopies
from kvstore.store import PageRecord, PutPolicy
from tests.sim.book import SPEC, content, prompt
from tests.sim.checkers import StoreChecks
from tests.sim.node_watch import NodeWatch
from transfer.channel import Caller
from transfer.identity import Identity, Incarnation, NodeId, Role

NODE, LIFE, FORMER = "store-1", "life-2", "life-1"
LEASE_S = 5.0
PAGE = prompt("watched", tuple(range(SPEC.page_size)))[0]
RECORD = PageRecord(
    key=PAGE.key,
    parent=PAGE.parent,
    depth=PAGE.depth,
    tokens=PAGE.tokens,
    checksum=bytes(16),
    page_nbytes=SPEC.page_nbytes,
)
OFFER = TakePages(spec=SPEC, read_token=b"", pages=(OfferedPage(PAGE, 0, bytes(16)),))
COPIES = TakeCopies(
    spec=SPEC,
    policy=PutPolicy(),
    read_token=b"",
    lease_s=LEASE_S,
    pages=(LeasedPage(RECORD, 0, 7),),
)
RESERVE = ReservePages(spec=SPEC, pages=(PAGE,))


class Watched:
    """A node of one slot, which holds the right bytes, and its watch."""

    def __init__(self) -> None:
        self.loop = SimpleNamespace(failures=[])
        self.watch = NodeWatch(
            NODE,
            StoreChecks(cast("Any", self.loop)),
            view=lambda: memoryview(bytes(content(PAGE.key, SPEC.page_nbytes))),
            on_ssd=lambda key: False,
            book={PAGE.key: PAGE},
            hooks={},
        )
        self.hears(OpenStore(), StoreOpened(incarnation=LIFE, read_token=b"", write_token=b""))

    def hears(self, message: Any, reply: Any, *, by: str = "client-1", asked_s: float = 0.0) -> Any:
        """``message`` was answered; returns the names of the checkers that are broken so far."""
        identity = Identity(
            node_id=NodeId(by), role=Role.OBSERVER, incarnation=Incarnation(f"life-of-{by}")
        )
        self.watch.asked(message)
        self.watch.answered(message, Caller(identity, 1e9), reply, asked_s)
        return self.broken

    @property
    def broken(self) -> list[str]:
        return [failure.checker for failure in self.loop.failures]

    def reserves(self, generation: int, status: ReserveStatus = ReserveStatus.GRANTED) -> Any:
        grants = (WriteGrant(status, 0, generation),)
        return self.hears(RESERVE, PagesReserved(incarnation=LIFE, lease_s=LEASE_S, grants=grants))

    def commits(self, generation: int, status: CommitStatus, *, by: str = NODE) -> Any:
        commit = CommitPages(incarnation=LIFE, pages=(PageCommit(PAGE.key, generation, bytes(16)),))
        return self.hears(commit, PagesCommitted((status,)), by=by)

    def leases(self, lease_id: int, generation: int) -> Any:
        reply = PagesAcquired(
            incarnation=LIFE,
            lease_id=lease_id,
            lease_s=LEASE_S,
            pages=(LeasedPage(RECORD, 0, generation),),
        )
        return self.hears(AcquirePages(keys=(PAGE.key,)), reply)


@pytest.fixture
async def node() -> Watched:
    return Watched()


TAKEN = [
    pytest.param(OFFER, PagesTaken((TakeStatus.TAKEN,)), id="offered"),
    pytest.param(COPIES, CopiesTaken((CopyStatus.TAKEN,)), id="copied"),
]
PRESENT = [
    pytest.param(OFFER, PagesTaken((TakeStatus.PRESENT,)), id="offered"),
    pytest.param(COPIES, CopiesTaken((CopyStatus.PRESENT,)), id="copied"),
    pytest.param(
        RESERVE,
        PagesReserved(
            incarnation=LIFE, lease_s=LEASE_S, grants=(WriteGrant(ReserveStatus.PRESENT),)
        ),
        id="reserved",
    ),
]


@pytest.mark.parametrize(("message", "reply"), TAKEN)
@pytest.mark.parametrize("status", [CommitStatus.STALE, CommitStatus.TORN])
async def test_what_was_not_committed_has_not_been_taken(
    node: Watched, message: Any, reply: Any, status: CommitStatus
) -> None:
    node.reserves(1)
    assert node.commits(1, status) == []
    assert node.hears(message, reply) == ["visibility"]


@pytest.mark.parametrize(("message", "reply"), TAKEN)
async def test_what_was_committed_has_been_taken_once(
    node: Watched, message: Any, reply: Any
) -> None:
    node.reserves(1)
    node.commits(1, CommitStatus.READY)
    assert node.hears(message, reply) == []
    later_s = node.watch._taken_s[PAGE.key] + 1.0
    assert node.hears(message, reply, asked_s=later_s) == ["visibility"], "that was another take"


@pytest.mark.parametrize(("message", "reply"), TAKEN)
async def test_what_a_writer_has_committed_was_not_taken_by_the_node(
    node: Watched, message: Any, reply: Any
) -> None:
    node.reserves(1)
    node.commits(1, CommitStatus.READY, by="client-2")
    assert node.hears(message, reply) == ["visibility"]


@pytest.mark.parametrize(("message", "reply"), PRESENT)
async def test_only_what_was_committed_is_present(node: Watched, message: Any, reply: Any) -> None:
    assert node.hears(message, reply) == ["visibility"]
    node.reserves(1)
    node.commits(1, CommitStatus.READY)
    assert node.hears(message, reply) == ["visibility"], "no more than before"


FOREIGN = [
    (ReleasePages(incarnation=FORMER, lease_id=1), StoreDone()),
    (
        RenewLeases(incarnation=FORMER, lease_ids=(1,)),
        LeasesRenewed(lease_s=LEASE_S, leases=(True,), writes=()),
    ),
    (
        AbortPages(incarnation=FORMER, pages=(PageGrant(PAGE.key, 9),), quiet=True),
        StoreDone(),
    ),
    (
        CommitPages(incarnation=FORMER, pages=(PageCommit(PAGE.key, 9, bytes(16)),)),
        PagesCommitted((CommitStatus.STALE,)),
    ),
]


@pytest.mark.parametrize(("message", "reply"), FOREIGN, ids=lambda one: type(one).__name__)
async def test_what_is_asked_of_another_incarnation_must_not_be_answered(
    node: Watched, message: Any, reply: Any
) -> None:
    assert node.hears(message, reply) == ["fencing"]


async def test_what_was_asked_before_the_node_became_another_may_be_answered_after(
    node: Watched,
) -> None:
    release = ReleasePages(incarnation=LIFE, lease_id=1)
    opened = StoreOpened(incarnation="life-3", read_token=b"", write_token=b"")
    node.hears(OpenStore(), opened)
    ended_s = node.watch._ended_s[LIFE]
    assert node.hears(release, StoreDone(), asked_s=ended_s) == []
    assert node.hears(release, StoreDone(), asked_s=ended_s + 1.0) == ["fencing"]


async def test_a_release_or_renewal_of_another_incarnation_leaves_a_lease_as_it_was(
    node: Watched,
) -> None:
    node.reserves(1)
    node.commits(1, CommitStatus.READY)
    assert node.leases(1, 1) == []
    lease = node.watch._leases[1]
    for message, reply in FOREIGN[:2]:
        node.hears(message, reply, asked_s=lease.until_s)
        assert node.watch._leases == {1: lease}
    asking = AcquirePages(keys=(), first=ReleasePages(incarnation=FORMER, lease_id=1))
    node.watch.asked(asking)
    node.loop.failures.clear()
    assert "lease safety" in node.reserves(2), "the memory is a reader's"


@pytest.mark.parametrize("as_first", [False, True])
async def test_a_release_of_this_incarnation_ends_a_lease(node: Watched, as_first: bool) -> None:
    node.reserves(1)
    node.commits(1, CommitStatus.READY)
    node.leases(1, 1)
    release = ReleasePages(incarnation=LIFE, lease_id=1)
    node.watch.asked(AcquirePages(keys=(), first=release) if as_first else release)
    assert node.reserves(2) == []
