"""Restarts of the registry as its watchers see them, in virtual time: nothing changes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, run_sim, seeds
from tests.transfer.test_registry_membership import Seat, simulate, start_gateway, twin_of_a
from transfer.identity import Role
from transfer.membership import MembershipView
from transfer.registry import LEASE_TTL_S
from transfer.registry_view import HOLD_S

GONE = "did not come back after the registry did"


class Watcher:
    """An observer, and the names in every view that it saw."""

    def __init__(self, cluster: SimCluster) -> None:
        self.seat = Seat(cluster, "status", role=Role.OBSERVER)
        self.seen: list[list[str]] = []

    async def start(self) -> None:
        await self.seat.node.run(self.seat.membership.watch_only())
        self.seat.node.call(self.seat.membership.subscribe, self.note)

    def note(self, view: MembershipView) -> None:
        self.seen.append([member.node_id for member in view.members])


async def three_and_a_watcher(cluster: SimCluster) -> tuple[list[Seat], Watcher]:
    await start_gateway(cluster)
    seats = [Seat(cluster, name) for name in "abc"]
    for seat in seats:
        await seat.join()
    watcher = Watcher(cluster)
    await watcher.start()
    assert watcher.seen == [["a", "b", "c"]]
    return seats, watcher


async def restart_registry(cluster: SimCluster, away_s: float) -> None:
    cluster.restart("gateway")
    await asyncio.sleep(away_s)
    await start_gateway(cluster)


@pytest.mark.parametrize("away_s", [0.0, 0.5, LEASE_TTL_S, 30.0])
@pytest.mark.parametrize("seed", seeds(5))
def test_a_restart_of_the_registry_shows_nobody_a_view_that_lacks_a_member(
    away_s: float, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: SimCluster) -> None:
        seats, watcher = await three_and_a_watcher(cluster)
        for seat in seats:
            seat.node.call(seat.membership.subscribe, watcher.note)
        await restart_registry(cluster, away_s)
        await asyncio.sleep(2 * HOLD_S)
        assert all(seat.membership.connected for seat in seats)
        assert watcher.seen == [["a", "b", "c"]] * len(watcher.seen)
        cluster.crash_all()

    run_sim(scenario, seed, FaultPlan())
    assert GONE not in caplog.text


def test_a_registry_that_restarts_again_and_again_shows_nobody_less() -> None:
    async def body(cluster: SimCluster) -> None:
        _, watcher = await three_and_a_watcher(cluster)
        for _ in range(20):
            await restart_registry(cluster, cluster.rng.uniform(0.0, 1.0))
            await asyncio.sleep(cluster.rng.uniform(0.0, 2.0))
        await asyncio.sleep(2 * HOLD_S)
        assert watcher.seen == [["a", "b", "c"]] * len(watcher.seen)

    simulate(body)


def test_a_member_that_died_while_the_registry_was_away_leaves_when_the_hold_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def body(cluster: SimCluster) -> None:
        _, watcher = await three_and_a_watcher(cluster)
        cluster.crash("b")
        await restart_registry(cluster, 3.0)
        await cluster.until(lambda: watcher.seat.membership.connected, timeout_s=3)
        back_s = cluster.now_s
        assert watcher.seat.names() == ["a", "b", "c"]
        await cluster.until(lambda: watcher.seat.names() == ["a", "c"], timeout_s=HOLD_S + 0.1)
        assert cluster.now_s - back_s > LEASE_TTL_S
        assert sorted(set(map(tuple, watcher.seen))) == [("a", "b", "c"), ("a", "c")]

    simulate(body)
    assert f"b {GONE}; removed" in caplog.text


def test_a_member_that_leaves_the_new_registry_is_gone_at_once() -> None:
    async def body(cluster: SimCluster) -> None:
        seats, watcher = await three_and_a_watcher(cluster)
        cluster.crash("b")
        cluster.restart("gateway")
        registry, _ = await start_gateway(cluster)
        await cluster.until(lambda: len(registry.view(0).members) == 2, timeout_s=3)
        await cluster.until(lambda: watcher.seat.membership.connected, timeout_s=3)
        await cluster.until(lambda: watcher.seat.names() == ["a", "b", "c"], timeout_s=0.1)
        await seats[0].node.run(seats[0].membership.leave())
        await cluster.until(lambda: watcher.seat.names() == ["b", "c"], timeout_s=0.1)

    simulate(body)


def test_a_member_that_restarted_with_the_registry_is_replaced_as_it_registers() -> None:
    async def body(cluster: SimCluster) -> None:
        _, watcher = await three_and_a_watcher(cluster)
        cluster.crash("a")
        await restart_registry(cluster, 0.0)
        again = twin_of_a(cluster, "elsewhere", "sim://elsewhere:1")
        await again.join()
        membership = watcher.seat.membership
        await cluster.until(
            lambda: again.info in [member.info for member in membership.view.members], timeout_s=3
        )
        await asyncio.sleep(2 * HOLD_S)
        assert watcher.seen == [["a", "b", "c"]] * len(watcher.seen)

    simulate(body)


def test_a_watcher_that_stood_still_in_the_hold_drops_nobody_when_it_wakes() -> None:
    async def body(cluster: SimCluster) -> None:
        _, watcher = await three_and_a_watcher(cluster)
        cluster.restart("gateway")
        cluster.partition(["a", "b", "c"], ["gateway"])
        await start_gateway(cluster)
        await cluster.until(lambda: not watcher.seat.membership.connected, timeout_s=3)
        await cluster.until(lambda: watcher.seat.membership.connected, timeout_s=3)
        cluster.pause("status")
        cluster.fabric.unblock_all()
        await asyncio.sleep(3 * HOLD_S)
        cluster.resume("status")
        await asyncio.sleep(2 * HOLD_S)
        assert watcher.seat.membership.connected
        assert watcher.seen == [["a", "b", "c"]] * len(watcher.seen)

    simulate(body)
