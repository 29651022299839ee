"""A model whose every answer proves that every KV byte was right.

Owns ``FakeRunner`` (an ``engine.step.Runner``) and ``fake_generate``, its reference without pages.
No network weights: KV bytes and logits are 64-bit hashes, in microseconds on any CPU.

Let ``word[p, r, w]`` be the 64-bit words of position p in run r (one run per head, layer, K or V)::

    fold[p]  = Σ F[r, w] · word[p, r, w]            read from the page, through the page table
    state[p] = mix(fold[p-1] + token[p] · T + p · P)     fold[-1] is a constant
    word[p]  = A · state[p] + C                     written to the page; fold[p] = K · state[p] + J
    logits   = f(mix(Σ_{q ≤ p} mix(fold[q] + q · Q) + state[p] · R))

All modulo 2**64, ``F`` odd and ``mix`` a bijection: changing any one word of any position changes
``fold``, hence the sum, hence all logits. ``A`` and ``C`` of the first word are solved for so that
``K`` and ``J`` do not depend on the geometry: every page spec gives the same tokens.

Vocabulary: 0..255 bytes, 256 BOS, 257 EOS, 258 unused. Printable bytes and EOS are likely, other
bytes are unlikely, BOS and 258 never come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.fake_checks import check_tables
from engine.page_pool import PagePool, host_pool
from engine.request import SamplingParams, TokenOut
from engine.sampling import sample
from engine.step import ModelInfo, SampleInput, SeqStep, TokenIds
from kvstore.page import PageSpec

Words = npt.NDArray[np.uint64]

FAKE_VOCAB_SIZE = 259
FAKE_BOS = 256
FAKE_EOS = 257
FAKE_MAX_MODEL_LEN = 8192

_EOS_IDS = frozenset((FAKE_EOS,))
_MASK = (1 << 64) - 1
_FOLD_START = 0x243F6A8885A308D3
_T, _P, _Q, _R = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5
_K, _J = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014), a bijection of 64-bit words."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_words(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _next_state(fold: int, token: int, position: int) -> int:
    return _mix(fold + token * _T + position * _P)


def _fold_of(state: int) -> int:
    return (state * _K + _J) & _MASK


class _Coding(NamedTuple):
    """``A``, ``C`` and ``F`` above, each ``[num_runs, D / 8]`` uint64."""

    scale: Words
    offset: Words
    weight: Words


@lru_cache(maxsize=16)
def _coding(num_runs: int, words_per_run: int) -> _Coding:
    count = num_runs * words_per_run
    scale, offset, weight = (
        [_mix(which * 0x51ED270B + i * _T) | odd for i in range(count)]
        for which, odd in ((1, 1), (2, 0), (3, 1))
    )
    inverse = pow(weight[0], -1, 1 << 64)
    rest = range(1, count)
    scale[0] = (inverse * (_K - sum(weight[i] * scale[i] for i in rest))) & _MASK
    offset[0] = (inverse * (_J - sum(weight[i] * offset[i] for i in rest))) & _MASK
    shape = (num_runs, words_per_run)
    return _Coding(*(np.array(x, dtype=np.uint64).reshape(shape) for x in (scale, offset, weight)))


def _likelihoods() -> npt.NDArray[np.float32]:
    base = np.zeros(FAKE_VOCAB_SIZE, dtype=np.float32)
    base[32:127] = 4.0
    base[FAKE_EOS] = 4.0
    base[[FAKE_BOS, FAKE_VOCAB_SIZE - 1]] = -1000.0
    return base


_BASE = _likelihoods()
_TOKEN_SALTS = _mix_words(np.arange(1, FAKE_VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(_T))


def _logits(digests: Words) -> npt.NDArray[np.float32]:
    """``[B, V]`` logits of ``[B]`` digests: a uniform number in ``[0, 4)`` plus the likelihood."""
    noise = _mix_words(digests[:, None] ^ _TOKEN_SALTS) >> np.uint64(40)
    return noise.astype(np.float32) * np.float32(4.0 / (1 << 24)) + _BASE


class FakeRunner:
    """The fake model over a host pool of uint8 pages.

    ``step`` asserts that page tables are sane (see ``engine/fake_checks.py``). Delays simulate
    compute time for tests with real processes; they block the calling (engine) thread.

    Args:
        num_pages: pages of the pool, the scratch page included.
        max_model_len: longest sequence, prompt and output.
        step_delay_s: added to every step.
        token_delay_s: added for every token of a step that is a chunk (more than one token).

    Raises:
        ValueError: ``head_dim`` is not a multiple of 8.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int = 16,
        name: str = "fake",
        fingerprint: str = "fake",
        max_model_len: int = FAKE_MAX_MODEL_LEN,
        step_delay_s: float = 0.0,
        token_delay_s: float = 0.0,
        num_layers: int = 2,
        num_kv_heads: int = 2,
        head_dim: int = 16,
    ) -> None:
        if head_dim % 8:
            raise ValueError(f"head_dim={head_dim}: the fake model needs a multiple of 8")
        spec = PageSpec(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype="uint8",
        )
        self._info = ModelInfo(name, fingerprint, spec, FAKE_VOCAB_SIZE, max_model_len, _EOS_IDS)
        self._pool = host_pool(spec, num_pages)
        self._coding = _coding(spec.num_runs, head_dim // 8)
        storage: npt.NDArray[np.uint8] = self._pool.storage.numpy()
        shape = (num_pages, spec.num_runs, page_size, head_dim // 8)
        self._words: Words = storage.view(np.uint64).reshape(shape)
        self.step_delay_s = step_delay_s
        self.token_delay_s = token_delay_s

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pool(self) -> PagePool:
        return self._pool

    def step(self, steps: Sequence[SeqStep]) -> list[TokenOut | None]:
        check_tables(self._info, self._pool.num_pages, steps)
        self._sleep(steps)
        states = [self._run(step) for step in steps]
        self._write(steps, states)
        ends = [(i, s) for i, s in enumerate(steps) if s.sample is not None]
        out: list[TokenOut | None] = [None] * len(steps)
        if ends:
            last_states = np.array([states[i][-1] for i, _ in ends], dtype=np.uint64)
            logits = _logits(self._digests([s for _, s in ends], last_states))
            inputs = [s.sample for _, s in ends if s.sample is not None]
            for (i, _), token in zip(ends, sample(logits, inputs, _EOS_IDS), strict=True):
                out[i] = token
        return out

    def _sleep(self, steps: Sequence[SeqStep]) -> None:
        num_chunk_tokens = sum(len(s.tokens) for s in steps if len(s.tokens) > 1)
        delay_s = self.step_delay_s + self.token_delay_s * num_chunk_tokens
        if delay_s > 0:
            time.sleep(delay_s)

    def _run(self, step: SeqStep) -> list[int]:
        """States of the tokens of one step, from the KV bytes of the position before them."""
        fold = _FOLD_START
        if step.start > 0:
            page, slot = divmod(step.start - 1, self._info.spec.page_size)
            words = self._words[step.page_ids[page], :, slot]
            fold = int((words * self._coding.weight).sum(dtype=np.uint64))
        states: list[int] = []
        for position, token in enumerate(step.tokens.tolist(), step.start):
            state = _next_state(fold, token, position)
            states.append(state)
            fold = _fold_of(state)
        return states

    def _write(self, steps: Sequence[SeqStep], states: Sequence[list[int]]) -> None:
        size = self._info.spec.page_size
        pages: list[int] = []
        slots: list[int] = []
        written: list[int] = []
        for step, own in zip(steps, states, strict=True):
            if step.write_kv:
                positions = range(step.start, step.start + len(own))
                pages += [step.page_ids[p // size] for p in positions]
                slots += [p % size for p in positions]
                written += own
        if written:
            values = np.array(written, dtype=np.uint64)[:, None, None]
            self._words[pages, :, slots] = values * self._coding.scale + self._coding.offset

    def _digests(self, steps: Sequence[SeqStep], last_states: Words) -> Words:
        """``[B]`` hashes over all KV bytes of each sequence, in one gather."""
        size = self._info.spec.page_size
        lengths = np.array([s.start + len(s.tokens) for s in steps])
        num_pages = -(-lengths // size)
        table = [
            page for s, n in zip(steps, num_pages.tolist(), strict=True) for page in s.page_ids[:n]
        ]
        folds = np.einsum("prsw,rw->ps", self._words[table], self._coding.weight)
        starts = np.concatenate(([0], np.cumsum(num_pages)[:-1]))
        page_index = np.arange(len(table)) - np.repeat(starts, num_pages)
        positions = page_index[:, None] * size + np.arange(size)
        terms = _mix_words(folds + positions.astype(np.uint64) * np.uint64(_Q))
        terms[positions >= np.repeat(lengths, num_pages)[:, None]] = 0
        sums = np.add.reduceat(terms.sum(axis=1, dtype=np.uint64), starts)
        return _mix_words(sums + last_states * np.uint64(_R))


def fake_generate(
    prompt: Sequence[int] | TokenIds, params: SamplingParams, emitted: Sequence[int] = ()
) -> list[TokenOut]:
    """Return what a fake node must generate after ``prompt`` and ``emitted``: the reference.

    Computed without any pages, one position at a time. The first element has index
    ``len(emitted)``, the last has ``stop`` set.
    """
    prompt_ids = np.asarray(prompt, dtype=np.int32)
    output = [int(token) for token in emitted]
    result: list[TokenOut] = []
    fold, total, state, position = _FOLD_START, 0, 0, 0
    pending = [*prompt_ids.tolist(), *output]
    assert pending, "an empty prompt has no next token"
    while True:
        for token in pending:
            state = _next_state(fold, token, position)
            fold = _fold_of(state)
            total += _mix(fold + position * _Q)
            position += 1
        digest = _mix(total + state * _R)
        entry = SampleInput(params, prompt_ids, np.array(output, dtype=np.int32))
        (token_out,) = sample(_logits(np.array([digest], dtype=np.uint64)), [entry], _EOS_IDS)
        result.append(token_out)
        if token_out.stop is not None:
            return result
        output.append(token_out.token)
        pending = [token_out.token]
