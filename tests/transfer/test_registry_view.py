"""What a watcher makes of a registry that has begun another life, without a clock."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from tests.transfer.test_registry import info
from transfer.identity import Incarnation, NodeId, Role
from transfer.membership import Member, MembershipView, NodeStatus
from transfer.registry import LEASE_TTL_S, MAX_MEMBERS
from transfer.registry_client import BACKOFF_MAX_S, CONNECT_TIMEOUT_S
from transfer.registry_view import HOLD_S, RegistryView

ONE, TWO, THREE = Incarnation("one"), Incarnation("two"), Incarnation("three")


def listing(*names: str, life: int = 1, age_s: float = 0.0) -> MembershipView:
    """What a registry lists."""
    members = (
        Member(info=info(name, life), status=NodeStatus(), heartbeat_age_s=age_s) for name in names
    )
    return MembershipView(version=1, members=tuple(members))


def names(seen: RegistryView, now_s: float = 0.0) -> list[str]:
    return [member.node_id for member in seen.view(now_s).members]


def lives(seen: RegistryView) -> list[str]:
    return [member.info.identity.incarnation for member in seen.view(0.0).members]


def watcher(*present: str) -> RegistryView:
    """Who has seen ``present`` in the registry's first life."""
    seen = RegistryView()
    seen.take(0.0, ONE, listing(*present))
    return seen


def test_the_hold_lasts_for_a_lease_and_for_a_try_to_connect_and_the_pause_after_it() -> None:
    assert HOLD_S >= LEASE_TTL_S + CONNECT_TIMEOUT_S + BACKOFF_MAX_S


def test_in_one_life_the_registry_is_believed_at_once() -> None:
    seen = watcher("a", "b")
    assert not seen.take(1.0, ONE, listing("b", "c"))
    assert names(seen) == ["b", "c"]
    assert not seen.take(2.0, ONE, listing())
    assert names(seen) == []
    assert seen.next_timer_s() is None


def test_another_life_that_knows_nobody_removes_nobody_until_the_hold_is_over() -> None:
    seen = watcher("a", "b", "c")
    assert seen.take(60.0, TWO, listing())
    assert names(seen) == ["a", "b", "c"]
    assert seen.take(60.3, TWO, listing("b")) is False
    assert names(seen) == ["a", "b", "c"]
    assert seen.num_held == 2
    assert seen.next_timer_s() == 60.0 + HOLD_S
    assert seen.tick(60.0 + HOLD_S - 0.1) == []
    version = seen.version
    assert seen.tick(60.0 + HOLD_S) == ["a", "c"]
    assert names(seen) == ["b"]
    assert seen.version == version + 1
    assert seen.next_timer_s() is None


def test_whom_the_new_life_has_listed_and_removed_is_gone_at_once() -> None:
    seen = watcher("a", "b")
    seen.take(60.0, TWO, listing("a"))
    seen.take(60.1, TWO, listing())
    assert names(seen) == ["b"]


def test_another_incarnation_replaces_the_one_that_is_held() -> None:
    seen = watcher("a", "b")
    seen.take(60.0, TWO, listing("a", life=2))
    assert lives(seen) == ["a/2", "b/1"]
    assert seen.tick(60.0 + HOLD_S) == ["b"]


def test_a_third_life_holds_again_whom_the_second_had_no_time_to_list() -> None:
    seen = watcher("a", "b")
    seen.take(60.0, TWO, listing("b"))
    seen.take(62.0, THREE, listing())
    assert seen.tick(60.0 + HOLD_S) == []
    assert names(seen) == ["a", "b"]
    assert seen.tick(62.0 + HOLD_S) == ["a", "b"]


def test_whom_a_life_has_removed_the_next_one_does_not_hold() -> None:
    seen = watcher("a", "b")
    seen.take(1.0, ONE, listing("b"))
    seen.take(60.0, TWO, listing())
    assert names(seen) == ["b"]


def test_a_watcher_that_reconnects_to_the_same_life_goes_on_holding() -> None:
    seen = watcher("a", "b")
    seen.take(60.0, TWO, listing())
    assert not seen.take(63.0, TWO, listing("a"))
    assert names(seen) == ["a", "b"]
    assert seen.next_timer_s() == 60.0 + HOLD_S


def test_the_process_that_was_the_registry_is_gone_with_it() -> None:
    gateway = info("gateway", role=Role.GATEWAY)
    before = (*listing("a").members, Member(info=gateway, status=NodeStatus()))
    seen = RegistryView()
    seen.take(0.0, gateway.identity.incarnation, MembershipView(members=before))
    assert names(seen) == ["a", "gateway"]
    seen.take(60.0, TWO, listing())
    assert names(seen) == ["a"]


def test_a_watcher_that_stood_still_itself_starts_the_hold_anew() -> None:
    seen = watcher("a")
    seen.take(60.0, TWO, listing())
    seen.forgive(90.0)
    assert seen.tick(90.0) == []
    assert seen.tick(90.0 + HOLD_S) == ["a"]


def test_versions_rise_and_ages_go_on_over_the_lives_of_the_registry() -> None:
    seen = RegistryView()
    seen.take(10.0, ONE, structs.replace(listing("a", age_s=0.5), version=90))
    first = seen.view(10.0)
    assert first.members[0].heartbeat_age_s == 0.5
    seen.take(12.0, TWO, listing())
    second = seen.view(12.0)
    assert second.version > first.version
    assert second.members[0].heartbeat_age_s == 2.5


def test_lives_that_follow_each_other_do_not_add_up_without_limit() -> None:
    seen = RegistryView()
    for life in range(3):
        some = [f"{life}.{n}" for n in range(MAX_MEMBERS - 1)]
        seen.take(0.0, Incarnation(f"life {life}"), listing(*some))
        assert seen.num_held <= MAX_MEMBERS


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_agree_with_a_naive_model(seed: int) -> None:
    """The model: for each member whether it is listed, and until when it stays if not."""
    rng = random.Random(seed)
    seen, model, life, now_s = RegistryView(), dict[str, tuple[int, float | None]](), 0, 0.0
    listed: dict[str, int] = {}  # name -> life of the member, in the registry
    for _ in range(300):
        now_s += rng.expovariate(1)
        if rng.random() < 0.1:
            life, listed = life + 1, {}
            model = {name: (member, now_s + HOLD_S) for name, (member, _) in model.items()}
        elif rng.random() < 0.6:
            listed[rng.choice("abcdef")] = rng.randrange(3)
        else:
            listed.pop(rng.choice("abcdef"), None)
        members = [m for n, of in sorted(listed.items()) for m in listing(n, life=of).members]
        seen.take(now_s, Incarnation(str(life)), MembershipView(members=tuple(members)))
        model = {n: seat for n, seat in model.items() if seat[1] is not None}
        model |= {name: (member, None) for name, member in listed.items()}
        over = {n for n, (_, end_s) in model.items() if end_s is not None and now_s >= end_s}
        assert seen.tick(now_s) == sorted(over)
        model = {n: seat for n, seat in model.items() if n not in over}
        assert names(seen) == sorted(model)
        assert lives(seen) == [f"{n}/{member}" for n, (member, _) in sorted(model.items())]
        ends = [end_s for _, end_s in model.values() if end_s is not None]
        assert seen.next_timer_s() == min(ends, default=None)
        assert all(seen.view(now_s).get(NodeId(n)) for n in listed)
