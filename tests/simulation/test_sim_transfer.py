"""Simulated bulk transfers keep the contract of ``transfer.interface`` under every fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.simulation.faults import FaultPlan
from tests.simulation.harness import SimCluster, run_sim, seeds
from tests.simulation.transfer import SILENCE_S
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerClosed,
    PeerLost,
    RegionRevoked,
    Stale,
    TransferError,
    Unauthorized,
)
from transfer.interface import Range, Region, Transfer, deadline_after

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


def test_bytes_move_both_ways_by_ranges() -> None:
    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        ends.theirs.view[:4] = b"abcd"
        ranges = [Range(0, 8, 2), Range(2, 100, 2)]
        await ends.user.run(
            ends.user.transfer.read(
                ends.token, ranges, into=ends.mine, deadline_s=ends.user.time() + 1
            )
        )
        assert bytes(ends.mine.view[8:10]) == b"ab"
        assert bytes(ends.mine.view[100:102]) == b"cd"
        assert bytes(ends.mine.view).count(b"M") == NBYTES - 4
        await ends.user.run(ends.write())
        assert ends.theirs.view == ends.mine.view

    simulate(body)


def test_rights_ranges_and_tokens_are_checked() -> None:
    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        ends.token = ends.theirs.export("r")
        with pytest.raises(Unauthorized):
            await ends.user.run(ends.write())
        ends.token = b"nonsense"
        with pytest.raises(FrameInvalid):
            await ends.user.run(ends.read())
        ends.token = ends.theirs.export("rw")
        with pytest.raises(FrameInvalid):
            await ends.user.run(
                ends.user.transfer.read(
                    ends.token, [Range(NBYTES, 0, 1)], into=ends.mine, deadline_s=100.0
                )
            )
        ends.theirs.revoke()
        with pytest.raises(RegionRevoked):
            await ends.user.run(ends.read())

    simulate(body)


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


def test_closing_the_engine_ends_its_operations() -> None:
    async def body(cluster: SimCluster) -> None:
        ends = Ends(cluster)
        cluster.pause("owner")
        task = ends.user.spawn(ends.read())
        await asyncio.sleep(0.1)
        await ends.user.run(ends.user.transfer.close())
        with pytest.raises(PeerClosed):
            await task
        with pytest.raises(PeerClosed):
            await ends.user.run(ends.read())

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
