"""Who should hold a page: fresh pages, losses, joins, drains, strays, other lives."""

from __future__ import annotations

import hashlib

from kvstore.page import PageKey
from kvstore.placement import Placement
from kvstore.replication.duties import Duties, Nodes
from transfer.identity import NodeId

KEYS = [PageKey(hashlib.sha256(b"%d" % i).digest()) for i in range(2000)]


def nodes(*names: str, lives: str = "1") -> Nodes:
    return Nodes(
        Placement([(NodeId(name), 1.0) for name in names]),
        {NodeId(name): lives for name in names},
    )


def settled(own: str, replicas: int, *names: str) -> Duties:
    duties = Duties(NodeId(own), replicas)
    duties.follow(nodes(*names))
    duties.settle()
    return duties


def mine(duties: Duties, replicas: int) -> list[PageKey]:
    """The keys that the own node should hold."""
    placement = duties.nodes.placement
    own = placement.node_ids.index(NodeId("a"))
    ranks = placement.ranks(KEYS, replicas).tolist()
    return [key for key, row in zip(KEYS, ranks, strict=True) if own in row]


def test_a_fresh_page_is_owed_to_the_other_holders() -> None:
    duties = settled("a", 2, "a", "b", "c")
    owed = duties.owed(mine(duties, 2))
    assert not owed.surplus
    assert set(owed.to) == {"b", "c"}
    assert sum(map(len, owed.to.values())) == len(mine(duties, 2)), "each once"


def test_one_replica_is_owed_to_nobody() -> None:
    duties = settled("a", 1, "a", "b", "c")
    assert duties.owed(mine(duties, 1)) == ({}, [])


def test_a_stray_is_surplus_and_owed_to_where_it_belongs() -> None:
    duties = settled("a", 1, "a", "b", "c")
    strays = [key for key in KEYS if key not in set(mine(duties, 1))]
    owed = duties.owed(strays)
    assert owed.surplus == strays
    placed = duties.nodes.placement.place(strays)
    for node_id, some in owed.to.items():
        wanted = [k for k, n in zip(strays, placed, strict=True) if n == node_id]
        assert some == wanted


def test_after_a_loss_only_pages_of_the_lost_node_are_owed() -> None:
    duties = settled("a", 2, "a", "b", "c", "d")
    held = mine(duties, 2)
    shared = [
        key
        for key, row in zip(KEYS, duties.nodes.placement.ranks(KEYS, 2).tolist(), strict=True)
        if sorted(row) == [0, 3]
    ]
    assert duties.follow(nodes("a", "b", "c"))
    owed = duties.owed(held, changed_only=True)
    assert sorted(key for some in owed.to.values() for key in some) == sorted(shared)
    assert not owed.surplus


def test_after_a_join_the_new_nodes_share_is_owed_and_surplus_where_it_displaces() -> None:
    duties = settled("a", 1, "a", "b", "c")
    held = mine(duties, 1)
    duties.follow(nodes("a", "b", "c", "d"))
    owed = duties.owed(held, changed_only=True)
    assert set(owed.to) == {"d"}
    assert owed.to[NodeId("d")] == owed.surplus
    assert 0.15 < len(owed.surplus) / len(held) < 0.35


def test_a_node_that_drains_owes_everything_it_holds() -> None:
    duties = settled("a", 2, "a", "b", "c")
    held = mine(duties, 2)
    duties.follow(nodes("b", "c"))
    owed = duties.owed(held, changed_only=True)
    assert owed.surplus == held
    assert owed.to == {NodeId("b"): held, NodeId("c"): held}


def test_another_life_of_a_node_has_lost_what_it_held() -> None:
    duties = settled("a", 2, "a", "b")
    again = nodes("a", "b")
    other = Nodes(again.placement, {NodeId("a"): "1", NodeId("b"): "2"})
    assert duties.follow(other)
    assert duties.owed(KEYS, changed_only=True).to == {NodeId("b"): KEYS}


def test_nothing_changes_with_the_same_nodes() -> None:
    duties = settled("a", 2, "a", "b", "c")
    assert not duties.follow(nodes("c", "b", "a"))
    assert duties.owed(mine(duties, 2), changed_only=True) == ({}, [])


def test_a_node_alone_owes_nothing() -> None:
    assert settled("a", 3, "a").owed(KEYS) == ({}, [])
    assert Duties(NodeId("a"), 2).owed(KEYS) == ({}, [])


def test_the_next_in_rank_stands_in_for_a_node_that_does_not_answer() -> None:
    duties = settled("a", 2, "a", "b", "c", "d")
    held = mine(duties, 2)
    ranks = duties.nodes.placement.ranks(held, 4).tolist()
    to = duties.substitutes(held, [NodeId("b")])
    for key, row in zip(held, ranks, strict=True):
        holders = [node for node in ("c", "d") if key in to.get(NodeId(node), ())]
        third = duties.nodes.placement.node_ids[row[2]]
        assert holders == ([third] if 1 in row[:2] else [])
    assert NodeId("a") not in to
    assert duties.substitutes(held, []) == {}


def test_nobody_stands_in_when_there_is_nobody_left() -> None:
    duties = settled("a", 2, "a", "b")
    assert duties.substitutes(KEYS, [NodeId("b")]) == {}


def test_a_hot_page_is_owed_to_more_nodes() -> None:
    duties = settled("a", 1, "a", "b", "c", "d")
    key = mine(duties, 1)[:1]
    assert len(duties.owed(key, num_nodes=4).to) == 3
