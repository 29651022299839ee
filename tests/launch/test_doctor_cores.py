"""The doctor's pure parts: grid, statistics, rows, verdict, pattern."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest

from launch.doctor.grid import (
    CASE_NBYTES_MAX,
    DEFAULT_CASE_NBYTES_MAX,
    FULL_PAGES,
    KIB,
    LATENCY,
    MIB,
    REPEATS_MAX,
    SAMPLE_NBYTES,
    Case,
    choose_cases,
    scattered,
    step_timeout_s,
)
from launch.doctor.memory import remedy_of
from launch.doctor.pattern import arrived_here, fill, pattern, untouched, wrong_byte
from launch.doctor.rows import (
    NO_BOUND,
    Bound,
    Op,
    Row,
    Unavailable,
    decode_finding,
    encode_finding,
    latency_row,
    percentile,
    throughput_row,
)
from launch.doctor.verdict import JUDGED_NBYTES_MIN, RequirementUnmet, check, judged_rows
from launch.errors import ConfigError, StartError
from transfer.ranges import plan

KEYS = {
    "transport",
    "op",
    "page_nbytes",
    "batch",
    "gbytes_per_s",
    "limit",
    "limit_gbytes_per_s",
    "ratio",
    "p50_us",
    "p99_us",
    "verified",
}


def row(
    ratio: float = 1.0,
    *,
    transport: str = "tcp",
    op: Op = "read",
    case: Case = Case(MIB, 1),
    verified: bool = True,
) -> Row:
    wrong = "" if verified else "byte 7 is 0x00, not 0x01"
    return throughput_row(transport, op, case, [1.0], Bound("plain socket", [ratio]), wrong=wrong)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 31, 64, 100, 255, 256, 511, 512, 4096])
def test_no_two_pages_of_a_batch_can_be_merged(batch: int) -> None:
    case = Case(8, batch)
    assert sorted(scattered(batch)) == list(range(batch))
    for destination in ("local", "remote"):
        merged = plan(
            case.ranges(),
            local_nbytes=case.nbytes,
            remote_nbytes=case.nbytes,
            destination=destination,  # type: ignore[arg-type]
        )
        assert len(merged) == batch


@pytest.mark.parametrize("full", [False, True])
def test_the_grids_reach_from_4_kib_to_64_mib_and_from_1_to_512_pages_under_their_cap(
    full: bool,
) -> None:
    cases = choose_cases([], [], full=full)
    cap = CASE_NBYTES_MAX if full else DEFAULT_CASE_NBYTES_MAX
    assert max(case.nbytes for case in cases) == cap
    assert {min(cases).page_nbytes, max(cases).page_nbytes} == {4 * KIB, 64 * MIB}
    assert {1, 512} <= {case.batch for case in cases}
    assert len(set(cases)) == len(cases)
    if full:
        assert {case.page_nbytes for case in cases} == set(FULL_PAGES)


def test_named_sizes_are_measured_exactly() -> None:
    assert choose_cases(["368640", "5MiB"], [64], full=False) == [
        Case(368_640, 64),
        Case(5 * MIB, 64),
    ]
    assert choose_cases(["64KiB"], [256], full=True) == [Case(64 * KIB, 256)]
    assert {case.page_nbytes for case in choose_cases(["64KiB"], [], full=False)} == {64 * KIB}
    assert {case.batch for case in choose_cases([], [3], full=False)} == {1, 3}  # 64 MiB: only 1


@pytest.mark.parametrize(
    ("pages", "batches", "named"),
    [
        (["5MiB"], [256], "--batch 256"),
        (["12"], [1], "--pages 12"),
        (["2GiB"], [1], "--pages 2GiB"),
        (["many"], [1], "--pages many"),
        (["4KiB"], [0], "--batch 0"),
        ([], [5000], "--batch 5000"),
    ],
)
def test_sizes_that_cannot_be_measured_are_named(
    pages: list[str], batches: list[int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        choose_cases(pages, batches, full=False)


def test_a_sample_of_small_batches_repeats_them_and_one_of_large_ones_does_not() -> None:
    assert Case(4 * KIB, 1).repeats == REPEATS_MAX
    assert Case(MIB, 1).repeats * MIB == SAMPLE_NBYTES
    assert Case(5 * MIB, 64).repeats == 1


def test_percentiles_are_samples_by_nearest_rank() -> None:
    samples = list(range(1, 101))[::-1]
    assert [percentile(samples, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0
    rng = np.random.default_rng(0)
    for _ in range(50):
        some = rng.random(int(rng.integers(1, 40))).tolist()
        for percent in (1, 33, 50, 99, 100):
            found = percentile(some, percent)
            assert sum(x <= found for x in some) >= len(some) * percent / 100
            assert sum(x < found for x in some) < len(some) * percent / 100


def test_rate_limit_and_ratio_come_from_medians() -> None:
    case = Case(1000, 1000)
    bound = Bound("memcpy", [0.001, 5.0, 0.0005])
    found = throughput_row("shm", "write", case, [0.002, 0.001, 0.1], bound)
    assert statistics.median([0.002, 0.001, 0.1]) == 0.002
    assert (found.gbytes_per_s, found.limit_gbytes_per_s, found.ratio) == (0.5, 1.0, 0.5)
    assert (found.p50_us, found.p99_us) == (None, None)


def test_a_row_without_limit_has_nulls_and_says_why() -> None:
    found = throughput_row("ucx", "read", LATENCY, [1.0], NO_BOUND, note="missing")
    assert (found.limit, found.limit_gbytes_per_s, found.ratio) == (None, None, None)
    assert found.note == "missing"


def test_latency_row_has_percentiles_in_microseconds() -> None:
    seconds = [100e-6] * 98 + [900e-6, 5.0]
    found = latency_row("tcp", LATENCY, seconds, Bound("plain socket", [20e-6]))
    assert (found.p50_us, found.p99_us, found.limit_p50_us) == (100.0, 900.0, 20.0)
    assert (found.op, found.page_nbytes, found.batch) == ("read", 4096, 1)


def test_findings_survive_json_and_rows_have_the_promised_keys() -> None:
    missing = Unavailable(transport="ucx", reason="not here", remedy="install it")
    for finding in (row(0.5), missing):
        assert decode_finding(encode_finding(finding)) == finding
    assert set(json.loads(encode_finding(row()))) >= KEYS
    assert json.loads(encode_finding(missing)) == {
        "transport": "ucx",
        "reason": "not here",
        "remedy": "install it",
        "available": False,
        "failed": False,
    }


def test_a_required_transport_that_is_there_and_fast_enough_passes() -> None:
    check([row(0.9), row(0.8, op="write")], ["tcp"], 0.8)
    check([row(0.1)], ["tcp"], None)
    check([row(0.9), Unavailable(transport="ucx", reason="r", remedy="r")], [], 0.9)


@pytest.mark.parametrize(
    ("findings", "min_ratio", "words"),
    [
        (
            [Unavailable(transport="tcp", reason="no wire", remedy="plug it in")],
            None,
            ["--require tcp", "no wire", "plug it in"],
        ),
        ([], None, ["--require tcp", "not measured"]),
        (
            [row(0.9), row(0.7, op="write")],
            0.8,
            ["tcp write", "0.700", "1 of 2 rows", "--min-ratio 0.8", "plain socket"],
        ),
        ([row(verified=False)], None, ["tcp read", "wrong bytes", "byte 7"]),
    ],
)
def test_what_is_not_as_required_is_named_with_both_numbers(
    findings: list[Row | Unavailable], min_ratio: float | None, words: list[str]
) -> None:
    with pytest.raises(RequirementUnmet) as caught:
        check(findings, ["tcp"], min_ratio)
    assert caught.value.exit_code == 3
    for word in words:
        assert word in str(caught.value)


def test_a_transport_that_broke_after_some_rows_fails_with_3_if_required_else_1() -> None:
    broke = Unavailable(transport="tcp", reason="lost", remedy="start it again", failed=True)
    with pytest.raises(RequirementUnmet, match="--require tcp: failed: lost: start it again"):
        check([row(), broke], ["tcp"], None)
    with pytest.raises(StartError, match="tcp: failed: lost: start it again") as caught:
        check([row(), broke], [], None)
    assert caught.value.exit_code == 1


def test_without_a_requirement_every_measured_transport_is_held_against_the_ratio() -> None:
    slow, slower = row(0.4, transport="shm"), row(0.2, transport="shm", op="write")
    found = [slow, slower, row(0.9), row(0.1, transport="ucx")]
    with pytest.raises(RequirementUnmet) as caught:
        check(found, [], 0.5)
    for word in ("2 of 2 rows", "shm write", "0.200", "1 of 1 rows", "ucx read"):
        assert word in str(caught.value)
    assert "tcp" not in str(caught.value)
    check(found, ["tcp"], 0.5)
    with pytest.raises(RequirementUnmet, match="nothing was measured"):
        check([], [], 0.5)


def test_a_remedy_for_ucx_fits_its_reason() -> None:
    assert "pip install" in remedy_of("ucx", "not installed: pip install 'ucxx-cu12>=0.40'")
    assert "UCX_TLS" in remedy_of("ucx", "ucx does not open: No such device")
    assert "firewall" in remedy_of("tcp", "unreachable")


def test_a_step_that_moves_nothing_may_take_10_s_and_no_case_takes_half_a_minute() -> None:
    assert step_timeout_s(0) == 10.0
    assert step_timeout_s(CASE_NBYTES_MAX) < 30.0


def test_wrong_bytes_fail_even_when_nothing_is_required() -> None:
    with pytest.raises(RequirementUnmet, match="wrong bytes"):
        check([row(verified=False)], [], None)


def test_a_ratio_without_a_limit_to_compare_with_does_not_pass() -> None:
    found = throughput_row("ucx", "read", Case(MIB, 1), [1.0], NO_BOUND, note="gone")
    with pytest.raises(RequirementUnmet, match="gone"):
        check([found], ["ucx"], 0.5)


def test_ratios_are_judged_on_large_batches_where_there_are_any() -> None:
    large, small = row(0.9, case=Case(JUDGED_NBYTES_MIN, 1)), row(0.1, case=Case(4 * KIB, 1))
    latency = latency_row("tcp", LATENCY, [1.0], Bound("plain socket", [0.01]))
    assert judged_rows([large, small, latency]) == [large]
    assert judged_rows([small, latency]) == [small]


def test_no_word_of_the_pattern_is_found_twice() -> None:
    words = np.concatenate([pattern(seed, 0, MIB).view(np.uint64) for seed in (1, 2, 3)])
    assert len(np.unique(words)) == len(words)
    assert np.array_equal(pattern(1, 4096, 64), pattern(1, 0, 8192)[4096:4160])


def test_the_check_finds_one_flipped_bit_a_shift_a_swap_and_a_repetition() -> None:
    case = Case(4096, 4)
    right = bytearray(case.nbytes)
    fill(memoryview(right), 5)
    assert wrong_byte(memoryview(right), 5, untouched(case)) == ""
    flipped = bytearray(right)
    flipped[9000] ^= 1
    assert wrong_byte(memoryview(flipped), 5, untouched(case)).startswith("byte 9000 is ")
    others = [
        right[8:] + right[:8],
        right[4096:8192] + right[:4096] + right[8192:],
        right[:4096] * 4,
        bytes(len(right)),
    ]
    for wrong in others:
        assert wrong_byte(memoryview(bytearray(wrong)), 5, untouched(case))
    assert wrong_byte(memoryview(right), 6, untouched(case))


def test_the_check_of_a_read_follows_every_page_to_its_place() -> None:
    case = Case(64, 7)
    there, here = bytearray(case.nbytes), bytearray(case.nbytes)
    fill(memoryview(there), 1)
    for remote, local, nbytes in case.ranges():
        here[local : local + nbytes] = there[remote : remote + nbytes]
    assert wrong_byte(memoryview(here), 1, arrived_here(case)) == ""
    assert wrong_byte(memoryview(there), 1, arrived_here(case))
