"""Simulated bulk transfers under every fault: crash, pause, partition, corruption, late bytes.

That they keep the contract of ``transfer.interface`` when nothing goes wrong, and when engines
close or are held up, is in ``tests/transfer/test_contract.py``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.sim.bulk import SILENCE_S
from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, run_sim, seeds
from transfer.errors import (
    DeadlineExceeded,
    PeerLost,
    Stale,
    TransferError,
)
from transfer.interface import Range, Region, Transfer, deadline_after
from transfer.region import RegisteredRegion

NBYTES = 16384
ALL = [Range(0, 0, NBYTES)]
CALM = FaultPlan(silent_crash=1.0)

Body = Callable[[SimCluster], Coroutine[Any, Any, None]]


def simulate(body: Body, plan: FaultPlan = CALM, seed: int = 1) -> None:
    async def scenario(cluster: SimCluster) -> None:
        await body(cluster)
        cluster.crash_all()

    run_sim(scenario, seed, plan)


class Ends:
    """An owner with a region, a user with another, and an operation between them."""

    def __init__(self, cluster: SimCluster) -> None:
        self.owner, self.user = cluster.node("owner"), cluster.node("user")
        self.theirs: Region = self.owner.transfer.register(bytearray(b"T" * NBYTES))
        self.mine: Region = self.user.transfer.register(bytearray(b"M" * NBYTES))
        self.token = self.theirs.export("rw")

    async def read(self, timeout_s: float = 60.0) -> None:
        transfer: Transfer = self.user.transfer
        await transfer.read(self.token, ALL, into=self.mine, deadline_s=deadline_after(timeout_s))

    async def write(self, timeout_s: float = 60.0) -> None:
        transfer: Transfer = self.user.transfer
        await transfer.write(
            self.token, ALL, source=self.mine, deadline_s=deadline_after(timeout_s)
        )


def test_a_restarted_owner_makes_tokens_stale() -> None:
    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        cluster.restart("owner")
        with pytest.raises(Stale):
            await ends.user.run(ends.read())

    simulate(body)


@pytest.mark.parametrize("fault", ["crash", "pause", "block", "block_back"])
def test_a_silent_owner_ends_as_lost_or_by_the_deadline(fault: str) -> None:
    def strike(cluster: SimCluster) -> None:
        {
            "crash": lambda: cluster.crash("owner"),
            "pause": lambda: cluster.pause("owner"),
            "block": lambda: cluster.block("user", "owner"),
            "block_back": lambda: cluster.block("owner", "user"),
        }[fault]()

    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        strike(cluster)
        start_s = cluster.now_s
        with pytest.raises(DeadlineExceeded):
            await ends.user.run(ends.read(0.5))
        assert cluster.now_s - start_s == pytest.approx(0.5)
        start_s = cluster.now_s
        with pytest.raises(PeerLost):
            await ends.user.run(ends.write())
        assert cluster.now_s - start_s <= SILENCE_S + 0.2

    simulate(body)


def test_an_owner_that_resumes_in_time_loses_nothing() -> None:
    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        cluster.pause("owner")
        task = ends.user.spawn(ends.read())
        await asyncio.sleep(1)
        cluster.resume("owner")
        await task
        assert ends.mine.view == ends.theirs.view

    simulate(body)


@pytest.mark.parametrize("silent", [0.0, 1.0], ids=["reset", "silent"])
def test_an_owner_that_crashes_during_an_operation_is_lost_and_its_next_life_usable(
    silent: float,
) -> None:
    """kill -9, and power cut: what the processes do in ``test_contract_processes``."""

    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        hold_after_first_piece(cluster, ends)
        task = ends.user.spawn(ends.read())
        await asyncio.sleep(0.1)
        start_s = cluster.now_s
        cluster.crash("owner")
        with pytest.raises(PeerLost):
            await task
        assert cluster.now_s - start_s <= SILENCE_S + 0.2
        assert bytes(ends.mine.view)[-1:] == b"M", "everything had moved"
        ends.owner = cluster.restart("owner")
        old, ends.theirs = ends.token, ends.owner.transfer.register(bytearray(b"N" * NBYTES))
        with pytest.raises(Stale):
            await ends.user.run(ends.write())
        ends.token = ends.theirs.export("rw")
        start_s = cluster.now_s
        await ends.user.run(ends.read())
        assert cluster.now_s - start_s < 1.0
        assert old != ends.token
        assert bytes(ends.mine.view) == b"N" * NBYTES

    simulate(body, FaultPlan(silent_crash=silent))


def hold_after_first_piece(cluster: SimCluster, ends: Ends) -> None:
    """Stop every operation on the owner's region behind its first piece."""

    class OnePiece:
        num_asked = 0

        def admits(self) -> bool:
            self.num_asked += 1
            return self.num_asked == 1

    assert isinstance(ends.theirs, RegisteredRegion)
    cluster.bulk.holds[ends.theirs] = OnePiece()


def test_a_user_that_crashes_while_it_writes_disturbs_neither_owner_nor_others() -> None:
    async def body(cluster: SimCluster) -> None:
        ends, other = Ends(cluster), cluster.node("other")
        hold_after_first_piece(cluster, ends)
        ends.user.spawn(ends.write())
        await asyncio.sleep(0.1)
        cluster.crash("user")
        inbox = ends.owner.transfer.register(bytearray(NBYTES))
        source = other.transfer.register(bytearray(b"O" * NBYTES))
        token, deadline_s = inbox.export("w"), deadline_after(1.0)
        await other.run(other.transfer.write(token, ALL, source=source, deadline_s=deadline_s))
        assert inbox.view == source.view
        cluster.bulk.holds.clear()
        before = bytes(ends.theirs.view)
        await asyncio.sleep(5)
        assert ends.theirs.view == before
        assert before.count(b"M") == NBYTES // 8, "one piece had moved"

    simulate(body, FaultPlan(silent_crash=1.0, late_write=0.0))


@pytest.mark.parametrize("lasts_s", [SILENCE_S / 2, SILENCE_S * 2], ids=["short", "long"])
def test_a_partition_that_heals_leaves_the_pair_usable(lasts_s: float) -> None:
    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        cluster.partition(["owner"], ["user"])
        task = ends.user.spawn(ends.read())
        await asyncio.sleep(lasts_s)
        cluster.heal()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, PeerLost) == (lasts_s > SILENCE_S)
        await ends.user.run(ends.read(1.0))
        assert ends.mine.view == ends.theirs.view

    simulate(body)


def test_a_paused_owner_holds_up_nobody_else() -> None:
    async def body(cluster: SimCluster) -> None:
        ends, fast = Ends(cluster), cluster.node("fast")
        theirs = fast.transfer.register(bytearray(b"F" * NBYTES))
        into = ends.user.transfer.register(bytearray(NBYTES))
        cluster.pause("owner")
        waiting = ends.user.spawn(ends.read(1.0))
        for _ in range(20):
            deadline_s, token = deadline_after(0.05), theirs.export("r")
            await ends.user.run(
                ends.user.transfer.read(token, ALL, into=into, deadline_s=deadline_s)
            )
        assert not waiting.done()
        with pytest.raises(DeadlineExceeded):
            await waiting

    simulate(body)


def test_corruption_changes_exactly_one_bit() -> None:
    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        await ends.user.run(ends.read())
        differing = [x ^ ord("T") for x in ends.mine.view if x != ord("T")]
        assert len(differing) == 1
        assert differing[0].bit_count() == 1

    simulate(body, FaultPlan(bulk_corrupt=1.0))


def test_failed_reads_are_partial_and_seen_as_such_for_some_seed() -> None:
    moved: list[int] = []

    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        with pytest.raises(PeerLost):
            await ends.user.run(ends.read())
        moved.append(bytes(ends.mine.view).count(b"T"))

    for seed in range(20):
        simulate(body, FaultPlan(bulk_fail=1.0), seed)
    assert len(set(moved)) > 3
    assert any(0 < count < NBYTES for count in moved)


@pytest.mark.parametrize("seed", seeds(40))
def test_local_memory_is_quiet_once_an_operation_has_ended(seed: int) -> None:
    """Whatever ends it: the local region never changes afterwards; the remote one may."""

    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        for _ in range(10):
            reading = cluster.rng.random() < 0.5
            task = ends.user.spawn(ends.read(3) if reading else ends.write(3))
            await asyncio.sleep(cluster.rng.expovariate(1 / 0.02))
            match cluster.rng.randrange(4):
                case 0:
                    task.cancel()
                case 1:
                    cluster.block("owner", "user")
                case 2:
                    cluster.pause("owner")
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            assert outcome is None or isinstance(outcome, TransferError | asyncio.CancelledError), (
                outcome
            )
            before = bytes(ends.mine.view)
            cluster.fabric.unblock_all()
            cluster.resume("owner")
            await asyncio.sleep(0.5)
            assert bytes(ends.mine.view) == before

    simulate(body, FaultPlan.swarm(random.Random(seed)), seed)


def test_a_read_that_is_given_up_may_move_bytes_until_it_ends() -> None:
    landed: list[bool] = []

    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        task = ends.user.spawn(ends.read())
        await asyncio.sleep(0.0025)
        before = bytes(ends.mine.view)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ended = bytes(ends.mine.view)
        landed.append(ended != before)
        await asyncio.sleep(1)
        assert bytes(ends.mine.view) == ended

    for seed in range(20):
        simulate(body, FaultPlan(late_read=0.5, bulk_bytes_per_s=1e6), seed)
    assert any(landed)
    assert not all(landed)


def test_bytes_of_a_cancelled_write_may_land_late() -> None:
    landed: list[bool] = []

    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        task = ends.user.spawn(ends.write())
        await asyncio.sleep(0.0025)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        before = bytes(ends.theirs.view)
        await asyncio.sleep(1)
        landed.append(bytes(ends.theirs.view) != before)

    for seed in range(20):
        simulate(body, FaultPlan(late_write=0.5, bulk_bytes_per_s=1e6), seed)
    assert any(landed)
    assert not all(landed)
