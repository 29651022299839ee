"""The ``kvferry`` object of a response."""

from __future__ import annotations

from gateway.trace import GenerationTrace


def test_durations_are_shown_to_the_microsecond() -> None:
    shown = GenerationTrace(ttft_s=0.12345678901, queue_s=1 / 3, pull_s=2e-7).to_object()
    assert shown["ttft_s"] == 0.123457
    assert shown["queue_s"] == 0.333333
    assert shown["transfer_s"] == 0.0


def test_a_time_to_first_token_that_never_came_stays_none() -> None:
    assert GenerationTrace().to_object()["ttft_s"] is None
