"""Speed of the whole system beside transformers on the same weights, in the same run.

Prefill of one long prompt and decode of many streams, through HTTP, gateway, prefill node, page
store and decode node. Exit code 1 when a ratio is below its target.

    python -m benchmarks.system_bench [--model smollm2-135m] [--dtypes float32,bfloat16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.client import Answer, complete, complete_all
from launch import model_store
from launch.cluster import LocalCluster
from launch.config import UpOptions
from launch.runtime import setup_logging

PREFILL_TOKENS = 2000
PREFILL_REPEATS = 3
STREAMS = 16
DECODE_PROMPT = 64
DECODE_TOKENS = 128
PREFILL_TARGET = 0.8  # of transformers' prefill
DECODE_TARGET = 4.0  # times transformers' single stream


class Rates(NamedTuple):
    """Tokens per second."""

    prefill: float
    single: float
    batch: float


def baseline(model_dir: Path, dtype: str) -> Rates:
    """Measure transformers, in a process that ends before the system starts."""
    command = [sys.executable, "-m", "benchmarks.transformers_baseline"]
    command += ["--model", str(model_dir), "--dtype", dtype]
    command += ["--threads", str(len(os.sched_getaffinity(0)))]
    command += ["--prefill-tokens", str(PREFILL_TOKENS), "--streams", str(STREAMS)]
    command += ["--decode-prompt", str(DECODE_PROMPT), "--decode-tokens", str(DECODE_TOKENS)]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=machine.ROOT)
    return Rates(**json.loads(result.stdout.splitlines()[-1]))


def prefill_rate(url: str, model: str, tokens: list[int]) -> float:
    """Tokens per second from the request to the first token, each prompt never seen before."""
    rates = []
    for repeat in range(PREFILL_REPEATS + 1):  # the first warms up
        prompt = [100 + repeat, *tokens[1:]]  # another first token: no page in common
        answer = complete(url, model, prompt, 1)
        assert answer.trace["computed_tokens"] == len(prompt), answer.trace
        rates.append(len(prompt) / (answer.arrivals[0] - answer.sent))
    return statistics.median(rates[1:])


def decode_rate(answers: list[Answer]) -> float:
    """Tokens per second while all streams run: from the last first token to the first last one."""
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    count = sum(begin < at <= end for answer in answers for at in answer.arrivals)
    return count / (end - begin)


async def system(model_dir: Path, dtype: str) -> Rates:
    """Measure the whole system."""
    options = UpOptions.of(model=str(model_dir), port=0, dtype=dtype, log_level="warning")
    cluster = LocalCluster(options)
    try:
        await cluster.start()
        return await asyncio.to_thread(_measure, cluster.url, model_dir)
    finally:
        await cluster.drain(5.0)


def _measure(url: str, model_dir: Path) -> Rates:
    model = model_dir.name
    tokens = machine.text_tokens(model_dir, PREFILL_TOKENS)
    prefill = prefill_rate(url, model, tokens)
    length = DECODE_PROMPT
    prompts = [tokens[i * length : (i + 1) * length] for i in range(STREAMS)]
    single = decode_rate([complete(url, model, [99, *prompts[0][1:]], DECODE_TOKENS)])
    batch = decode_rate(complete_all(url, model, prompts, DECODE_TOKENS, STREAMS))
    return Rates(prefill, single, batch)


def report(results: dict[str, tuple[Rates, Rates]]) -> bool:
    """Print the table; return whether the faster dtype of each side meets the targets."""
    table = Table(title=f"kvferry beside transformers: {machine.describe()}", title_justify="left")
    for heading in ("dtype", "what", "transformers", "kvferry", "ratio"):
        table.add_column(heading, justify="left" if heading in ("dtype", "what") else "right")
    rows = [
        (f"prefill of {PREFILL_TOKENS} tokens, tokens/s", "prefill"),
        ("decode of 1 stream, tokens/s", "single"),
        (f"decode of {STREAMS} streams, tokens/s", "batch"),
    ]
    for dtype, (theirs, ours) in results.items():
        for label, name in rows:
            a, b = getattr(theirs, name), getattr(ours, name)
            table.add_row(dtype, label, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}")
    Console().print(table)
    best = {
        name: [max(getattr(pair[side], name) for pair in results.values()) for side in (0, 1)]
        for name in Rates._fields
    }
    prefill = best["prefill"][1] / best["prefill"][0]
    decode = best["batch"][1] / best["single"][0]
    print(f"prefill, faster dtype of each: {prefill:.2f} x transformers (target {PREFILL_TARGET})")
    print(
        f"decode of {STREAMS} streams: {decode:.2f} x transformers' single stream "
        f"(target {DECODE_TARGET}); transformers' own batch of {STREAMS}: "
        f"{best['batch'][0] / best['single'][0]:.2f} x"
    )
    return prefill >= PREFILL_TARGET and decode >= DECODE_TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    arguments = parser.parse_args()
    setup_logging("warning")
    resolved = model_store.resolve(arguments.model, pull_missing=True)
    assert resolved.directory is not None, "the fake model has no speed to compare"
    results = {}
    for dtype in arguments.dtypes.split(","):
        theirs = baseline(resolved.directory, dtype)
        results[dtype] = (theirs, asyncio.run(system(resolved.directory, dtype)))
    return 0 if report(results) else 1


if __name__ == "__main__":
    sys.exit(main())
