"""Prefill and decode tokens/s of the engine beside transformers, in one run.

    python benchmarks/engine_bench.py MODEL_DIR [--threads 2] [--rounds 5] [--streams 16]

Rounds of both are interleaved, so that a busy machine slows both alike; medians are printed.
Prefill: one prompt in chunks (engine) or in one call (transformers). Decode: ``--streams`` streams
in one batch (engine) against one stream (transformers), every step a new token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.loader import load_runner
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.step import SampleInput, SeqStep, TokenIds
from kvstore.page import PageId

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
_NONE = np.zeros(0, dtype=np.int32)


class EngineSide:
    """The engine under test, with one page table for each stream."""

    def __init__(self, runner: ModelRunner, pages_per_stream: int, num_streams: int) -> None:
        self.runner = runner
        self.tables = [
            [PageId(1 + stream * pages_per_stream + i) for i in range(pages_per_stream)]
            for stream in range(num_streams)
        ]

    def prefill(self, stream: int, prompt: TokenIds, chunk: int) -> int:
        """Run a prompt in chunks; return the first token."""
        for start in range(0, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            last = start + len(tokens) == len(prompt)
            sample = SampleInput(_GREEDY, prompt, _NONE) if last else None
            (out,) = self.runner.step([SeqStep(tokens, start, self.tables[stream], True, sample)])
        assert out is not None
        return out.token

    def decode(self, prompt: TokenIds, tokens: list[int], num_steps: int) -> float:
        """Run all streams for ``num_steps``; return seconds per step (median)."""
        times: list[float] = []
        for step in range(num_steps):
            batch = [
                SeqStep(
                    np.array([token], dtype=np.int32),
                    len(prompt) + step,
                    table,
                    True,
                    SampleInput(_GREEDY, prompt, _NONE),
                )
                for token, table in zip(tokens, self.tables, strict=True)
            ]
            began = time.perf_counter()
            outs = self.runner.step(batch)
            times.append(time.perf_counter() - began)
            tokens = [out.token for out in outs if out is not None]
        return statistics.median(times)


@torch.inference_mode()
def reference_decode(model: Any, prompt: TokenIds, num_steps: int) -> float:
    """Seconds per token of one transformers stream (median), prompt excluded."""
    result = model(
        torch.from_numpy(prompt[None].astype(np.int64)), use_cache=True, logits_to_keep=1
    )
    times: list[float] = []
    for _ in range(num_steps):
        token = result.logits[:, -1:].argmax(-1)
        began = time.perf_counter()
        result = model(token, past_key_values=result.past_key_values, use_cache=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.inference_mode()
def reference_prefill(model: Any, prompt: TokenIds) -> None:
    model(torch.from_numpy(prompt[None].astype(np.int64)), use_cache=True, logits_to_keep=1)


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    page_size = 16
    longest = max(args.prompt, args.context + args.steps)
    pages = -(-longest // page_size)
    runner = load_runner(
        args.model_dir,
        device="cpu",
        dtype="float32",
        num_pages=pages * args.streams + 1,
        page_size=page_size,
    )
    engine = EngineSide(runner, pages, args.streams)
    model = AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, runner.info.vocab_size, args.prompt, dtype=np.int32)
    context = prompt[: args.context]

    samples: dict[str, list[float]] = {
        name: [] for name in ("prefill", "prefill_hf", "decode", "decode_hf")
    }
    for round_index in range(args.rounds + 1):  # the first round warms up
        tokens = [engine.prefill(stream, context, args.chunk) for stream in range(args.streams)]
        decode = args.streams / engine.decode(context, tokens, args.steps)
        decode_hf = 1 / reference_decode(model, context, args.steps)
        prefill = args.prompt / timed(lambda: engine.prefill(0, prompt, args.chunk))
        prefill_hf = args.prompt / timed(lambda: reference_prefill(model, prompt))
        if round_index:
            for name, value in zip(samples, (prefill, prefill_hf, decode, decode_hf), strict=True):
                samples[name].append(value)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for what in ("prefill", "decode"):
        mine, other = medians[what], medians[f"{what}_hf"]
        print(f"{what:8} engine {mine:8.1f} tok/s  transformers {other:8.1f}  x{mine / other:.2f}")
    print(json.dumps({**vars(args), **{k: round(v, 1) for k, v in medians.items()}}))


if __name__ == "__main__":
    main()
