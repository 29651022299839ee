"""From logits to the next token: one sampler for every model, device and node.

Owns the choice among tokens and the facts of ``TokenOut``. Plain numpy, free of torch, so that the
fake model and the real one share it. Knows no pages and no scheduling.

Order of operations (vLLM's)::

    raw logits ── logprobs are reported of these
      │ min_tokens mask, logit_bias
      │ repetition, frequency, presence penalties          (engine/penalties.py)
      ├─ temperature < 1e-5: argmax, ties to the lowest id
      │ temperature
      │ min_p
      │ top_k, then top_p over what is left
      └─ inverse CDF at u = Philox(key=seed, counter=output index)

The random number depends on ``(seed, output index)`` only: never on the batch, on the node, or on
what was sampled before. So a request continues identically after a migration.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from engine.penalties import adjust, needs_adjusting
from engine.request import FinishReason, SamplingParams, TokenOut
from engine.step import SampleInput

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

GREEDY_TEMPERATURE = 1e-5
TOP_P_FIRST_CANDIDATES = 256
_SEED_MASK = (1 << 64) - 1
_PHILOX_DOMAIN = 0x6B766665727279 << 64  # "kvferry": our streams are nobody else's


def uniform(seed: int, index: int) -> float:
    """Return the random number in ``[0, 1)`` of output ``index`` under ``seed``.

    Philox4x64-10 (Salmon et al., SC'11): a keyed bijection of the counter, no state.
    """
    bits = np.random.Philox(key=_PHILOX_DOMAIN | (seed & _SEED_MASK), counter=index).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def is_plain_greedy(entry: SampleInput) -> bool:
    """True when the token is the argmax of the raw logits and nothing else is asked for."""
    params = entry.params
    return (
        params.temperature < GREEDY_TEMPERATURE
        and params.logprobs is None
        and not needs_adjusting(entry)
    )


def sample(
    logits: Logits, entries: Sequence[SampleInput], eos_token_ids: Collection[int]
) -> list[TokenOut]:
    """Choose one token for every row.

    Args:
        logits: ``[B, V]`` float32, read only.
        entries: what to sample with, one for each row.
        eos_token_ids: tokens that end a generation unless ``ignore_eos``.
    """
    assert len(logits) == len(entries), (logits.shape, len(entries))
    best = logits.argmax(axis=1).tolist() if len(entries) else []
    out: list[TokenOut] = []
    for row, (entry, greedy) in enumerate(zip(entries, best, strict=True)):
        if is_plain_greedy(entry):
            out.append(token_out(entry, greedy, eos_token_ids))
        else:
            out.append(_sample_row(logits[row], entry, eos_token_ids))
    return out


def token_out(entry: SampleInput, token: int, eos_token_ids: Collection[int]) -> TokenOut:
    """Return ``token`` as the next output of ``entry``, without logprobs."""
    index = len(entry.output)
    return TokenOut(
        index=index, token=token, stop=finish_reason(entry.params, index, token, eos_token_ids)
    )


def finish_reason(
    params: SamplingParams, index: int, token: int, eos_token_ids: Collection[int]
) -> FinishReason | None:
    """Return why output ``index`` ends the request, or None. STOP wins over LENGTH."""
    if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if index + 1 >= params.max_tokens else None


def _sample_row(raw: Logits, entry: SampleInput, eos_token_ids: Collection[int]) -> TokenOut:
    params = entry.params
    index = len(entry.output)
    row = adjust(raw, entry, eos_token_ids)
    if params.temperature < GREEDY_TEMPERATURE:
        token = int(row.argmax())
    else:
        token = draw(row, params, uniform(params.seed, index))
    logprob, top = (None, ()) if params.logprobs is None else _logprobs(raw, token, params.logprobs)
    return TokenOut(
        index=index,
        token=token,
        logprob=logprob,
        top_logprobs=top,
        stop=finish_reason(params, index, token, eos_token_ids),
    )


def draw(row: Logits, params: SamplingParams, u: float) -> int:
    """Return the token at quantile ``u`` of the filtered distribution of one row.

    Candidates lie on the CDF in order of their id.
    """
    scaled = row / np.float32(params.temperature)
    peak = scaled.max()
    ids: Ids | None = None
    if params.min_p > 0.0:
        ids = np.flatnonzero(scaled >= peak + np.float32(np.log(params.min_p)))
    if 0 < params.top_k < len(scaled):
        ids = _top_k(scaled, ids, params.top_k)
    weights = np.exp((scaled if ids is None else scaled[ids]).astype(np.float64) - float(peak))
    if params.top_p < 1.0:
        kept = _top_p(weights, params.top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    place = _quantile(weights, u)
    return place if ids is None else int(ids[place])


def _top_k(scaled: Logits, ids: Ids | None, top_k: int) -> Ids:
    """Ids of the ``top_k`` largest values; values equal to the smallest of them stay too."""
    values = scaled if ids is None else scaled[ids]
    if top_k >= len(values):
        assert ids is not None
        return ids
    kept = np.flatnonzero(values >= np.partition(values, -top_k)[-top_k])
    return kept if ids is None else ids[kept]


def _top_p(weights: Floats, top_p: float) -> Ids:
    """Places of the smallest set of largest weights whose share reaches ``top_p``, ascending.

    A place stays when the share of the weights before it (descending, ties by id) is below
    ``top_p``; the largest always stays. Sorting a whole vocabulary costs milliseconds, so only as
    many candidates are sorted as hold the share.
    """
    goal = top_p * float(weights.sum())
    count = TOP_P_FIRST_CANDIDATES
    while count < len(weights):
        places = np.flatnonzero(weights >= np.partition(weights, -count)[-count])
        if float(weights[places].sum()) >= goal:
            break
        count *= 8
    else:
        places = np.arange(len(weights))
    order = places[np.argsort(-weights[places], kind="stable")]
    before = np.cumsum(weights[order]) - weights[order]
    num_kept = max(1, int(np.count_nonzero(before < goal)))
    return np.sort(order[:num_kept])


def _quantile(weights: Floats, u: float) -> int:
    cdf = np.cumsum(weights)
    place = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    if place < len(weights):
        return place
    return int(np.flatnonzero(weights)[-1])  # u * total was rounded up to the total


def _logprobs(raw: Logits, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Logprob of ``token``, and the ``count`` most probable tokens, ties by id."""
    values = raw.astype(np.float64)
    peak = values.max()
    log_total = float(peak + np.log(np.exp(values - peak).sum()))
    chosen = float(values[token]) - log_total
    if count == 0:
        return chosen, ()
    count = min(count, len(values))
    places = np.flatnonzero(values >= np.partition(values, -count)[-count])
    order = places[np.argsort(-values[places], kind="stable")][:count]
    return chosen, tuple((int(i), float(values[i]) - log_total) for i in order)
