"""Eviction policies, priorities and pins: who goes first."""

from __future__ import annotations

import pytest

from kvstore.messages import ReserveStatus
from kvstore.server.policies import POLICIES
from kvstore.store import PutPolicy
from tests.kvstore.directories import directory, grant, match, present, reserve, single, store
from tests.kvstore.pages import sequence


def test_lru_evicts_the_page_that_was_used_longest_ago() -> None:
    d = directory(3)
    a, b, c = (single(i) for i in range(3))
    store(d, [a, b, c])
    match(d, [a])
    store(d, [single(3)])
    assert present(d, [a, b, c]) == [True, False, True]


def test_fifo_evicts_the_oldest_page_whatever_was_used() -> None:
    d = directory(3, policy="fifo")
    a, b, c = (single(i) for i in range(3))
    store(d, [a, b, c])
    match(d, [a])
    store(d, [single(3)])
    assert present(d, [a, b, c]) == [False, True, True]


def test_lfu_evicts_the_page_with_the_fewest_uses() -> None:
    d = directory(3, policy="lfu")
    a, b, c = (single(i) for i in range(3))
    store(d, [a, b, c])
    for page in (a, a, b, c, c):
        match(d, [page])
    store(d, [single(3)])
    assert present(d, [a, b, c]) == [True, False, True]


def test_slru_sacrifices_pages_of_one_scan_for_pages_that_were_used_again() -> None:
    d = directory(10, policy="slru")
    hot = [single(i) for i in range(4)]
    store(d, hot)
    match(d, hot)
    for i in range(10, 60):
        store(d, [single(i)])
        d.check()
    assert present(d, hot) == [True] * 4


def test_slru_lets_go_of_protected_pages_when_all_is_protected() -> None:
    d = directory(10, policy="slru")
    first = [single(i) for i in range(10)]
    store(d, first)
    match(d, first)
    for i in range(10, 40):
        store(d, [single(i)])
        match(d, [single(i)])
        d.check()
    assert present(d, first) == [False] * 10


def test_heat_forgets_old_uses_at_the_half_life() -> None:
    d = directory(2, policy="heat", half_life_s=10.0)
    once_hot, newer = single(0), single(1)
    store(d, [once_hot], now_s=0.0)
    for _ in range(7):
        match(d, [once_hot], now_s=0.0)
    assert d.uses(once_hot.key, 0.0) == pytest.approx(8)
    assert d.uses(once_hot.key, 10.0) == pytest.approx(4)
    store(d, [newer], now_s=20.0)
    store(d, [single(2)], now_s=20.0)
    assert present(d, [once_hot, newer]) == [True, False], "2 uses are left of 8, against 1"
    store(d, [single(3)], now_s=60.0)
    store(d, [single(4)], now_s=60.0)
    assert present(d, [once_hot]) == [False]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_lower_priority_goes_first_under_every_policy(policy: str) -> None:
    d = directory(3, policy=policy)
    low, high, usual = (single(i) for i in range(3))
    store(d, [low], policy=PutPolicy(priority=10))
    store(d, [high], policy=PutPolicy(priority=90))
    store(d, [usual])
    for _ in range(3):
        match(d, [low])
    store(d, [single(3)])
    assert present(d, [low, high, usual]) == [False, True, True]
    store(d, [single(4)], policy=PutPolicy(priority=95))
    assert present(d, [high, usual]) in ([True, False], [True, True])
    d.check()


def test_a_raised_priority_falls_back_when_its_time_is_over() -> None:
    d = directory(2)
    raised, usual = single(0), single(1)
    store(d, [raised], policy=PutPolicy(priority=90, priority_s=10.0))
    store(d, [usual])
    d.tick(9.9, 0)
    kept = d.kept_as(raised.key)
    assert kept is not None
    assert kept.policy.priority == 90
    assert kept.policy.priority_s == pytest.approx(0.1)
    d.tick(10.0, 0)
    assert d.counters["lapsed_priorities"] == 1
    store(d, [single(2)], now_s=10.0)
    assert present(d, [raised, usual]) == [False, True], "it is the older of two equals now"
    d.check()


def test_a_lowered_priority_stays_low() -> None:
    d = directory(2)
    lowered, usual = single(0), single(1)
    store(d, [usual])
    store(d, [lowered], policy=PutPolicy(priority=5, priority_s=1.0))
    d.tick(100.0, 0)
    store(d, [single(2)], now_s=100.0)
    assert present(d, [lowered, usual]) == [False, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 101), ("priority", -1), ("priority_s", 0.0), ("namespace", b"short")],
)
def test_a_policy_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        PutPolicy(**{field: value})  # type: ignore[arg-type]


def test_a_pinned_page_is_never_evicted_and_pins_are_bounded() -> None:
    d = directory(4)
    a, b, c = (single(i) for i in range(3))
    store(d, [a, b])
    assert d.pin([a.key, b.key, c.key]) == [True, False, False], "a quarter of four pages"
    assert d.pin([a.key]) == [True]
    for i in range(10, 20):
        store(d, [single(i)])
    assert present(d, [a, b]) == [True, False]
    assert d.counters["pins_refused"] == 1
    d.check()
    assert d.unpin([a.key, b.key]) == [True, False]
    for i in range(20, 24):
        store(d, [single(i)])
    assert present(d, [a]) == [False]
    d.check()


def test_a_pinned_leaf_keeps_its_trunk() -> None:
    d = directory(8)
    chain = sequence(range(12))
    store(d, chain)
    assert d.pin([chain[2].key]) == [True]
    for i in range(10, 30):
        store(d, [single(i)])
    assert present(d, chain) == [True] * 3


def test_clearing_a_namespace_leaves_the_others() -> None:
    d = directory(4)
    mine, other = single(0), single(1)
    store(d, [mine], policy=PutPolicy(namespace=b"m" * 32))
    store(d, [other], policy=PutPolicy(namespace=b"o" * 32))
    assert d.clear(b"x" * 32) == 0
    assert d.clear(b"m" * 32) == 1
    assert present(d, [mine, other]) == [False, True]
    d.check()


def test_cooled_pages_are_the_next_to_go() -> None:
    d = directory(3)
    a, b, c = (single(i) for i in range(3))
    store(d, [a, b, c])
    assert d.cool([c.key, single(9).key]) == 1
    store(d, [single(3)])
    assert present(d, [a, b, c]) == [True, True, False]
    assert d.cool([b.key]) == 1
    match(d, [b])
    store(d, [single(4)])
    assert present(d, [a, b]) == [False, True], "a page that is used again is warm again"
    d.check()


def test_filling_far_beyond_capacity_keeps_the_watermark_and_refuses_nothing() -> None:
    d = directory(100, high=0.9, low=0.8)
    for i in range(1000):
        assert reserve(d, single(i)).status is ReserveStatus.GRANTED
        slot = d.find(single(i).key, i + 1)
        assert slot is not None
        assert d.commit(single(i).key, i + 1, b"c" * 16)
        assert d.segment.used_nbytes <= d.segment.nbytes * 0.91
    assert d.counters["evicted"] == d.counters["evicted_watermark"] > 800
    assert grant(d, single(5000))
    d.check()
