"""A connection stays awake while more may come, then sleeps or gives the core away. No UCX."""

from __future__ import annotations

import pytest

from transfer.ucx_rest import (
    FIRST_PAUSE_S,
    LINGER_S,
    LINGER_SHARE,
    MAX_LINGERED_S,
    MAX_PAUSE_S,
    SPIN_S,
    Rest,
)

STEP_S = 0.00005  # from one look to the next
# What may be spent of 5 s, whatever the constants say.
MOST_STALLED_S = 0.003
MOST_STUCK_S = 0.1
MOST_TRICKLED_S = 0.75


class Bed:
    """A worker, a clock and a core; says what was asked of them."""

    def __init__(self, *, agrees: bool) -> None:
        self.now_s = 1.0
        self.num_arms = self.num_ways_given = 0
        self.agrees = agrees
        self.rest = Rest(self, lambda: self.now_s, self._give_way)  # type: ignore[arg-type]

    def arm(self) -> bool:
        self.num_arms += 1
        return self.agrees

    def _give_way(self) -> None:
        self.num_ways_given += 1


def test_it_stays_awake_after_an_event_while_something_is_under_way() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    bed.now_s += SPIN_S / 2
    assert not bed.rest.arm_or_give_way(busy=True)
    assert (bed.num_arms, bed.num_ways_given) == (0, 0)
    bed.now_s += LINGER_S
    assert bed.rest.arm_or_give_way(busy=True)


def test_it_lingers_for_what_is_on_its_way_and_lets_everybody_else_go_first() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    bed.now_s += 2 * SPIN_S
    assert not bed.rest.arm_or_give_way(busy=True)
    assert (bed.num_arms, bed.num_ways_given) == (0, 1)
    assert bed.rest.arm_or_give_way(busy=False), "nothing is on its way any more"


def lingered_s(bed: Bed, seconds: float, event_every_s: float) -> float:
    """Look every 0.05 ms for so long; return how much of it was spent lingering."""
    step_s, since_s, spent_s = 0.00005, 0.0, 0.0
    end_s = bed.now_s + seconds
    while bed.now_s < end_s:
        if since_s >= event_every_s:
            since_s = 0.0
            bed.rest.disturb()
        ways = bed.num_ways_given
        asleep = bed.rest.arm_or_give_way(busy=True)
        if bed.num_ways_given > ways:
            spent_s += step_s
        skipped_s = max(step_s, event_every_s - since_s) if asleep else step_s
        bed.now_s += skipped_s
        since_s += skipped_s
    return spent_s


def test_a_peer_that_stalls_costs_one_lingering_and_no_more() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    assert lingered_s(bed, 5.0, event_every_s=100.0) <= LINGER_S < MOST_STALLED_S


def test_a_stall_keeps_it_awake_for_a_moment_only() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    for _ in range(int(MOST_STALLED_S / STEP_S)):
        if bed.rest.arm_or_give_way(busy=True):
            return
        bed.now_s += STEP_S
    raise AssertionError(f"still awake after {MOST_STALLED_S} s")


def test_a_peer_that_trickles_costs_no_more_than_its_share() -> None:
    bed = Bed(agrees=True)
    spent_s = lingered_s(bed, 5.0, event_every_s=0.9 * LINGER_S)
    assert spent_s <= MOST_TRICKLED_S
    assert MAX_LINGERED_S < spent_s <= 1.1 * (MAX_LINGERED_S + 5.0 / LINGER_SHARE)


def test_an_idle_one_sleeps_at_once() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    assert bed.rest.arm_or_give_way(busy=False)
    assert bed.num_ways_given == 0


def test_where_ucx_does_not_sleep_the_core_is_given_away() -> None:
    bed = Bed(agrees=False)
    bed.rest.disturb()
    assert not bed.rest.arm_or_give_way(busy=False)
    bed.now_s += 2 * LINGER_S
    assert not bed.rest.arm_or_give_way(busy=True)
    assert bed.num_ways_given == 2


def stuck(bed: Bed, seconds: float, *, busy: bool) -> tuple[float, list[float]]:
    """Look for so long as the connection does; return the time spent on it, and the pauses."""
    spent_s, pauses = 0.0, []
    end_s = bed.now_s + seconds
    while bed.now_s < end_s:
        assert not bed.rest.arm_or_give_way(busy=busy)
        pause_s = bed.rest.pause_s
        if pause_s is not None:
            assert not bed.rest.gave_way
            pauses.append(pause_s)
        spent_s += STEP_S
        bed.now_s += STEP_S + (pause_s or 0.0)
    return spent_s, pauses


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_that_never_sleeps_costs_what_may_be_lingered_and_then_few_looks(
    busy: bool,
) -> None:
    bed = Bed(agrees=False)
    bed.rest.disturb()
    spent_s, pauses = stuck(bed, 5.0, busy=busy)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == max(pauses) == MAX_PAUSE_S
    # As much again is earned while it is spent; the first pauses are short.
    most_awake_s = SPIN_S + LINGER_S + MAX_LINGERED_S * LINGER_SHARE / (LINGER_SHARE - 1)
    assert spent_s - len(pauses) * STEP_S <= most_awake_s + 2 * STEP_S
    assert len(pauses) <= 5.0 / MAX_PAUSE_S + 6
    assert spent_s <= MOST_STUCK_S


def test_one_event_makes_a_stuck_one_prompt_again() -> None:
    bed = Bed(agrees=False)
    stuck(bed, 5.0, busy=True)
    bed.rest.disturb()
    assert bed.rest.pause_s is None
    assert not bed.rest.arm_or_give_way(busy=True)
    assert bed.rest.pause_s is None, "it looks again at once"
    _, pauses = stuck(bed, 1.0, busy=True)
    assert pauses[0] == FIRST_PAUSE_S, "the pauses begin anew"


def test_a_stuck_one_sleeps_as_soon_as_ucx_agrees() -> None:
    bed = Bed(agrees=False)
    stuck(bed, 1.0, busy=False)
    bed.agrees = True
    assert bed.rest.arm_or_give_way(busy=False)
    assert bed.rest.pause_s is None


def test_a_trickle_over_a_worker_that_never_sleeps_costs_no_more_than_its_share() -> None:
    bed = Bed(agrees=False)
    spent_s = 0.0
    while bed.now_s < 6.0:
        bed.rest.disturb()
        bed.now_s += 2 * SPIN_S
        more_s, pauses = stuck(bed, 2 * LINGER_S, busy=True)
        spent_s += more_s - len(pauses) * STEP_S
    assert spent_s <= MOST_TRICKLED_S
    assert MAX_LINGERED_S < spent_s <= 1.1 * (MAX_LINGERED_S + 5.0 / LINGER_SHARE)


def test_a_descriptor_that_is_readable_for_nothing_costs_as_much_and_then_few_looks() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    looks, end_s, pauses = 0, bed.now_s + 5.0, []
    while bed.now_s < end_s:
        looks += 1
        if not bed.rest.arm_or_give_way(busy=False):
            assert bed.rest.pause_s is not None
            pauses.append(bed.rest.pause_s)
        bed.now_s += STEP_S + (bed.rest.pause_s or 0.0)
    assert pauses[0] == FIRST_PAUSE_S
    assert max(pauses) == MAX_PAUSE_S
    most_awake_s = MAX_LINGERED_S * LINGER_SHARE / (LINGER_SHARE - 1)
    assert looks <= most_awake_s / STEP_S + 2 * (5.0 / MAX_PAUSE_S + 6) + 2
    assert looks * STEP_S <= MOST_STUCK_S
    bed.rest.disturb()
    assert bed.rest.arm_or_give_way(busy=False), "one event makes it prompt again"
