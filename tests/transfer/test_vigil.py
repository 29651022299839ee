"""Claims about how long a thread stays awake. The clock is passed in: nothing here waits."""

from __future__ import annotations

import random

import pytest

from transfer.vigil import GAP_S, LOST_S, MAX_IN_VAIN, OFTEN_S, REST_S, SPIN_S, Vigil

LOOK_S = GAP_S / 10
START_S = 1000.0


def looks(vigil: Vigil, now_s: float, look_s: float = LOOK_S) -> float:
    """Look in vain until the vigil is over; return when that was."""
    lasts = vigil.look_from(now_s)
    while lasts:
        now_s += look_s
        lasts = vigil.lasts(now_s)
    return now_s


def test_nobody_stays_awake_who_was_not_told_to() -> None:
    assert looks(Vigil(), START_S) == START_S


def test_a_single_event_keeps_nobody_awake() -> None:
    vigil = Vigil()
    vigil.event(START_S)
    assert looks(vigil, START_S) == START_S


def test_events_that_are_too_far_apart_keep_nobody_awake() -> None:
    vigil = Vigil()
    for number in range(10):
        vigil.event(START_S + number * 1.01 * OFTEN_S)
    assert not vigil.look_from(START_S + 9 * 1.01 * OFTEN_S)


def test_a_series_of_events_keeps_awake_until_a_fixed_time_after_the_last() -> None:
    vigil, now_s = Vigil(), START_S
    for _ in range(100):
        now_s += OFTEN_S / 2
        vigil.event(now_s)
    assert now_s + SPIN_S <= looks(vigil, now_s) <= now_s + SPIN_S + 2 * LOOK_S


def test_time_spent_on_other_work_is_no_gap() -> None:
    vigil = Vigil()
    vigil.begin(START_S)
    assert vigil.look_from(START_S + SPIN_S / 2)
    assert vigil.lasts(START_S + SPIN_S / 2 + LOOK_S)


def test_who_loses_the_core_while_looking_sleeps_as_usual_for_a_while() -> None:
    vigil, gone_s = Vigil(), START_S + 1.1 * LOST_S
    vigil.begin(START_S)
    assert not vigil.lasts(gone_s)
    assert not vigil.begin(gone_s + REST_S / 2)
    assert not vigil.look_from(gone_s + REST_S / 2)
    assert vigil.begin(gone_s + 1.01 * REST_S)


def test_who_stays_awake_for_nothing_again_and_again_sleeps_as_usual_for_a_while() -> None:
    vigil, now_s = Vigil(), START_S
    for _ in range(MAX_IN_VAIN):
        assert vigil.begin(now_s)
        now_s = looks(vigil, now_s)
    assert not vigil.begin(now_s + REST_S / 2)
    assert vigil.begin(now_s + 1.01 * REST_S)


def test_a_short_gap_ends_the_vigil_and_allows_the_next() -> None:
    vigil, gone_s = Vigil(), START_S + 1.1 * GAP_S
    vigil.begin(START_S)
    assert not vigil.lasts(gone_s)
    assert vigil.begin(gone_s)
    assert vigil.lasts(gone_s + LOOK_S)


def test_who_sometimes_stays_awake_for_nothing_goes_on() -> None:
    vigil, now_s = Vigil(), START_S
    for number in range(10 * MAX_IN_VAIN):
        assert vigil.begin(now_s)
        if number % MAX_IN_VAIN == 0:
            vigil.paid()
        else:
            now_s = looks(vigil, now_s)


@pytest.mark.parametrize("seed", range(20))
def test_no_vigil_outlasts_its_last_event_whatever_happens(seed: int) -> None:
    draw, vigil, now_s, last_s = random.Random(seed), Vigil(), START_S, START_S
    for _ in range(2000):
        now_s += draw.choice([LOOK_S, SPIN_S / 2, SPIN_S, OFTEN_S, REST_S]) * draw.random()
        match draw.randrange(5):
            case 0:
                vigil.event(now_s)
                last_s = now_s
            case 1:
                vigil.begin(now_s)
                last_s = now_s
            case 2:
                assert not vigil.look_from(now_s) or now_s - last_s < SPIN_S
            case 3:
                vigil.paid()
            case _:
                assert not vigil.lasts(now_s) or now_s - last_s < SPIN_S
