"""What the fake model must answer, computed without pages, processes or network."""

from __future__ import annotations

import random
from typing import Any

from engine.fake import fake_generate
from engine.request import SamplingParams

VOCAB_BYTES = 256


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt of ``length`` random byte tokens."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_BYTES) for _ in range(length)]


def expected(prompt: list[int], max_tokens: int, **params: Any) -> list[int]:
    """The greedy answer, unless ``params`` say otherwise; EOS is ignored."""
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
    sampling = SamplingParams(max_tokens=max_tokens, **fields)
    return [out.token for out in fake_generate(prompt, sampling)]
