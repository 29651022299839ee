"""The way of pages down their rankings: answers cost, unreachable nodes do not."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore.client.route as routes
from kvstore.client.route import Route

RANKS = np.array([[0, 1, 2], [1, 2, 0], [0, 2, 1]], dtype=np.intp)
ALL = [True, True, True]


@pytest.fixture(autouse=True, params=["short", "long"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim holds for few pages and for many."""
    monkeypatch.setattr(routes, "SHORT_MAX", 16 if request.param == "short" else -1)


def route(num_answers: int) -> Route:
    return routes.route(RANKS, np.full(len(RANKS), num_answers, dtype=np.intp))


def test_pages_are_grouped_by_their_first_node_in_order() -> None:
    assert route(1).groups([2, 0, 1], ALL) == [(0, [2, 0]), (1, [1])]


def test_an_answer_is_the_end_when_no_more_are_worth_it() -> None:
    way = route(1)
    way.answered([0])
    assert way.groups([0, 1], ALL) == [(1, [1])]


def test_an_unreachable_node_costs_no_answer() -> None:
    way = route(1)
    way.unreachable([0, 2])
    assert way.groups([0, 1, 2], ALL) == [(1, [0, 1]), (2, [2])]
    way.answered([0])
    assert way.groups([0], ALL) == []


def test_nodes_that_are_known_to_be_down_are_skipped() -> None:
    way = route(2)
    down = [False, True, True]
    assert way.groups([0, 1, 2], down) == [(1, [0, 1]), (2, [2])]
    assert route(2).groups([0, 1, 2], [False] * 3) == []


def test_pages_for_which_a_node_was_passed_over_are_known() -> None:
    way = route(1)
    way.groups([0, 1, 2], [False, True, True])
    assert way.skipped([0, 1, 2]) == [0, 2]
    way.answered([0, 1, 2])
    way.groups([0, 1, 2], [True, False, False])
    assert way.skipped([0, 1, 2]) == [0, 2], "nobody else was worth asking"
    assert way.skipped([1]) == []


def test_the_way_ends_after_the_last_rank() -> None:
    way = route(3)
    for _ in range(3):
        way.answered([0])
    assert way.groups([0], ALL) == []


def test_a_question_to_all_goes_to_as_many_reachable_nodes_as_answers_are_worth() -> None:
    assert route(1).all_groups(ALL) == [(0, [0, 2]), (1, [1])]
    assert route(2).all_groups(ALL) == [(0, [0, 2]), (1, [0, 1]), (2, [1, 2])]
    down = [False, True, True]
    assert route(1).all_groups(down) == [(1, [0, 1]), (2, [2])]


def test_no_pages_and_no_nodes_are_no_work() -> None:
    nothing = routes.route(np.zeros((2, 0), dtype=np.intp), np.ones(2, dtype=np.intp))
    nobody: list[bool] = []
    assert nothing.groups([0, 1], nobody) == []
    assert nothing.all_groups(nobody) == []
    assert route(1).groups([], ALL) == []
