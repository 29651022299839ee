"""Seeded tests that run in helper processes count as they would have counted here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.helpers import AHEAD, Helpers

NAME = f"{__name__}:odd_seeds_fail"


def odd_seeds_fail(seed: int) -> None:
    """What the helpers of these tests run."""
    print("this is no answer")
    assert seed % 2 == 0


@pytest.fixture
def tests() -> list[str]:
    return [f"{NAME} {seed}" for seed in range(3 * AHEAD)]


@pytest.fixture
def helpers(tests: list[str]) -> Iterator[Helpers]:
    helpers = Helpers(tests, 1)
    yield helpers
    helpers.close()


def test_what_passed_in_a_helper_is_not_run_again_and_what_failed_is(
    helpers: Helpers, tests: list[str]
) -> None:
    last = tests[-AHEAD:]
    assert [helpers.has_passed(test) for test in last] == [n % 2 == 0 for n in range(AHEAD)]


def test_the_next_test_is_run_here_and_never_in_a_helper_too(
    helpers: Helpers, tests: list[str]
) -> None:
    first = tests[: len(tests) - AHEAD]
    while first:
        test = first.pop(0)
        if not helpers.has_passed(test) and test.endswith(("0", "2", "4", "6", "8")):
            break
    assert not helpers.has_passed(test)


def test_nothing_counts_as_passed_in_a_helper_that_has_died(
    helpers: Helpers, tests: list[str]
) -> None:
    helpers._helpers[0]._process.kill()
    helpers._helpers[0]._process.wait()
    answered = [test for test in tests if helpers.has_passed(test)]
    assert set(answered) <= set(tests[-AHEAD:])
    assert not helpers.has_passed(f"{NAME} 1000")
