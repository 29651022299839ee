"""Counters of the dispatcher, as plain numbers.

Owns ``DispatchStats``; ``gateway/metrics.py`` exports it to Prometheus, the simulator reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DispatchStats:
    """Totals since start, and what is in flight now."""

    num_in_flight: int = 0
    num_lingering: int = 0
    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused_busy: int = 0
    refused_no_capacity: int = 0
    prefill_failovers: int = 0
    decode_failovers: int = 0
    prefill_fallbacks: int = 0  # decode was told to compute the prompt itself
    updates_lost: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens_expected: int = 0
    cached_tokens_local: int = 0
    cached_tokens_store: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
