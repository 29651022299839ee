"""``make demo``: a conversation of three turns, answered by four processes, with what it took.

Owns the conversation and the table. The cluster is the one that ``kvferry up`` starts, on free
ports; the questions go through the HTTP API with streaming, as any client would send them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, NamedTuple

import uvloop

from launch import model_store, process_env
from launch.cluster import LocalCluster
from launch.config import UpOptions
from launch.errors import LaunchError
from launch.http_client import post_events
from launch.progress import say
from launch.runtime import setup_logging
from launch.sizes import human_size

QUESTIONS = (
    "What is the capital of France?",
    "How should I spend one day there?",
    "Which museum should I see first, and why?",
)
MAX_TOKENS = 96
TIMEOUT_S = 120.0


class Turn(NamedTuple):
    """One answer and what it took."""

    text: str
    trace: dict[str, Any]
    usage: dict[str, Any]
    ttft_s: float
    tokens_per_s: float


def ask(url: str, model: str, messages: list[dict[str, str]]) -> Turn:
    """Send the conversation, print the answer as it arrives."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    arrivals: list[float] = []
    text = ""
    trace: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    headers = {"x-kvferry-trace": "1"}
    for event in post_events(
        f"{url}/v1/chat/completions", body, headers=headers, timeout_s=TIMEOUT_S
    ):
        trace = event.get("kvferry") or trace
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if piece := choice["delta"].get("content"):
                arrivals.append(time.monotonic())
                text += piece
                print(piece, end="", flush=True)
    print(flush=True)
    if not arrivals or not usage:
        raise LaunchError(f"{url}: the answer has no text or no usage")
    spent = max(arrivals[-1] - arrivals[0], 1e-9)
    rate = (usage["completion_tokens"] - 1) / spent
    return Turn(text, trace, usage, arrivals[0] - started, rate)


def report(number: int, turn: Turn) -> str:
    """Return what one turn took, for people."""
    trace, usage = turn.trace, turn.usage
    cached = trace["cached_tokens"]
    return (
        f"  turn {number}: prompt {usage['prompt_tokens']} tokens: "
        f"{trace['prefill_node']} computed {trace['computed_tokens']}, "
        f"{cached['local']} from its radix cache, {cached['store']} from the store\n"
        f"          {trace['decode_node']} generated {usage['completion_tokens']} tokens; "
        f"pages pushed {trace['pages_pushed']} ({human_size(trace['bytes_pushed'])}), "
        f"pulled {trace['pages_pulled']} ({human_size(trace['bytes_pulled'])}) "
        f"over {trace['transport']}\n"
        f"          TTFT {turn.ttft_s * 1e3:.0f} ms, {turn.tokens_per_s:.1f} tokens/s"
    )


def converse(url: str, model: str) -> list[Turn]:
    """Hold the conversation. Blocking."""
    messages: list[dict[str, str]] = []
    turns: list[Turn] = []
    for number, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        print(f"\n> {question}", flush=True)
        turn = ask(url, model, messages)
        messages.append({"role": "assistant", "content": turn.text})
        print(report(number, turn), flush=True)
        turns.append(turn)
    return turns


def check(turns: list[Turn]) -> None:
    """Raise unless the conversation went the way it is meant to: this is a demonstration.

    Raises:
        LaunchError: prompt and answer came from one node, or a later turn started from nothing.
    """
    for number, turn in enumerate(turns, 1):
        trace = turn.trace
        if trace["prefill_node"] is None or trace["prefill_node"] == trace["decode_node"]:
            raise LaunchError(f"turn {number} was not served by two nodes: {trace}")
        if trace["pages_pulled"] == 0:
            raise LaunchError(f"turn {number} moved no page through the store: {trace}")
    cached = turns[-1].trace["cached_tokens"]
    if cached["local"] + cached["store"] == 0:
        raise LaunchError(f"the last turn found nothing in any cache: {cached}")


async def demo() -> None:
    """Start, converse, stop."""
    model = model_store.DEFAULT_MODEL
    cluster = LocalCluster(UpOptions.of(model=model, port=0, log_level="warning"))
    started = time.monotonic()
    say("starting one gateway, one store, one prefill and one decode process")
    try:
        await cluster.start()
        pids = ", ".join(f"{name} (pid {pid})" for name, pid in cluster.pids.items())
        say(f"ready after {time.monotonic() - started:.1f} s: {pids}")
        turns = await asyncio.to_thread(converse, cluster.url, model)
        check(turns)
    finally:
        await cluster.drain(5.0)
    say("everything is stopped")


def main() -> int:
    """Run the demo; return the exit code."""
    setup_logging("warning")
    process_env.die_with_parent()
    try:
        model_store.pull(model_store.DEFAULT_MODEL)
        uvloop.run(demo())
    except LaunchError as error:
        say(f"kvferry: error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
