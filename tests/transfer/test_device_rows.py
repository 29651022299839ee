"""Scattered copies as rows: which are worth it, and that they name every byte once."""

from __future__ import annotations

import random

from transfer.device_memory import Run
from transfer.device_rows import MAX_DIRECT_RUNS, MAX_ROWS, MIN_ROW_NBYTES, as_rows

KIB = 1024


def packed(spans: list[tuple[int, int]], start: int = 0) -> list[Run]:
    runs = []
    for offset, nbytes in spans:
        runs.append(Run(offset, start, nbytes))
        start += nbytes
    return runs


def test_64_pages_of_64_kib_are_64_rows() -> None:
    rows = as_rows(packed([(page * 128 * KIB, 64 * KIB) for page in range(64)]))
    assert rows is not None
    assert rows.row_nbytes == 64 * KIB
    assert rows.places == [2 * page for page in range(64)]


def test_pages_of_368640_bytes_are_copied_one_by_one() -> None:
    assert as_rows(packed([(page * 1_000_000, 368_640) for page in range(11)])) is None


def test_a_page_cut_by_the_end_of_a_slot_still_goes_by_rows() -> None:
    page = 40 * KIB
    spans = [(2 * i * page, page) for i in range(100)] + [(900 * page, page // 5)]
    rows = as_rows(packed(spans))
    assert rows is not None
    assert rows.row_nbytes == 8 * KIB


def test_few_long_odd_or_gapped_runs_are_copied_one_by_one() -> None:
    few = packed([(i * 8 * KIB, 4 * KIB) for i in range(MAX_DIRECT_RUNS)])
    odd = packed([(i * 1001, 1001) for i in range(100)])
    tiny = packed([(i * 2 * 256, 256) for i in range(100)])
    gapped = [Run(i * 8 * KIB, i * 8 * KIB, 4 * KIB) for i in range(100)]
    many = packed([(2 * i * MIN_ROW_NBYTES, MIN_ROW_NBYTES) for i in range(MAX_ROWS + 1)])
    for runs in (few, odd, tiny, gapped, many):
        assert as_rows(runs) is None


def test_a_row_divides_offsets_as_well_as_lengths() -> None:
    rows = as_rows(packed([(i * 64 * KIB + 512, 4 * KIB) for i in range(8)]))
    assert rows is not None
    assert rows.row_nbytes == 512
    assert rows.places[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 129]


def test_rows_and_runs_name_the_same_bytes() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        unit = rng.choice([512, 1024, 1536, 4096])
        order = rng.sample(range(0, 400, 2), 40)
        runs = packed([(at * unit, unit * rng.randint(1, 2)) for at in order], 8 * seed)
        rows = as_rows(runs)
        assert rows is not None
        by_row = [place * rows.row_nbytes + i for place in rows.places for i in (0, 511)]
        by_run = [
            run.device_offset + at + i
            for run in runs
            for at in range(0, run.nbytes, rows.row_nbytes)
            for i in (0, 511)
        ]
        assert by_row == by_run
        assert rows.pinned_offset == runs[0].pinned_offset
        assert rows.nbytes == sum(run.nbytes for run in runs)
