"""A child that dies comes back, more and more slowly; one that cannot work does not."""

from __future__ import annotations

import pytest

from launch.errors import EXIT_CONFIG
from launch.restart_policy import (
    DELAY_MAX_S,
    DELAY_MIN_S,
    STABLE_S,
    ChildState,
    Done,
    Fail,
    Restart,
    RestartPolicy,
)


def running(now: float = 0.0) -> RestartPolicy:
    policy = RestartPolicy()
    policy.on_started(now)
    policy.on_cluster_ready()
    return policy


@pytest.mark.parametrize("code", [0, 1, EXIT_CONFIG, -9])
def test_any_exit_before_the_cluster_served_fails_the_start(code: int) -> None:
    policy = RestartPolicy()
    policy.on_started(0.0)
    assert policy.on_exit(code, 1.0) == Fail(fatal=True)
    assert policy.state is ChildState.FAILED


def test_delays_double_up_to_the_maximum_and_start_over_after_a_stable_life() -> None:
    policy = running()
    delays = []
    for _ in range(10):
        decision = policy.on_exit(-9, 1.0)
        assert isinstance(decision, Restart)
        delays.append(decision.delay_s)
        policy.on_started(1.0)
    assert delays == [min(DELAY_MIN_S * 2**n, DELAY_MAX_S) for n in range(10)]
    assert policy.on_exit(-9, 1.0 + STABLE_S) == Restart(DELAY_MIN_S)
    assert policy.num_deaths == 1


def test_the_rate_of_restarts_is_bounded() -> None:
    """However fast a child dies: at most a handful of starts a minute in the long run."""
    policy, now, starts = running(), 0.0, 0
    while now < 600.0:
        decision = policy.on_exit(1, now)
        assert isinstance(decision, Restart)
        now += decision.delay_s
        policy.on_started(now)
        starts += 1
    assert starts <= 600 / DELAY_MAX_S + 7


def test_a_wrong_configuration_is_not_started_again() -> None:
    assert running().on_exit(EXIT_CONFIG, 5.0) == Fail(fatal=False)


def test_a_child_told_to_stop_is_done_whatever_its_exit_code() -> None:
    for code in (0, 1, -15, EXIT_CONFIG):
        policy = running()
        policy.on_stopping()
        assert policy.on_exit(code, 5.0) == Done()
        assert policy.state is ChildState.STOPPED


def test_a_restarted_child_is_running_again() -> None:
    policy = running()
    policy.on_exit(-9, 1.0)
    assert policy.state is ChildState.WAITING
    policy.on_started(2.0)
    assert policy.state is ChildState.RUNNING
