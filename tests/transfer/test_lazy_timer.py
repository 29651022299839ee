"""A lazy timer fires at the latest when it was armed for, and is moved only to fire sooner."""

from __future__ import annotations

import asyncio
import random

from tests.sim.loop import SimLoop
from transfer.lazy_timer import LazyTimer


def fired_at(*arms: tuple[float, float], cancel_s: float | None = None) -> list[float]:
    """When a timer fires that is armed at ``(at_s, due_s)`` on a virtual clock."""
    fired: list[float] = []

    async def body() -> None:
        loop = asyncio.get_running_loop()

        def fire(now_s: float, late_s: float) -> None:
            assert late_s >= 0
            fired.append(round(now_s, 6))

        timer = LazyTimer(fire)
        for at_s, due_s in arms:
            loop.call_at(at_s, timer.arm, due_s)
        if cancel_s is not None:
            loop.call_at(cancel_s, timer.cancel)
            loop.call_at(cancel_s, timer.cancel)
        await asyncio.sleep(100)

    with asyncio.Runner(loop_factory=lambda: SimLoop(random.Random(1))) as runner:
        runner.run(body())
    return fired


def test_put_off_it_still_fires_at_the_first_time_and_only_once() -> None:
    assert fired_at((1, 5), (2, 9)) == [5]


def test_a_sooner_time_moves_it() -> None:
    assert fired_at((1, 9), (2, 5)) == [5]


def test_it_may_be_armed_again_after_it_fired() -> None:
    assert fired_at((1, 5), (6, 9)) == [5, 9]


def test_a_cancelled_timer_is_silent_until_armed_again() -> None:
    assert fired_at((1, 5), cancel_s=2) == []
    assert fired_at((1, 5), (3, 8), cancel_s=2) == [8]
