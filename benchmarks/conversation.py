"""Five turns of a chat: each computes its new tokens and at most one page more.

Two nodes of each role; the OpenAI Python client, unmodified. *New* are the prompt tokens of a turn
that were neither prompt nor answer of the turn before. Exit code 1 when a turn computed more.

    python -m benchmarks.conversation [--model smollm2-135m] [--tokens 48]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from openai import NotFoundError, OpenAI
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from kvstore.page import DEFAULT_PAGE_SIZE
from launch import model_store
from launch.cluster import LocalCluster
from launch.config import UpOptions
from launch.runtime import setup_logging

QUESTIONS = (
    "What is the capital of France?",
    "How should I spend one day there?",
    "Which museum should I see first, and why?",
    "And where do I eat afterwards?",
    "Thank you. Say all of that in one sentence.",
)


def converse(url: str, model: str, num_tokens: int) -> list[tuple[int, int, Any]]:
    """Return ``(prompt_tokens, completion_tokens, trace)`` of every turn."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=num_tokens,
            temperature=0,
            extra_headers={"x-kvferry-trace": "1"},
        )
        usage = answer.usage
        assert usage is not None
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        trace = (answer.model_extra or {})["kvferry"]
        turns.append((usage.prompt_tokens, usage.completion_tokens, trace))
    _check_errors(client)
    return turns


def _check_errors(client: OpenAI) -> None:
    try:
        client.completions.create(model="no-such-model", prompt="x")
    except NotFoundError as error:
        print(f"an unknown model is the client's own NotFoundError: {error.message}")
    else:
        raise AssertionError("an unknown model was served")


def report(turns: list[tuple[int, int, Any]]) -> bool:
    """Print the table; return whether every turn kept its bound."""
    table = Table(title=f"five turns: {machine.describe()}", title_justify="left")
    for heading in ("turn", "prompt", "new", "computed", "local", "store", "prefill node", "TTFT"):
        table.add_column(heading, justify="right")
    good = True
    known = 0
    for number, (prompt, completion, trace) in enumerate(turns, 1):
        new, computed = prompt - known, trace["computed_tokens"]
        good &= computed <= new + DEFAULT_PAGE_SIZE
        cached = trace["cached_tokens"]
        row = (number, prompt, new, computed, cached["local"], cached["store"])
        table.add_row(*map(str, row), trace["prefill_node"], f"{trace['ttft_s'] * 1000:.0f} ms")
        known = prompt + completion
    Console(width=120).print(table)
    print("every turn computed its new tokens and at most one page more" if good else "TOO MUCH")
    return good


async def run(model: str, num_tokens: int) -> list[tuple[int, int, Any]]:
    resolved = model_store.resolve(model, pull_missing=True)
    options = UpOptions.of(model=model, port=0, prefill=2, decode=2, store=2, log_level="warning")
    cluster = LocalCluster(options)
    try:
        await cluster.start()
        return await asyncio.to_thread(converse, cluster.url, resolved.name, num_tokens)
    finally:
        await cluster.drain(5.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    setup_logging("warning")
    return 0 if report(asyncio.run(run(arguments.model, arguments.tokens))) else 1


if __name__ == "__main__":
    sys.exit(main())
