"""Scripts about pages that a node reads for itself: takes and copies, and releases on the way.

Owns scripts that both a named scenario and a planted bug play. In each, a slot or a lease changes
hands while somebody is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore.client.link import StoreLink
from kvstore.messages import (
    AbortPages,
    AcquirePages,
    CommitPages,
    LeasesRenewed,
    PageCommit,
    PageGrant,
    PagesAcquired,
    PagesCommitted,
    ReleasePages,
    RenewLeases,
    StoreDone,
)
from kvstore.replication.messages import TakeCopies
from kvstore.store import GetOutcome, PageIdentity, PutOutcome
from tests.sim.book import SPEC
from tests.sim.faults import FaultPlan
from tests.sim.scripts import begin, done, pages_on
from tests.sim.store_world import CLIENTS, CONFIG, STORES, StoreWorld
from transfer.errors import RemoteFailed
from transfer.interface import deadline_after

WRITER, READER, RIVAL = CLIENTS
STORE = STORES[0]
NUM_READ = 3  # pages that a node reads at one time
NUM_SLOTS = 3 * NUM_READ  # of each node
LATE = FaultPlan(silent_crash=0.0, late_read=1.0)
TIGHT = CONFIG.model_copy(
    update={
        "segment_nbytes": NUM_SLOTS * SPEC.page_nbytes,
        "lease_s": 0.5,
        "lease_grace_s": 0.1,
        "high_watermark": 1.0,
        "low_watermark": 1.0,
    }
)
TIGHT_PAIRS = TIGHT.model_copy(update={"replicas": 2})
SLOW_BYTES_PER_S = 1500.0  # a read takes longer than a node waits for it
STILL_S = 0.9  # longer than a reservation, shorter than a heartbeat may be late
LATE_COMMIT_S = 0.7  # longer than a reservation, shorter than a writer waits for a node

Foreign = Callable[[StoreLink, ReleasePages], Coroutine[Any, Any, None]]  # sends it


async def a_store_stands_still_in_a_take(world: StoreWorld) -> None:
    """Its reservation ends meanwhile, and a rival asks for the slots in the first moment after."""
    pages = pages_on(world, STORE, NUM_READ + NUM_SLOTS)
    mine, theirs = pages[:NUM_READ], pages[NUM_READ:]
    world.cluster.slow_down(WRITER, SLOW_BYTES_PER_S)
    first = begin(world, WRITER, world.put(WRITER, mine, timeout_s=8))
    await _stand_still(world, STORE)
    second = begin(world, RIVAL, world.put(RIVAL, theirs, timeout_s=8))
    await asyncio.sleep(0.1)
    world.cluster.resume(STORE)
    await asyncio.gather(first, second)
    await _nothing_is_wrong(world, [*mine, *theirs])


async def a_store_stands_still_in_a_copy(world: StoreWorld) -> None:
    """Likewise, while it reads copies from another store."""
    mine, target = _copied_pages(world)

    async def slow(store: str, message: Any) -> None:
        world.cluster.slow_down(STORE, SLOW_BYTES_PER_S)

    world.hooks[TakeCopies] = slow
    first = begin(world, WRITER, world.put(WRITER, mine, timeout_s=8))
    await _stand_still(world, target)
    world.hooks.clear()
    theirs = pages_on(world, target, NUM_SLOTS)
    second = begin(world, RIVAL, world.put(RIVAL, theirs, timeout_s=8))
    await asyncio.sleep(0.1)
    world.cluster.resume(target)
    await asyncio.gather(first, second)
    await _nothing_is_wrong(world, [*mine, *theirs])


async def a_reservation_ends_before_its_bytes_are_committed(world: StoreWorld) -> None:
    """The store stands still when it has read them; its writer waits for longer than that."""
    pages = pages_on(world, STORE, NUM_READ)
    commits: list[Any] = []

    async def stand_still(store: str, message: Any) -> None:
        world.hooks.clear()
        commits.append(message)
        world.cluster.pause(store)
        await asyncio.sleep(TIGHT.tick_s)  # what is due meanwhile comes first: reservations end

    world.hooks[CommitPages] = stand_still
    putting = begin(world, WRITER, world.put(WRITER, pages, timeout_s=8))
    await world.cluster.until(lambda: bool(commits), timeout_s=1)
    await asyncio.sleep(LATE_COMMIT_S)
    world.cluster.resume(STORE)
    assert {*await putting} == {PutOutcome.STORED}
    assert world.nodes[STORE].numbers()["stale_commits"] == NUM_READ
    assert {*await done(world, READER, world.get(READER, pages))} == {GetOutcome.READ}


def _copied_pages(world: StoreWorld) -> tuple[list[PageIdentity], str]:
    """Pages of ``STORE`` that belong on one other node, too, and that node."""
    placement = world.clients[WRITER].links._all.placement
    mine = pages_on(world, STORE, 24)
    ranks = placement.ranks([page.key for page in mine], 2)[:, 1].tolist()
    target = str(placement.node_ids[ranks[0]])
    pages = [p for p, rank in zip(mine, ranks, strict=True) if rank == ranks[0]]
    return pages[:NUM_READ], target


async def _stand_still(world: StoreWorld, store: str) -> None:
    """Once ``store`` reads, for longer than its reservations last; it still does."""
    node = world.nodes[store]
    await world.cluster.until(lambda: node.numbers()["num_writing"] > 0, timeout_s=1)
    await asyncio.sleep(0.05)
    assert node.numbers()["num_writing"] > 0
    world.cluster.pause(store)
    await asyncio.sleep(STILL_S)


async def _nothing_is_wrong(world: StoreWorld, pages: list[PageIdentity]) -> None:
    """The slots were few: pages are there, whole, or they are not."""
    world.cluster.fabric.bulk_limits.clear()
    read = await done(world, READER, world.get(READER, pages, timeout_s=8))
    assert {*read} <= {GetOutcome.READ, GetOutcome.ABSENT}, read


async def a_foreign_release_comes_with_a_request(world: StoreWorld) -> None:
    """It is ignored, and the request is answered."""

    async def ask(link: StoreLink, ended: ReleasePages) -> None:
        message = AcquirePages(keys=(pages_on(world, STORE, 4)[3].key,), first=ended)
        await link.call(message, PagesAcquired, deadline_s=deadline_after(2))

    await _foreign_release(world, ask)


async def a_foreign_release_comes_by_itself(world: StoreWorld) -> None:
    """It is refused, and so is all else that is asked of the former life."""
    refused: list[str] = []

    async def ask(link: StoreLink, message: Any, reply: type[Any]) -> None:
        try:
            await link.call(message, reply, deadline_s=deadline_after(2))
        except RemoteFailed as error:
            refused.append(error.code)

    async def send(link: StoreLink, ended: ReleasePages) -> None:
        life, key = ended.incarnation, pages_on(world, STORE, 1)[0].key
        await ask(link, ended, StoreDone)
        renewal = RenewLeases(incarnation=life, lease_ids=(ended.lease_id,), writes=())
        await ask(link, renewal, LeasesRenewed)
        commit = CommitPages(incarnation=life, pages=(PageCommit(key, 1, bytes(16)),))
        await ask(link, commit, PagesCommitted)
        abort = AbortPages(incarnation=life, pages=(PageGrant(key, 1),), quiet=True)
        await ask(link, abort, StoreDone)

    await _foreign_release(world, send)
    assert refused == ["stale_incarnation"] * 4


async def _foreign_release(world: StoreWorld, send: Foreign) -> None:
    """A release of a former life of the node names a lease that now is somebody else's."""
    ended = await _lost_release(world)
    await world.restart(STORE)
    life = world.nodes[STORE].identity.incarnation
    await world.cluster.until(lambda: all(_sees(world, c, life) for c in CLIENTS), timeout_s=10)
    await world.settle()
    pages = pages_on(world, STORE, 40)
    wanted, others = pages[:3], pages[3:]
    await done(world, WRITER, world.put(WRITER, wanted))
    world.cluster.slow_down(READER, 500.0)
    reading = begin(world, READER, world.get(READER, wanted, timeout_s=30))
    leases = world.nodes[STORE]._directory._reading._leases
    await world.cluster.until(lambda: len(leases) > 0, timeout_s=1)
    assert [lease.lease_id for lease in leases] == [ended.lease_id], "the new life counts anew"
    link = next(k for k in world.clients[RIVAL].links.all() if k.node_id == STORE)
    await done(world, RIVAL, send(link, ended))
    for start in range(0, 20, 5):
        await done(world, RIVAL, world.put(RIVAL, others[start : start + 5]))
    assert {*await reading} == {GetOutcome.READ}


def _sees(world: StoreWorld, client: str, incarnation: str) -> bool:
    """The client knows this life of ``STORE``."""
    links = world.clients[client].links.all()
    return any(link.info.identity.incarnation == incarnation for link in links)


async def _lost_release(world: StoreWorld) -> ReleasePages:
    """Read a page; the release of the lease never arrives."""
    lost: list[Any] = []

    async def lose(store: str, message: Any) -> None:
        lost.append(message)
        await asyncio.Event().wait()

    world.hooks[ReleasePages] = lose
    page = pages_on(world, STORE, 1)
    await done(world, WRITER, world.put(WRITER, page))
    assert await done(world, READER, world.get(READER, page)) == [GetOutcome.READ]
    await world.cluster.until(lambda: bool(lost), timeout_s=1)
    world.hooks.clear()
    release: ReleasePages = lost[0]
    return release
