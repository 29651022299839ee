"""A completion client for measurements: token ids in, token ids with arrival times out."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from launch.http_client import post_events

TIMEOUT_S = 600.0


class Answer(NamedTuple):
    """One streamed completion. ``arrivals`` has one time per token."""

    tokens: list[int]
    arrivals: list[float]
    sent: float
    ended: float
    trace: dict[str, Any]


def complete(url: str, model: str, prompt: list[int], max_tokens: int) -> Answer:
    """One greedy completion of exactly ``max_tokens`` tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens: list[int] = []
    arrivals: list[float] = []
    trace: dict[str, Any] = {}
    sent = time.perf_counter()
    events = post_events(
        f"{url}/v1/completions", body, headers={"x-kvferry-trace": "1"}, timeout_s=TIMEOUT_S
    )
    for event in events:
        trace = event.get("kvferry") or trace
        for choice in event.get("choices", ()):
            new = choice.get("token_ids") or []
            tokens += new
            arrivals += [time.perf_counter()] * len(new)
    return Answer(tokens, arrivals, sent, time.perf_counter(), trace)


def complete_all(
    url: str, model: str, prompts: list[list[int]], max_tokens: int, at_once: int
) -> list[Answer]:
    """Complete every prompt, ``at_once`` at a time, in order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(url, model, prompt, max_tokens), prompts))
