"""Which operations are hit: the core of fault injection, without a transport."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from transfer.fault_rules import FaultKind, Operation
from transfer.fault_schedule import Fault, FaultSchedule
from transfer.fault_text import parse_rules
from transfer.token import Endpoint

PEER = Endpoint("incarnation-1", "p", "h", loopback="port-1", tcp="10.0.0.1:9000", ucx="10.1.0.1:7")


def operation(right: str = "r", transport: str = "tcp", nbytes: int = 1000) -> Operation:
    assert right in ("r", "w")
    return Operation("r" if right == "r" else "w", transport, PEER, nbytes)


def schedule(text: str) -> FaultSchedule:
    return FaultSchedule(parse_rules(text))


def history(text: str, *, seed: int = 3, num: int = 400) -> list[Fault | None]:
    """What a schedule does to a fixed random sequence of operations."""
    rng = random.Random(seed)
    made = schedule(text)
    return [
        made.next(
            operation(rng.choice("rw"), rng.choice(["tcp", "shm"]), rng.randint(1, 1 << 20)),
            now_s=number / 10,
        )
        for number in range(num)
    ]


ALL_KINDS = (
    "read p=0.1 reset; write p=0.1 truncate after=1KiB..64KiB; any@shm p=0.2 corrupt=5; "
    "any nth=7 stall=1ms..9ms; any p=0.05 drop; any p=0.1 delay=1ms..2s; seed="
)


def test_the_same_seed_and_operations_give_the_same_faults() -> None:
    first = history(ALL_KINDS + "1")
    assert first == history(ALL_KINDS + "1")
    assert first != history(ALL_KINDS + "2")
    assert {fault.kind for fault in first if fault} == set(FaultKind)


def test_a_rule_does_what_it_did_when_others_are_added_behind_it() -> None:
    alone = history("read p=0.1 reset")
    joined = history("read p=0.1 reset; any p=0.5 drop")
    assert [fault for fault in joined if fault and fault.kind is FaultKind.RESET] == [
        fault for fault in alone if fault
    ]


def test_the_rule_written_first_wins_and_only_the_winner_uses_its_count() -> None:
    made = schedule("any nth=2 drop; any count=2 reset")
    kinds = [fault.kind if (fault := made.next(operation(), 0.0)) else None for _ in range(6)]
    reset, drop = FaultKind.RESET, FaultKind.DROP
    assert kinds == [reset, drop, reset, drop, None, drop]
    assert made.injected == Counter({drop: 3, reset: 2})


def test_every_nth_of_the_operations_that_a_rule_is_about_is_hit() -> None:
    made = schedule("write nth=3 drop")
    hits = []
    for number in range(1, 10):
        made.next(operation("r"), 0.0)
        hits += [number] if made.next(operation("w"), 0.0) else []
    assert hits == [3, 6, 9]


def test_a_probability_is_kept() -> None:
    made = schedule("any p=0.25 drop")
    hits = sum(made.next(operation(), 0.0) is not None for _ in range(4000))
    assert 900 < hits < 1100


@pytest.mark.parametrize(
    ("selector", "hit"),
    [
        ("read", True),
        ("write", False),
        ("any@tcp", True),
        ("any@shm", False),
        ("any peer=10.0.0.1", True),
        ("any peer=10.0.0.1:9000", True),
        ("any peer=10.1.0.1:7", True),
        ("any peer=port-1", True),
        ("any peer=incarnation-1", True),
        ("any peer=10.0.0.1:900", False),
        ("any peer=10.0.0", False),
        ("any from=5s", True),
        ("any from=6s", False),
        ("any until=5s", False),
        ("any until=5001ms", True),
    ],
)
def test_a_rule_hits_what_it_selects_and_nothing_else(selector: str, hit: bool) -> None:
    assert (schedule(f"{selector} drop").next(operation(), now_s=5.0) is not None) is hit


@pytest.mark.parametrize("kind", ["reset", "truncate", "stall=1ms"])
def test_a_fault_in_the_middle_leaves_at_least_one_byte(kind: str) -> None:
    drawn = schedule(f"any {kind}")
    given = schedule(f"any {kind} after=3..10")
    for nbytes in (1, 2, 3, 4, 5, 11, 500):
        places = set()
        for _ in range(200):
            fault = drawn.next(operation(nbytes=nbytes), 0.0)
            assert fault is not None
            places.add(fault.after_nbytes)
            bounded = given.next(operation(nbytes=nbytes), 0.0)
            assert (bounded is None) is (nbytes <= 3)
            assert bounded is None or 3 <= bounded.after_nbytes < min(11, nbytes)
        assert places <= set(range(nbytes))
        assert len(places) >= min(nbytes, 50)


def test_corruption_flips_as_many_bytes_as_asked_behind_those_that_are_spared() -> None:
    made = schedule("any corrupt=4 after=100")
    for nbytes in (101, 103, 104, 5000):
        fault = made.next(operation(nbytes=nbytes), 0.0)
        assert fault is not None
        places = [flip.position for flip in fault.flips]
        assert len(set(places)) == min(4, nbytes - 100)
        assert places == sorted(places)
        assert places[0] >= 100
        assert places[-1] < nbytes
        assert all(1 <= flip.mask <= 255 for flip in fault.flips)
    assert made.next(operation(nbytes=100), 0.0) is None


def test_pauses_are_drawn_from_their_range() -> None:
    made = schedule("any delay=10ms..20ms")
    pauses = [fault.pause_s for _ in range(100) if (fault := made.next(operation(), 0.0))]
    assert all(0.01 <= pause <= 0.02 for pause in pauses)
    assert len(set(pauses)) == 100
