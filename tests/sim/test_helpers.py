"""Seeded tests that run in helper processes count as they would have counted here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.sim import helpers as helpers_module
from tests.sim.helpers import AHEAD, Helpers, num_idle_cores

SESSION_VARIABLE = "KVFERRY_TEST_SESSION"
ODD = f"{__name__}:odd_seeds_fail"


def odd_seeds_fail(seed: int) -> None:
    """What the helpers of most of these tests run."""
    print("this is no answer")
    assert seed % 2 == 0, "a line\nand another"


def passes_in_the_session_only(seed: int) -> None:
    assert os.environ[SESSION_VARIABLE] == str(os.getpid()), f"seed {seed} ran elsewhere"


def ends_its_helper(seed: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def tests() -> list[str]:
    return [f"{ODD} {seed}" for seed in range(3 * AHEAD)]


@pytest.fixture
def helpers(tests: list[str]) -> Iterator[Helpers]:
    helpers = Helpers(tests, 1)
    yield helpers
    helpers.close()


def not_here() -> None:
    raise AssertionError("it has passed in a helper")


def test_what_passed_in_a_helper_is_not_run_again_and_what_failed_is(
    helpers: Helpers, tests: list[str]
) -> None:
    for test in tests[-AHEAD:]:
        seed = int(test.split()[1])
        if seed % 2 == 0:
            assert helpers.has_run(test, not_here)
        else:
            with pytest.raises(AssertionError, match="a line"):
                helpers.has_run(test, lambda seed=seed: odd_seeds_fail(seed))
    assert helpers.report() == []


def test_what_failed_in_a_helper_and_passes_in_the_session_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, str(os.getpid()))
    helpers = Helpers([f"{__name__}:passes_in_the_session_only 7"], 1)
    try:
        with pytest.raises(pytest.fail.Exception, match="not a function of its seed") as failed:
            helpers.has_run(
                f"{__name__}:passes_in_the_session_only 7", lambda: passes_in_the_session_only(7)
            )
        assert "seed 7 ran elsewhere" in str(failed.value), "with what it said there"
    finally:
        helpers.close()


def test_the_next_test_is_run_here_and_never_in_a_helper_too(
    helpers: Helpers, tests: list[str]
) -> None:
    answers = {test: helpers.answer(test) for test in tests}
    here = [test for test, answer in answers.items() if answer is None]
    assert here[0] == tests[0], "from the front"
    assert not set(here) & set(tests[-AHEAD:]), "these the helper has been given at once"
    assert [helpers.answer(test) for test in here] == [None] * len(here)


def test_the_tests_of_a_helper_that_has_died_are_run_here_and_that_is_said(
    tests: list[str],
) -> None:
    ends_it = f"{__name__}:ends_its_helper 1"
    tests = [*tests, ends_it, tests[0]]  # the helper takes them from the end
    helpers = Helpers(tests[1:], 1)
    try:
        assert helpers.has_run(tests[0], not_here), "answered before the helper died"
        given = tests[-AHEAD:-1]
        assert [helpers.has_run(test, not_here) for test in given] == [False] * len(given)
        (said,) = helpers.report()
        assert "exit code -9" in said
        assert all(test in said for test in given)
        assert not helpers._helpers[0].asked, "it is given no more"
        rest = tests[1:-AHEAD]
        assert not any(helpers.has_run(test, not_here) for test in rest)
        assert helpers.report() == [said]
    finally:
        helpers.close()


def test_cores_that_this_process_may_not_use_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(helpers_module.os, "sched_getaffinity", lambda pid: {1, 4, 6})
    monkeypatch.setattr(helpers_module.os, "cpu_count", lambda: 64)
    assert num_idle_cores() == 2
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert num_idle_cores() == 0, "others use them"
