"""Greedy tokens of the whole system against transformers' ``generate`` on the same weights.

Two nodes of each role over tcp, float32; prompts around page and chunk borders; one at a time and
several at a time. Exit code 1 when one token differs.

    python -m benchmarks.parity [--model smollm2-135m] [--prompts 40] [--tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from benchmarks import machine
from benchmarks.client import complete_all
from launch import model_store
from launch.cluster import LocalCluster
from launch.config import UpOptions
from launch.progress import say
from launch.runtime import setup_logging

CHUNK_SIZE = 128
LENGTH_MAX = 400
AT_ONCE = 8
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
CHUNK_BORDERS = tuple(n * CHUNK_SIZE + d for n in (1, 2, 3) for d in (-1, 0, 1))


def lengths(count: int) -> list[int]:
    """Return ``count`` prompt lengths: every border, the rest spread evenly up to the longest."""
    chosen = [n for n in (*BORDERS, *CHUNK_BORDERS) if n <= LENGTH_MAX][:count]
    rest = count - len(chosen)
    return chosen + [LENGTH_MAX - i * (LENGTH_MAX // max(rest, 1)) for i in range(rest)]


def make_prompts(directory: Path, count: int) -> list[list[int]]:
    """Cut prompts of all lengths out of real text, each at another place."""
    tokens = machine.text_tokens(directory, LENGTH_MAX + 37 * count)
    return [tokens[37 * i : 37 * i + n] for i, n in enumerate(lengths(count))]


def reference(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return what transformers generates."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch reads it; see process_env
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers: list[list[int]] = []
    say(f"transformers: {len(prompts)} answers of {num_tokens} tokens")
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def differences(
    prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]
) -> list[str]:
    """Return one line per prompt whose tokens differ."""
    lines = []
    for prompt, want, have in zip(prompts, expected, got, strict=True):
        if want != have:
            at = next(
                (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b),
                min(len(want), len(have)),
            )
            lines.append(f"prompt of {len(prompt)} tokens: differs from output index {at} on")
    return lines


async def system(
    options: UpOptions, model: str, prompts: list[list[int]], num_tokens: int
) -> dict[int, list[list[int]]]:
    """Return the system's tokens, by the number of requests at a time."""
    cluster = LocalCluster(options)
    try:
        await cluster.start()
        answers: dict[int, list[list[int]]] = {}
        for at_once in (1, AT_ONCE):
            got = await asyncio.to_thread(
                complete_all, cluster.url, model, prompts, num_tokens, at_once
            )
            answers[at_once] = [answer.tokens for answer in got]
        return answers
    finally:
        await cluster.drain(5.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--transfer", default="tcp")
    arguments = parser.parse_args()
    setup_logging("warning")
    resolved = model_store.resolve(arguments.model, pull_missing=True)
    assert resolved.directory is not None, "the fake model has no reference here"
    prompts = make_prompts(resolved.directory, arguments.prompts)
    expected = reference(resolved.directory, prompts, arguments.tokens)
    options = UpOptions.of(
        model=str(resolved.directory),
        port=0,
        prefill=2,
        decode=2,
        store=2,
        dtype="float32",
        transfer=arguments.transfer,
        chunk_size=CHUNK_SIZE,
        log_level="warning",
    )
    answers = asyncio.run(system(options, resolved.name, prompts, arguments.tokens))
    print(machine.describe())
    good = True
    for at_once, got in answers.items():
        lines = differences(prompts, expected, got)
        good &= not lines
        equal = len(prompts) - len(lines)
        print(f"{at_once} at a time: {equal} of {len(prompts)} answers equal transformers'")
        print("".join(f"  {line}\n" for line in lines), end="")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
