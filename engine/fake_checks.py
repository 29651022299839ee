"""Assertions about what a scheduler hands to the engine: are its page tables sane?

Owns the checks of the fake model. A failure here is a bug of the calling node, named by the
sequence's place in the batch. Each check holds for every step of a correct node:

* tokens are of the vocabulary, at least one, and end within ``max_model_len``;
* the page table covers every position, within the pool, without the scratch page, without repeats;
* no slot is written by two sequences, or written by one and attended to by another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.page_allocator import SCRATCH_PAGE
from engine.step import ModelInfo, SeqStep


def check_tables(info: ModelInfo, num_pages: int, steps: Sequence[SeqStep]) -> None:
    """Assert the above; mutates nothing."""
    size = info.spec.page_size
    holders: Counter[int] = Counter()
    for i, step in enumerate(steps):
        end = step.start + len(step.tokens)
        assert len(step.tokens) >= 1, f"sequence {i}: no tokens"
        assert 0 <= step.start < end <= info.max_model_len, f"sequence {i}: ends at {end}"
        low, high = int(step.tokens.min()), int(step.tokens.max())
        assert low >= 0, f"sequence {i}: token {low}"
        assert high < info.vocab_size, f"sequence {i}: token {high}"
        table = list(step.page_ids[: info.spec.num_pages_for(end)])
        assert len(table) * size >= end, f"sequence {i}: {len(table)} pages for {end} positions"
        assert min(table) > SCRATCH_PAGE, f"sequence {i}: the scratch page is in {table}"
        assert max(table) < num_pages, f"sequence {i}: page {max(table)} of {num_pages}"
        distinct = set(table)
        assert len(distinct) == len(table), f"sequence {i}: a page is twice in {table}"
        holders.update(distinct)
    for i, step in enumerate(steps):
        if step.write_kv:
            _check_written(size, steps, i, holders)


def _check_written(size: int, steps: Sequence[SeqStep], writer: int, holders: Counter[int]) -> None:
    """Assert that no other sequence of the batch holds a slot that ``writer`` writes."""
    step = steps[writer]
    end = step.start + len(step.tokens)
    for index in range(step.start // size, (end - 1) // size + 1):
        page = step.page_ids[index]
        if holders[page] == 1:
            continue
        first_slot = max(step.start - index * size, 0)
        for other, reader in enumerate(steps):
            reader_end = reader.start + len(reader.tokens)
            table = list(reader.page_ids[: -(-reader_end // size)])
            if other != writer and page in table:
                num_valid = min(reader_end - table.index(page) * size, size)
                assert num_valid <= first_slot, (
                    f"sequence {writer} writes page {page} slot {first_slot}, which sequence "
                    f"{other} holds up to slot {num_valid}"
                )
