"""The real model behind ``engine.step.Runner``.

Owns the sequence of one step: build the ragged batch, plan attention, forward, sample. Knows no
requests and no scheduling. Not thread-safe: one engine thread calls ``step``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.interface import AttentionBackend
from engine.batch import StepBatch, build_batch
from engine.models.decoder import Decoder
from engine.page_pool import PagePool
from engine.request import TokenOut
from engine.sampling import is_plain_greedy, sample, token_out
from engine.step import ModelInfo, SampleInput, SeqStep


class ModelRunner:
    """A decoder, its pool and its attention back end on one device."""

    def __init__(
        self, info: ModelInfo, decoder: Decoder, pool: PagePool, attention: AttentionBackend
    ) -> None:
        self._info = info
        self._decoder = decoder
        self._pool = pool
        self._attention = attention

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pool(self) -> PagePool:
        return self._pool

    def step(self, steps: Sequence[SeqStep]) -> list[TokenOut | None]:
        if not steps:
            return []
        out: list[TokenOut | None] = [None] * len(steps)
        logits = self.logits(steps)
        sampled = [(i, s.sample) for i, s in enumerate(steps) if s.sample is not None]
        tokens = self._choose(logits, [entry for _, entry in sampled])
        for (i, _), token in zip(sampled, tokens, strict=True):
            out[i] = token
        return out

    @torch.inference_mode()
    def logits(self, steps: Sequence[SeqStep]) -> torch.Tensor:
        """Run ``steps``; return float32 logits ``[R, V]`` of those that sample, in order."""
        batch = build_batch(steps, self._info.spec.page_size)
        self._check(batch)
        self._attention.plan(batch.ragged)
        tokens, positions, rows = (
            torch.from_numpy(x).to(self._decoder.device)
            for x in (batch.tokens, batch.positions, batch.rows)
        )
        return self._decoder.forward(tokens, positions, rows, self._attention)

    def _check(self, batch: StepBatch) -> None:
        """Assert what would otherwise corrupt memory of others; cheap."""
        tokens, pages = batch.tokens, batch.ragged.kv_indices
        assert tokens.min() >= 0, tokens.min()
        assert tokens.max() < self._info.vocab_size, tokens.max()
        assert pages.min() > 0, "the scratch page is in a page table"
        assert pages.max() < self._pool.num_pages, pages.max()
        assert batch.positions.max() < self._info.max_model_len, batch.positions.max()

    def _choose(self, logits: torch.Tensor, entries: Sequence[SampleInput]) -> list[TokenOut]:
        eos = self._info.eos_token_ids
        if logits.is_cuda and all(is_plain_greedy(entry) for entry in entries):
            best = logits.argmax(dim=-1).tolist()  # ties: the first, documented by torch
            return [token_out(e, t, eos) for e, t in zip(entries, best, strict=True)]
        host: np.ndarray[tuple[int, int], np.dtype[np.float32]] = logits.cpu().numpy()
        return sample(host, entries, eos)
