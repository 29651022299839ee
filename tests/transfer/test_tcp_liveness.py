"""Vanished or slow: the rule, fed with what kernels report."""

from __future__ import annotations

import socket

from transfer.tcp_liveness import (
    KEEPALIVE_IDLE_S,
    LIVENESS_CHECK_S,
    LIVENESS_S,
    SUSPECT_S,
    Liveness,
    TcpInfo,
    tcp_info,
)

QUIET = TcpInfo(retransmits=0, probes=0, last_ack_s=600.0, to_send=False)
FIRST_RETRANSMISSION_S = 0.2


def seconds_to_vanish(views: list[TcpInfo]) -> float | None:
    """Show one view at each check; return when the peer was given up, None if it was not."""
    liveness = Liveness()
    for number, view in enumerate(views):
        if liveness.has_vanished(view, 100.0 + number * LIVENESS_CHECK_S):
            return number * LIVENESS_CHECK_S
    return None


def unanswered(num_checks: int, before_s: float = 0.0) -> list[TcpInfo]:
    """A host that is gone: the kernel repeats itself, and the last answer gets older."""
    ages = [before_s + FIRST_RETRANSMISSION_S + n * LIVENESS_CHECK_S for n in range(num_checks)]
    return [TcpInfo(retransmits=1, probes=0, last_ack_s=age, to_send=True) for age in ages]


def test_silence_means_nothing_while_nothing_was_asked() -> None:
    assert seconds_to_vanish([QUIET] * 1000) is None


def test_a_host_that_answers_nothing_is_given_up_in_time_and_not_before() -> None:
    found = seconds_to_vanish(unanswered(100))
    assert found is not None
    assert found >= SUSPECT_S
    assert FIRST_RETRANSMISSION_S + LIVENESS_CHECK_S + found < LIVENESS_S


def test_a_keepalive_probe_without_an_answer_ends_the_waiting_in_time() -> None:
    ages = [KEEPALIVE_IDLE_S + n * LIVENESS_CHECK_S for n in range(100)]
    found = seconds_to_vanish([TcpInfo(0, 1, age, to_send=False) for age in ages])
    assert found is not None
    assert KEEPALIVE_IDLE_S + LIVENESS_CHECK_S + found < LIVENESS_S


def test_a_packet_that_is_lost_after_a_long_pause_ends_nothing() -> None:
    assert seconds_to_vanish([QUIET, *unanswered(5, before_s=600.0), QUIET] * 50) is None


def test_a_stopped_process_whose_kernel_answers_probes_is_never_given_up() -> None:
    probed = [TcpInfo(0, probes=1, last_ack_s=age / 10, to_send=True) for age in (1, 2, 3, 0)]
    assert seconds_to_vanish(probed * 1000) is None


def test_an_answer_starts_the_clock_anew() -> None:
    almost = unanswered(int(SUSPECT_S / LIVENESS_CHECK_S) - 2)
    answered = TcpInfo(retransmits=1, probes=0, last_ack_s=0.0, to_send=True)
    assert seconds_to_vanish([*almost, answered] * 20) is None


def test_the_kernel_tells_of_a_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
    ):
        info = tcp_info(sock)
    assert info is not None
    assert info.retransmits == info.probes == 0
    assert not info.to_send
    assert info.last_ack_s < 60.0
    closed = socket.socket()
    closed.close()
    assert tcp_info(closed) is None
