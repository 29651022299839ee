"""The engine equals transformers on the same weights: every family, every border."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.loader import load_runner
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.step import SampleInput, SeqStep
from kvstore.page import PageId
from tests.engine.checkpoints import FAMILIES, VOCAB_SIZE, make_model, save

CHUNK = 24
NUM_NEW = 4
BORDERS = [1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 31, 32, 33]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


class Pair(NamedTuple):
    """``known`` caches transformers' answers by prompt."""

    runner: ModelRunner
    model: Any
    known: dict[bytes, list[int]]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = make_model(request.param)
    directory = save(model, tmp_path_factory.mktemp(request.param))
    runner = load_runner(directory, device="cpu", dtype="float32", num_pages=200)
    runner.pool.pages.fill_(float("nan"))  # what was never written must never matter
    return Pair(runner, model, {})


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(1000 * seed + length)
    return rng.integers(3, VOCAB_SIZE, length, dtype=np.int32)


def reference(pair: Pair, prompt: np.ndarray) -> list[int]:
    """Greedy tokens by transformers' own loop."""
    key = prompt.tobytes()
    if key not in pair.known:
        ids = torch.from_numpy(prompt[None].astype(np.int64))
        pair.model.generation_config.eos_token_id = None
        out = pair.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
        )
        pair.known[key] = out[0, len(prompt) :].tolist()
    return pair.known[key]


class Stream:
    """One sequence: prefill in chunks, then decode."""

    def __init__(self, prompt: np.ndarray, pages: list[int], arrival: int = 0) -> None:
        self.prompt, self.pages, self.arrival = prompt, [PageId(p) for p in pages], arrival
        self.tokens = prompt.tolist()
        self.done = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def step(self) -> SeqStep:
        tokens = np.array(self.tokens[self.done : self.done + CHUNK], dtype=np.int32)
        ends = self.done + len(tokens) == len(self.tokens)
        entry = SampleInput(GREEDY, self.prompt, np.array(self.output, dtype=np.int32))
        return SeqStep(tokens, self.done, self.pages, True, entry if ends else None)


def run_all(runner: ModelRunner, streams: list[Stream]) -> None:
    """Run until each stream has NUM_NEW tokens; stream i joins at step ``arrival``."""
    tick = 0
    while any(len(s.output) < NUM_NEW for s in streams):
        live = [s for s in streams if s.arrival <= tick and len(s.output) < NUM_NEW]
        steps = [s.step() for s in live]
        for stream, step, out in zip(live, steps, runner.step(steps), strict=True):
            stream.done += len(step.tokens)
            if out is not None:
                stream.tokens.append(out.token)
        tick += 1


def pages_for(streams: int) -> list[list[int]]:
    order = (np.random.default_rng(streams).permutation(199) + 1).tolist()
    return [order[i * 6 : i * 6 + 6] for i in range(streams)]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_greedy_tokens_equal_transformers_at_every_border(pair: Pair, batch: int) -> None:
    """Streams arrive one step apart, so that chunks and decode steps share batches."""
    for first in range(0, len(BORDERS), batch):
        part = BORDERS[first : first + batch]
        tables = pages_for(len(part))
        streams = [Stream(prompt_of(n), tables[i], i) for i, n in enumerate(part)]
        run_all(pair.runner, streams)
        for stream in streams:
            assert stream.output == reference(pair, stream.prompt), len(stream.prompt)


def test_logits_are_close_to_transformers(pair: Pair) -> None:
    prompt = prompt_of(70)
    with torch.inference_mode():
        expected = pair.model(torch.from_numpy(prompt[None].astype(np.int64))).logits[0]
    table = [PageId(p) for p in (9, 3, 17, 5, 40)]
    entry = SampleInput(GREEDY, prompt, np.zeros(0, dtype=np.int32))
    start = 0
    for size in (1, 20, 1, 27, 21):
        step = SeqStep(prompt[start : start + size], start, table, True, entry)
        start += size
        torch.testing.assert_close(
            pair.runner.logits([step])[0], expected[start - 1], atol=1e-4, rtol=1e-4
        )


def test_a_token_run_without_writing_gives_the_same_logits(pair: Pair) -> None:
    prompt = prompt_of(37)
    table = [PageId(p) for p in (30, 31, 32)]
    entry = SampleInput(GREEDY, prompt, np.zeros(0, dtype=np.int32))
    expected = pair.runner.logits([SeqStep(prompt, 0, table, True, entry)])
    before = pair.runner.pool.pages[1:].clone()
    again = pair.runner.logits([SeqStep(prompt[-1:], 36, table, False, entry)])
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pair.runner.pool.pages[1:], before, atol=0, rtol=0, equal_nan=True)


def test_a_step_without_samples_has_no_output_and_an_empty_step_is_empty(pair: Pair) -> None:
    assert pair.runner.step([SeqStep(prompt_of(9), 0, [PageId(1)])]) == [None]
    assert pair.runner.step([]) == []


def test_a_sequence_does_not_depend_on_the_rest_of_the_batch(pair: Pair) -> None:
    lengths = [5, 16, 33, 47, 64, 90]
    tables = [[PageId(1 + 6 * i + j) for j in range(6)] for i in range(len(lengths))]
    prompts = [prompt_of(n, seed=5) for n in lengths]
    steps = []
    for prompt, table in zip(prompts, tables, strict=True):
        pair.runner.step([SeqStep(prompt[:-1], 0, table)]) if len(prompt) > 1 else None
        entry = SampleInput(GREEDY, prompt, np.zeros(0, dtype=np.int32))
        steps.append(SeqStep(prompt[-1:], len(prompt) - 1, table, True, entry))
    alone = torch.cat([pair.runner.logits([step]) for step in steps])
    torch.testing.assert_close(pair.runner.logits(steps), alone, atol=2e-5, rtol=1e-4)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = pair.runner.logits([steps[i] for i in order])
    torch.testing.assert_close(shuffled, alone[order], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama-llama3-rope", "qwen3"])
def test_bfloat16_is_close_to_float32(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    runner = load_runner(save(model, tmp_path), device="cpu", dtype="bfloat16", num_pages=20)
    assert runner.pool.pages.dtype == torch.bfloat16
    prompt = prompt_of(45)
    entry = SampleInput(GREEDY, prompt, np.zeros(0, dtype=np.int32))
    table = [PageId(p) for p in (3, 1, 2)]
    runner.step([SeqStep(prompt[:30], 0, table)])
    got = runner.logits([SeqStep(prompt[30:], 30, table, True, entry)])[0]
    ids = torch.from_numpy(prompt[None].astype(np.int64))
    with torch.inference_mode():
        exact = model(ids).logits[0, -1]
        theirs = model.to(torch.bfloat16)(ids).logits[0, -1].float()
    assert (got - exact).norm() < 1.5 * (theirs - exact).norm() + 0.01 * exact.norm()
