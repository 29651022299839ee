"""Rendezvous placement: agreement, balance, minimal movement, weights, speed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections import Counter

import pytest

from kvstore.page import PageKey
from kvstore.placement import Placement, placement_of, replicas_of
from transfer.identity import NodeId, Role, new_identity
from transfer.membership import Member, MembershipView, NodeInfo, NodeStatus

KEYS = [PageKey(hashlib.sha256(str(i).encode()).digest()) for i in range(4000)]


def nodes(count: int) -> list[tuple[NodeId, float]]:
    return [(NodeId(f"store-{i}"), 1.0) for i in range(count)]


def test_the_order_of_nodes_does_not_matter() -> None:
    assert Placement(nodes(5)).place(KEYS) == Placement(nodes(5)[::-1]).place(KEYS)


def test_a_key_is_placed_alone_as_in_a_batch() -> None:
    placement = Placement(nodes(5))
    together = placement.place(KEYS[:50])
    assert [placement.place([key])[0] for key in KEYS[:50]] == together


@pytest.mark.parametrize("count", [2, 3, 8])
def test_pages_spread_evenly(count: int) -> None:
    load = Counter(Placement(nodes(count)).place(KEYS))
    assert len(load) == count
    assert max(load.values()) / min(load.values()) < 1.35


def test_a_join_moves_only_pages_to_the_new_node() -> None:
    before, after = Placement(nodes(4)).place(KEYS), Placement(nodes(5)).place(KEYS)
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {"store-4"}
    assert 0.15 < len(moved) / len(KEYS) < 0.25


def test_a_leave_moves_only_pages_of_the_node_that_left() -> None:
    before, after = Placement(nodes(5)).place(KEYS), Placement(nodes(5)[1:]).place(KEYS)
    assert {a for a, b in zip(before, after, strict=True) if a != b} == {"store-0"}


def test_a_node_of_double_weight_holds_double_the_pages() -> None:
    load = Counter(Placement([(NodeId("a"), 1.0), (NodeId("b"), 2.0)]).place(KEYS))
    assert 1.8 < load[NodeId("b")] / load[NodeId("a")] < 2.2


def test_fresh_processes_agree_whatever_their_hash_seed() -> None:
    script = (
        "import hashlib; from kvstore.placement import Placement\n"
        "keys=[hashlib.sha256(str(i).encode()).digest() for i in range(200)]\n"
        "print(Placement([(f'store-{i}', 1.0) for i in range(5)]).place(keys))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] == f"{Placement(nodes(5)).place(KEYS[:200])}\n"


def test_a_thousand_keys_on_eight_nodes_take_less_than_5_ms() -> None:
    placement = Placement(nodes(8))
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        placement.place(KEYS[:1000])
        best = min(best, time.perf_counter() - start)
    assert best < 0.005


def test_draining_and_other_roles_get_no_pages() -> None:
    def member(name: str, role: Role, *, draining: bool = False, weight: str = "1") -> Member:
        info = NodeInfo(
            identity=new_identity(role, name), address="", labels={"capacity_weight": weight}
        )
        return Member(info=info, status=NodeStatus(draining=draining))

    view = MembershipView(
        members=(
            member("a", Role.STORE),
            member("b", Role.STORE, draining=True),
            member("c", Role.PREFILL),
            member("d", Role.STORE, weight="nonsense"),
        )
    )
    assert placement_of(view).node_ids == ["a", "d"]


def test_ranks_begin_with_the_place_and_name_each_node_once() -> None:
    placement = Placement(nodes(5))
    ranks = placement.ranks(KEYS, 5)
    assert [placement.node_ids[i] for i in ranks[:, 0].tolist()] == placement.place(KEYS)
    assert all(sorted(row) == [0, 1, 2, 3, 4] for row in ranks.tolist())
    assert (placement.ranks(KEYS, 2) == ranks[:, :2]).all()


def test_ranks_are_as_many_as_there_are_nodes() -> None:
    assert Placement(nodes(2)).ranks(KEYS[:10], 4).shape == (10, 2)
    assert Placement(nodes(1)).ranks(KEYS[:10], 4).tolist() == [[0]] * 10
    assert Placement([]).ranks(KEYS[:10], 4).shape == (10, 0)
    assert Placement(nodes(3)).ranks([], 2).shape == (0, 2)


def test_ranks_do_not_depend_on_how_many_keys_are_asked_for() -> None:
    placement = Placement(nodes(3))
    many = [PageKey(hashlib.sha256(b"%d" % i).digest()) for i in range(100_000)]
    ranks = placement.ranks(many, 2)
    for i in (0, 50_000, 87_381, 87_382, 99_999):  # around the borders of the parts, too
        assert (placement.ranks([many[i]], 2)[0] == ranks[i]).all()


@pytest.mark.parametrize("count", [3, 8])
def test_every_rank_is_spread_evenly(count: int) -> None:
    ranks = Placement(nodes(count)).ranks(KEYS, 2)
    for column in range(2):
        load = Counter(ranks[:, column].tolist())
        assert max(load.values()) / min(load.values()) < 1.35


def test_after_a_join_the_previous_holder_is_the_next_in_rank() -> None:
    before, after = Placement(nodes(4)), Placement(nodes(5))
    old, new = before.ranks(KEYS, 1)[:, 0], after.ranks(KEYS, 2)
    moved = new[:, 0] == 4
    assert moved.any()
    assert (new[moved, 1] == old[moved]).all()
    assert (new[~moved, 0] == old[~moved]).all()


def test_after_a_leave_the_next_in_rank_takes_the_place() -> None:
    before, after = Placement(nodes(5)), Placement(nodes(4))
    old, new = before.ranks(KEYS, 2), after.ranks(KEYS, 1)[:, 0]
    lost = old[:, 0] == 4
    assert (new[lost] == old[lost, 1]).all()
    assert (new[~lost] == old[~lost, 0]).all()


def test_replicas_are_read_from_the_members_contracts_within_bounds() -> None:
    def view(*stated: str) -> MembershipView:
        members = tuple(
            Member(
                info=NodeInfo(
                    identity=new_identity(Role.STORE, f"s{i}"),
                    address="",
                    contract={"replicas": text} if text else {},
                ),
                status=NodeStatus(),
            )
            for i, text in enumerate(stated)
        )
        return MembershipView(members=members)

    assert replicas_of(view()) == 1
    assert replicas_of(view("", "2")) == 2
    assert replicas_of(view("nonsense", "-3", "0", "²")) == 1
    assert replicas_of(view("99")) == 8
