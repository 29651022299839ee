"""What changes logits before a token is chosen: masks, biases and penalties.

Owns the semantics of ``min_tokens``, ``logit_bias`` and the three penalties (vLLM's). Pure numpy.
Knows no randomness. Token ids outside the vocabulary have no effect here (the gateway refuses
them), so that one request can never fail the batch it runs in.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from engine.step import SampleInput, TokenIds

Logits = npt.NDArray[np.float32]


def needs_adjusting(entry: SampleInput) -> bool:
    """True when ``adjust`` would change the logits."""
    params = entry.params
    return (
        len(entry.output) < params.min_tokens
        or bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def adjust(raw: Logits, entry: SampleInput, eos_token_ids: Collection[int]) -> Logits:
    """Return the logits ``[V]`` to choose from; ``raw`` itself when nothing changes."""
    if not needs_adjusting(entry):
        return raw
    row = raw.copy()
    params = entry.params
    if len(entry.output) < params.min_tokens:
        row[_known([*eos_token_ids, *params.stop_token_ids], len(row))] = -np.inf
    for token, bias in params.logit_bias.items():
        if 0 <= token < len(row):
            row[token] += np.float32(bias)
    _penalise(row, entry)
    return row


def _known(tokens: Collection[int], vocab_size: int) -> list[int]:
    return [token for token in tokens if 0 <= token < vocab_size]


def _penalise(row: Logits, entry: SampleInput) -> None:
    """Repetition over prompt and output; frequency and presence over the output only."""
    params = entry.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(
            np.concatenate([_in_vocab(entry.prompt, row), _in_vocab(entry.output, row)])
        )
        values = row[seen]
        penalty = np.float32(params.repetition_penalty)
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        tokens, counts = np.unique(_in_vocab(entry.output, row), return_counts=True)
        row[tokens] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        row[tokens] -= np.float32(params.presence_penalty)


def _in_vocab(tokens: TokenIds, row: Logits) -> TokenIds:
    return tokens[(tokens >= 0) & (tokens < len(row))]
