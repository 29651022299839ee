"""The cost model: decisions from rates, and what it learns."""

from __future__ import annotations

from prefill_node.restore_model import (
    DEADLINE_FLOOR_S,
    PROBE_EVERY,
    PROBE_PAGES,
    Decision,
    RestoreModel,
)

PAGE_NBYTES = 1_000_000


def model(restore: float = 1e9, compute: float = 1000.0) -> RestoreModel:
    return RestoreModel(latency_s=0.001, restore_bytes_per_s=restore, compute_tokens_per_s=compute)


def decide(m: RestoreModel, num_pages: int = 10) -> Decision:
    return m.decide(num_pages=num_pages, page_nbytes=PAGE_NBYTES, num_tokens=num_pages * 16)


def test_the_cheaper_way_is_chosen_and_both_numbers_are_told() -> None:
    fast = decide(model())
    assert fast.restore
    assert (round(fast.restore_s, 4), round(fast.recompute_s, 4)) == (0.011, 0.16)
    slow = decide(model(restore=10e6))
    assert not slow.restore
    assert slow.restore_s > slow.recompute_s


def test_a_tiny_restore_is_not_worth_its_latency() -> None:
    assert not model(compute=1e6).decide(num_pages=1, page_nbytes=100, num_tokens=3).restore


def test_nothing_missing_is_never_restored() -> None:
    assert not model().decide(num_pages=0, page_nbytes=100, num_tokens=0).restore


def test_a_slow_tier_is_given_up_after_one_measurement() -> None:
    m = model()
    assert decide(m).restore
    m.observe_restore(nbytes=0, wanted_nbytes=10_000_000, elapsed_s=0.05)
    assert not decide(m).restore


def test_one_slowdown_serves_small_and_large_restores() -> None:
    m = model()
    for _ in range(20):
        m.observe_restore(nbytes=1000, wanted_nbytes=1000, elapsed_s=0.001)  # all latency
    assert 0.9 < m.slowdown < 1.1
    assert decide(m, num_pages=100).restore_s < 0.12


def test_a_probe_of_a_few_pages_does_not_flatter_the_tier() -> None:
    m = model(restore=1e6)
    m.observe_restore(nbytes=4_000_000, wanted_nbytes=4_000_000, elapsed_s=4.0)
    assert 0.95 < m.slowdown < 1.05


def test_a_restore_never_may_take_longer_than_recomputing_plus_a_floor() -> None:
    decision = decide(model(restore=1e8))
    assert decision.restore
    assert decision.timeout_s <= decision.recompute_s + DEADLINE_FLOOR_S + 1e-9


def test_a_tier_that_was_slow_is_probed_now_and_then_and_comes_back() -> None:
    m = model()
    for _ in range(5):
        m.observe_restore(nbytes=0, wanted_nbytes=10_000_000, elapsed_s=1.0)
    decisions = [decide(m) for _ in range(PROBE_EVERY)]
    assert [d.restore for d in decisions] == [False] * (PROBE_EVERY - 1) + [True]
    assert decisions[-1].probe
    assert decisions[-1].num_pages == PROBE_PAGES
    for _ in range(8):
        m.observe_restore(nbytes=4_000_000, wanted_nbytes=4_000_000, elapsed_s=0.005)
    assert decide(m).restore
    assert not decide(m).probe


def test_what_even_the_priors_find_too_slow_is_not_probed() -> None:
    m = model(restore=1e6)
    assert not any(decide(m).restore for _ in range(3 * PROBE_EVERY))


def test_the_compute_rate_follows_the_steps_and_ignores_a_clock_that_stands_still() -> None:
    m = model(compute=1000)
    m.observe_compute(512, 0.0)
    assert m.compute_rate.per_s == 1000
    for _ in range(20):
        m.observe_compute(512, 0.01)
    assert 45_000 < m.compute_rate.per_s <= 51_200
