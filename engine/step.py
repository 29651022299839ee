"""What a scheduler hands to the engine for one step, and what it gets back.

Owns ``SeqStep``, ``SampleInput`` and the ``Runner`` interface. Both node types and both kinds of
model (real and fake) meet here. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.page_pool import PagePool
from engine.request import SamplingParams, TokenOut
from kvstore.page import PageId, PageSpec

TokenIds = npt.NDArray[np.int32]


class SampleInput(NamedTuple):
    """What sampling needs beside the logits of the sequence's last token.

    ``output`` holds the tokens generated so far; the index of the sampled token is
    ``len(output)``, which is also the counter of the random generator.
    """

    params: SamplingParams
    prompt: TokenIds
    output: TokenIds


class SeqStep(NamedTuple):
    """One sequence's part of a step: a prefill chunk or one decode token.

    Attributes:
        tokens: ``[q]`` int32, the tokens to run, q ≥ 1.
        start: position of ``tokens[0]``; positions ``0..start-1`` have valid KV in ``page_ids``.
        page_ids: page table; covers positions ``0..start+q-1``.
        write_kv: False runs the tokens for their logits only, on KV that is already present: the
            pages are read, never written (they may be shared, or be in transfer).
        sample: None for a chunk that does not end the prompt.
    """

    tokens: TokenIds
    start: int
    page_ids: Sequence[PageId]
    write_kv: bool = True
    sample: SampleInput | None = None


class ModelInfo(NamedTuple):
    """Facts of the loaded model. ``eos_token_ids`` end a generation unless ``ignore_eos``."""

    name: str
    fingerprint: str
    spec: PageSpec
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class Runner(Protocol):
    """The engine as nodes see it. ``step`` blocks (compute): call it on the engine's thread only.

    ``step`` writes the KV of every token to its slot, and returns, per sequence, the sampled token
    (``index`` set, ``stop`` set when an EOS or stop token id ends the request or ``max_tokens`` is
    reached; EOS and stop tokens are impossible before ``min_tokens``) or None without ``sample``.
    The result of a sequence does not depend on the rest of the batch, beyond floating-point noise.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def pool(self) -> PagePool: ...

    def step(self, steps: Sequence[SeqStep]) -> list[TokenOut | None]: ...
