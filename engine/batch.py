"""From the steps of a scheduler to the flat arrays of one forward pass.

Owns the ragged index arithmetic. Pure numpy. Sequences lie one after the other, in the order
given; sequences with ``write_kv=False`` have their KV sent to the scratch page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.attention.interface import Int64s, RaggedBatch
from engine.page_allocator import SCRATCH_PAGE
from engine.step import SeqStep


class StepBatch(NamedTuple):
    """Arrays of one step; ``rows [R]`` are the last tokens of the sequences that sample."""

    tokens: Int64s
    positions: Int64s
    rows: Int64s
    ragged: RaggedBatch


def build_batch(steps: Sequence[SeqStep], page_size: int) -> StepBatch:
    """Return the flat form of ``steps``; mutates nothing."""
    counts = np.array([len(s.tokens) for s in steps], dtype=np.int64)
    starts = np.array([s.start for s in steps], dtype=np.int64)
    ends = starts + counts
    num_pages = -(-ends // page_size)
    qo_indptr = _indptr(counts)
    kv_indptr = _indptr(num_pages)
    tables = [
        np.asarray(s.page_ids[:n], dtype=np.int32)
        for s, n in zip(steps, num_pages.tolist(), strict=True)
    ]
    kv_indices = np.concatenate(tables)
    assert len(kv_indices) == kv_indptr[-1], "a page table is too short"
    positions = np.arange(qo_indptr[-1]) - np.repeat(qo_indptr[:-1] - starts, counts)
    page_index = positions // page_size
    pages = kv_indices[np.repeat(kv_indptr[:-1], counts) + page_index].astype(np.int64)
    written = np.repeat(np.array([s.write_kv for s in steps], dtype=bool), counts)
    pages[~written] = SCRATCH_PAGE
    sampled = np.array([s.sample is not None for s in steps], dtype=bool)
    return StepBatch(
        tokens=np.concatenate([s.tokens for s in steps]).astype(np.int64),
        positions=positions,
        rows=(qo_indptr[1:] - 1)[sampled].astype(np.int64),
        ragged=RaggedBatch(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=(ends - (num_pages - 1) * page_size).astype(np.int32),
            slots=pages * page_size + positions % page_size,
        ),
    )


def _indptr(counts: Int64s) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
