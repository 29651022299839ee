"""transformers on the same weights: the baseline of ``system_bench``, in a process of its own.

Prints one JSON object: tokens per second of prefill, of one stream, and of a batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.machine import text_tokens

REPEATS = 3


@torch.inference_mode()
def prefill_rate(model: Any, tokens: list[int]) -> float:
    """Tokens per second of one forward pass that fills a cache."""
    inputs = torch.tensor([tokens])
    model(inputs, use_cache=True, logits_to_keep=1)
    spent = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        model(inputs, use_cache=True, logits_to_keep=1)
        spent.append(time.perf_counter() - started)
    return len(tokens) / statistics.median(spent)


@torch.inference_mode()
def decode_rate(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens per second after the first token of each sequence, over the whole batch."""
    inputs = torch.tensor(prompts)
    out = model(inputs, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    cache = out.past_key_values
    started = time.perf_counter()
    for _ in range(num_tokens - 1):
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    return len(prompts) * (num_tokens - 1) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prefill-tokens", type=int, required=True)
    parser.add_argument("--decode-prompt", type=int, required=True)
    parser.add_argument("--decode-tokens", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    length = options.decode_prompt
    tokens = text_tokens(options.model, max(options.prefill_tokens, length * options.streams))
    prompts = [tokens[i * length : (i + 1) * length] for i in range(options.streams)]
    result = {
        "prefill": prefill_rate(model, tokens[: options.prefill_tokens]),
        "single": decode_rate(model, prompts[:1], options.decode_tokens),
        "batch": decode_rate(model, prompts, options.decode_tokens),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
