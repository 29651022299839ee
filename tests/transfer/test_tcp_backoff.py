"""Back-off between connects, with the time passed in."""

from __future__ import annotations

import gc
import weakref

from transfer.errors import PeerUnreachable, Stale
from transfer.tcp_backoff import BACKOFF_FIRST_S, BACKOFF_MAX_S, Backoff


def fail_until(backoff: Backoff, num_failures: int) -> float:
    """Fail as soon as a try is allowed; return the time of the last failure."""
    now_s = 0.0
    for _ in range(num_failures):
        while backoff.refusal(now_s) is not None:
            now_s += 0.001
        backoff.failed(now_s, PeerUnreachable("nobody there"))
    return now_s


def test_a_peer_that_has_not_failed_may_be_tried() -> None:
    assert Backoff().refusal(0.0) is None


def test_delays_double_and_stay_at_the_maximum() -> None:
    backoff, delays = Backoff(), []
    for _ in range(8):
        backoff.failed(100.0, PeerUnreachable("nobody there"))
        delays.append(next(ms for ms in range(2000) if not backoff.refusal(100.0 + ms / 1000)))
    first, most = round(BACKOFF_FIRST_S * 1000), round(BACKOFF_MAX_S * 1000)
    assert delays[:4] == [first, 2 * first, 4 * first, 8 * first]
    assert delays[-1] == most


def test_a_peer_that_is_back_may_be_tried_within_a_second_however_long_it_was_gone() -> None:
    backoff = Backoff()
    now_s = fail_until(backoff, 50)
    assert backoff.refusal(now_s + BACKOFF_MAX_S) is None
    assert BACKOFF_MAX_S < 1.0


def test_a_refusal_is_an_error_of_the_last_ones_kind_and_says_when_to_come_back() -> None:
    backoff = Backoff()
    backoff.failed(7.0, Stale("restarted"))
    refusal = backoff.refusal(7.0)
    assert isinstance(refusal, Stale)
    assert str(refusal) == "restarted (next try in 50 ms)"


def test_success_forgets_the_failures() -> None:
    backoff = Backoff()
    now_s = fail_until(backoff, 5)
    backoff.succeeded()
    assert backoff.refusal(now_s) is None
    backoff.failed(now_s, PeerUnreachable("again"))
    assert backoff.refusal(now_s + BACKOFF_FIRST_S) is None


def test_a_remembered_error_holds_on_to_nothing_of_the_operation_that_met_it() -> None:
    """Its traceback refers to frames, and those to the memory that was to be read into."""

    class Memory:
        pass

    backoff, seen = Backoff(), []

    def operation() -> None:
        memory = Memory()
        seen.append(weakref.ref(memory))
        raise PeerUnreachable("nobody there")

    try:
        operation()
    except PeerUnreachable as error:
        backoff.failed(0.0, error)
    gc.collect()
    assert seen[0]() is None
    assert backoff.refusal(0.0) is not None
