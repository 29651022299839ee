"""What the fake model must answer, computed without pages, processes or network."""

from __future__ import annotations

import random

from engine.fake import fake_generate
from engine.request import SamplingParams

VOCAB_BYTES = 256


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt of ``length`` random byte tokens."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_BYTES) for _ in range(length)]


def expected(prompt: list[int], max_tokens: int, **params: object) -> list[int]:
    """The greedy answer, unless ``params`` say otherwise; EOS is ignored."""
    defaults: dict[str, object] = {"temperature": 0.0, "ignore_eos": True}
    sampling = SamplingParams(max_tokens=max_tokens, **(defaults | params))  # type: ignore[arg-type]
    return [out.token for out in fake_generate(prompt, sampling)]
