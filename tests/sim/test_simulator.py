"""The simulator's own promises: determinism, faults that happen, failures that are reported."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.faults import FaultPlan
from tests.sim.harness import LeakedTasks, NodeCrashed, SimCluster, run_sim
from tests.sim.loop import SimDeadlock
from tests.sim.mixed import mixed_scenario

ROOT = Path(__file__).resolve().parents[2]
CALM = FaultPlan()


def test_equal_seeds_give_equal_runs_in_one_process() -> None:
    for seed in range(3):
        assert run_sim(mixed_scenario, seed) == run_sim(mixed_scenario, seed)


def test_different_seeds_give_different_runs() -> None:
    digests = [run_sim(mixed_scenario, seed).digest for seed in range(5)]
    assert len(set(digests)) == len(digests)


def test_equal_seeds_give_equal_runs_in_other_processes_with_other_hash_seeds() -> None:
    digests = []
    for hash_seed in ("1", "20"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.mixed", "3"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        digests.append(done.stdout.strip())
    assert digests == [run_sim(mixed_scenario, 3).digest] * 2


def test_a_failure_carries_its_seed_and_the_last_events() -> None:
    async def scenario(cluster: SimCluster) -> None:
        cluster.block("a", "b")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as failed:
        run_sim(scenario, 77)
    notes = "\n".join(failed.value.__notes__)
    assert "SIM_SEED=77" in notes
    assert "block a>b" in notes


def test_a_deadlock_is_reported_and_not_waited_for() -> None:
    async def scenario(cluster: SimCluster) -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimDeadlock, match=r"t=0\.000"):
        run_sim(scenario, 1)


def test_a_task_that_is_left_fails_the_run_by_name() -> None:
    async def forever() -> None:
        await asyncio.sleep(1e9)

    async def scenario(cluster: SimCluster) -> None:
        cluster.node("a").spawn(forever(), name="the leak")

    with pytest.raises(LeakedTasks, match="the leak"):
        run_sim(scenario, 1)


def test_an_error_that_nobody_awaits_fails_the_run() -> None:
    async def fails() -> None:
        raise KeyError("unheard")

    async def scenario(cluster: SimCluster) -> None:
        task = cluster.node("a").spawn(fails())
        await asyncio.sleep(1)
        del task
        await asyncio.sleep(1)

    with pytest.raises(KeyError, match="unheard"):
        run_sim(scenario, 1)


def test_a_broken_invariant_fails_the_run_at_the_delivery_that_broke_it() -> None:
    deliveries = []

    async def scenario(cluster: SimCluster) -> None:
        def check() -> None:
            deliveries.append(cluster.now_s)
            assert len(deliveries) < 3, "invariant broken"

        cluster.checkers.append(check)
        await mixed_scenario(cluster)

    with pytest.raises(AssertionError, match="invariant broken"):
        run_sim(scenario, 1, CALM)
    assert len(deliveries) == 3


def test_a_crash_ends_every_task_of_the_node_and_no_other() -> None:
    ended: list[str] = []

    async def worker(name: str) -> None:
        async def child() -> None:
            await asyncio.sleep(100)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(child())
        finally:
            ended.append(name)

    async def scenario(cluster: SimCluster) -> None:
        a, b = cluster.node("a"), cluster.node("b")
        running = asyncio.ensure_future(a.run(worker("a")))
        task = b.spawn(worker("b"))
        await asyncio.sleep(1)
        cluster.crash("a")
        with pytest.raises(NodeCrashed):
            await running
        assert ended == ["a"]
        assert not a.life.tasks
        assert cluster.restart("a").alive
        await task

    run_sim(scenario, 1)


def test_a_paused_node_stands_still_while_time_goes_on() -> None:
    ticks: list[float] = []

    async def clock(cluster: SimCluster) -> None:
        while len(ticks) < 20:
            await asyncio.sleep(1)
            ticks.append(cluster.now_s)

    async def scenario(cluster: SimCluster) -> None:
        task = cluster.node("a").spawn(clock(cluster))
        await asyncio.sleep(5.5)
        cluster.pause("a")
        await asyncio.sleep(10)
        assert len(ticks) == 5
        cluster.resume("a")
        await task
        assert ticks[5] == pytest.approx(15.5)

    run_sim(scenario, 1)


def test_clocks_differ_between_nodes_and_timers_follow_them() -> None:
    async def measure() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        async with asyncio.timeout_at(start_s + 5):
            await asyncio.sleep(2)
        return start_s, loop.time() - start_s

    async def scenario(cluster: SimCluster) -> None:
        shown_a, passed_a = await cluster.node("a").run(measure())
        shown_b, passed_b = await cluster.node("b").run(measure())
        assert passed_a == pytest.approx(2)
        assert passed_b == pytest.approx(2)
        assert cluster.now_s == pytest.approx(4)
        assert abs(shown_a - shown_b + 2) > 1

    run_sim(scenario, 1, FaultPlan(clock_skew_s=3600))


def test_executor_work_takes_time_survives_cancel_and_dies_with_its_node() -> None:
    ran: list[str] = []

    async def work(name: str) -> None:
        await asyncio.get_running_loop().run_in_executor(None, ran.append, name)

    async def scenario(cluster: SimCluster) -> None:
        a = cluster.node("a")
        before_s = cluster.now_s
        await a.run(work("plain"))
        assert cluster.now_s > before_s
        task = a.spawn(work("cancelled"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(1)
        assert ran == ["plain", "cancelled"]
        a.spawn(work("crashed"))
        await asyncio.sleep(0)
        cluster.crash("a")
        await asyncio.sleep(1)
        assert ran == ["plain", "cancelled"]

    run_sim(scenario, 1)


def test_executor_errors_reach_the_caller() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def scenario(cluster: SimCluster) -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, fail)

    run_sim(scenario, 1)


def test_a_swarm_draws_faults_alone_and_together() -> None:
    import random

    plans = [FaultPlan.swarm(random.Random(seed)) for seed in range(200)]
    for field in ("drop", "duplicate", "corrupt", "bulk_corrupt", "bulk_fail", "late_write"):
        share = sum(getattr(plan, field) > 0 for plan in plans) / len(plans)
        assert 0.3 < share < 0.7
