"""A connection stays awake while more may come, then sleeps or gives the core away. No UCX."""

from __future__ import annotations

from transfer.ucx_rest import SPIN_S, Rest


class Bed:
    """A worker, a clock and a core; says what was asked of them."""

    def __init__(self, *, agrees: bool) -> None:
        self.now_s = 1.0
        self.num_arms = self.num_ways_given = 0
        self._agrees = agrees
        self.rest = Rest(self, lambda: self.now_s, self._give_way)  # type: ignore[arg-type]

    def arm(self) -> bool:
        self.num_arms += 1
        return self._agrees

    def _give_way(self) -> None:
        self.num_ways_given += 1


def test_it_stays_awake_after_an_event_while_something_is_under_way() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    bed.now_s += SPIN_S / 2
    assert not bed.rest.arm_or_give_way(busy=True)
    assert (bed.num_arms, bed.num_ways_given) == (0, 0)
    bed.now_s += SPIN_S
    assert bed.rest.arm_or_give_way(busy=True)


def test_an_idle_one_sleeps_at_once() -> None:
    bed = Bed(agrees=True)
    bed.rest.disturb()
    assert bed.rest.arm_or_give_way(busy=False)
    assert bed.num_ways_given == 0


def test_where_ucx_does_not_sleep_the_core_is_given_away() -> None:
    bed = Bed(agrees=False)
    bed.rest.disturb()
    assert not bed.rest.arm_or_give_way(busy=False)
    bed.now_s += 2 * SPIN_S
    assert not bed.rest.arm_or_give_way(busy=True)
    assert bed.num_ways_given == 2
