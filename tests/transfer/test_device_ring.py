"""Who gets a bounce slot, and when."""

from __future__ import annotations

import random

from transfer.device_ring import BACKGROUND_TURN, BounceRing, Ticket
from transfer.interface import Priority

NOW, BACKGROUND = Priority.NOW, Priority.BACKGROUND


def ask(ring: BounceRing, peer: str, priority: Priority = NOW) -> Ticket:
    return ring.ask(peer, priority, lambda: None)


def test_slots_are_granted_in_the_order_of_asking() -> None:
    ring = BounceRing(max_slots=2, max_per_peer=2)
    tickets = [ask(ring, peer) for peer in "abcd"]
    assert [ticket.slot is not None for ticket in tickets] == [True, True, False, False]
    ring.give_back(tickets[1])
    assert tickets[2].slot is not None
    assert tickets[3].slot is None


def test_the_one_who_waits_is_told() -> None:
    ring = BounceRing(max_slots=1, max_per_peer=1)
    told: list[str] = []
    first = ring.ask("a", NOW, lambda: told.append("a"))
    ring.ask("b", NOW, lambda: told.append("b"))
    assert told == ["a"]
    ring.give_back(first)
    assert told == ["a", "b"]


def test_a_peer_that_stalls_leaves_slots_to_the_others() -> None:
    ring = BounceRing(max_slots=4, max_per_peer=2)
    stalled = [ask(ring, "stalled") for _ in range(10)]
    other = ask(ring, "other")
    assert sum(ticket.slot is not None for ticket in stalled) == 2
    assert other.slot is not None


def test_urgent_work_goes_first_and_background_is_not_starved() -> None:
    ring = BounceRing(max_slots=1, max_per_peer=1)
    held = ask(ring, "x")
    background = [ask(ring, "b", BACKGROUND) for _ in range(3)]
    urgent = [ask(ring, "u") for _ in range(20)]
    order: list[Priority] = []
    for _ in range(2 * BACKGROUND_TURN):
        ring.give_back(held)
        held = next(t for t in (*background, *urgent) if t.slot is not None)
        (background if held in background else urgent).remove(held)
        order.append(held.priority)
    assert order == ([NOW] * (BACKGROUND_TURN - 1) + [BACKGROUND]) * 2


def test_whoever_leaves_the_line_gets_nothing() -> None:
    ring = BounceRing(max_slots=1, max_per_peer=1)
    held, leaver, stayer = (ask(ring, peer) for peer in "abc")
    ring.give_back(leaver)
    ring.give_back(held)
    assert leaver.slot is None
    assert stayer.slot is not None


def test_random_use_never_breaks_the_limits_nor_loses_a_slot() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        max_slots, max_per_peer = rng.randint(1, 6), rng.randint(1, 4)
        ring = BounceRing(max_slots=max_slots, max_per_peer=max_per_peer)
        tickets: list[Ticket] = []
        for _ in range(300):
            if tickets and rng.random() < 0.5:
                ring.give_back(tickets.pop(rng.randrange(len(tickets))))
            else:
                tickets.append(ask(ring, rng.choice("abcd"), rng.choice(list(Priority))))
            held = [t for t in tickets if t.slot is not None]
            assert len({t.slot for t in held}) == len(held)
            assert ring.num_free == max_slots - len(held)
            assert ring.num_waiting == len(tickets) - len(held)
            by_peer = {peer: sum(t.peer == peer for t in held) for peer in "abcd"}
            assert max(by_peer.values()) <= max_per_peer
            if ring.num_free:  # nobody waits who could have one
                waiting = {t.peer for t in tickets if t.slot is None}
                assert all(by_peer[str(peer)] == max_per_peer for peer in waiting)
        for ticket in tickets:
            ring.give_back(ticket)
        assert ring.num_free == max_slots
