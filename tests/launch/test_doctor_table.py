"""What the doctor prints for people, at every width, and the benchmark that reads its JSON."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from benchmarks import transfer as benchmark
from launch.doctor.grid import LATENCY, MIB, Case
from launch.doctor.rows import (
    NO_BOUND,
    Bound,
    Finding,
    Op,
    Row,
    Unavailable,
    latency_row,
    throughput_row,
)
from launch.doctor.table import LINE_INTERVAL_S, lines_of_progress, plain, progress, table
from launch.doctor.verdict import RequirementUnmet, check, judged_rows

MISSING = Unavailable(transport="ucx", reason="no module named ucxx", remedy="pip install it")


def throughput(transport: str, op: Op, case: Case, rate: float, bound: float) -> Row:
    """A row of ``rate`` GB/s beside a limit of ``bound``."""
    gbytes = case.nbytes / 1e9
    limit = Bound("memcpy", [gbytes / bound])
    return throughput_row(transport, op, case, [gbytes / rate], limit, via="memfd")


def small_read(transport: str, p50_us: float, p99_us: float) -> Row:
    seconds = [p50_us / 1e6] * 98 + [p99_us / 1e6] * 2
    return latency_row(transport, LATENCY, seconds, Bound("plain socket", [1e-5]))


FINDINGS: list[Finding] = [
    throughput("shm", "read", Case(MIB, 64), 9.0, 10.0),
    throughput("shm", "write", Case(MIB, 64), 8.0, 10.0),
    small_read("tcp", 120, 800),
    MISSING,
]


def test_plain_text_has_every_figure_once_and_says_what_is_missing() -> None:
    text = plain(FINDINGS)
    lines = text.splitlines()
    assert len(lines) == 1 + 3 + 3
    assert lines[1].split() == [
        *("shm", "read", "1", "MiB", "64"),
        *("9.000", "10.000", "memcpy", "0.90", "right"),
    ]
    assert "120" in lines[3]
    assert "800" in lines[3]
    assert "shm: memfd" in lines
    assert "ucx: not available: no module named ucxx" in lines
    assert "ucx: to do: pip install it" in lines
    assert not any(line.endswith(" ") for line in lines)


def test_a_bar_is_full_and_green_at_the_limit_and_beyond() -> None:
    for rate in (10.0, 12.0):
        shown = table([throughput("tcp", "read", Case(MIB, 64), rate, 10.0)], 140)
        out = io.StringIO()
        Console(file=out, width=140, force_terminal=True, color_system="standard").print(shown)
        bars = re.findall(r"\x1b\[(\d+)m(━+)", out.getvalue())
        assert [(style, len(bar) >= 8) for style, bar in bars] == [("32", True)]
        assert f"{rate / 10:.2f}" in out.getvalue()


def test_every_row_that_is_judged_is_in_the_table() -> None:
    """Also of a page and batch that have their own row of percentiles."""
    small = throughput("tcp", "read", LATENCY, 0.14, 10.0)
    found = [small, throughput("tcp", "write", LATENCY, 1.0, 2.0), small_read("tcp", 120, 800)]
    assert judged_rows(found) == found[:2]
    with pytest.raises(RequirementUnmet, match=r"tcp read, 1 x 4096 bytes: ratio 0\.014 \(0\.140 "):
        check(found, [], 0.9)
    assert [line.split()[:5] for line in plain(found).splitlines()[1:4]] == [
        ["tcp", "read", "4", "KiB", "1"],
        ["tcp", "write", "4", "KiB", "1"],
        ["tcp", "read", "4", "KiB", "1"],
    ]
    assert "0.140" in plain(found).splitlines()[1]
    shown = table(found, 140)
    assert shown is not None
    assert shown.row_count == 3


def test_benchmark_runs_can_be_chosen_by_every_name_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {run.transport for run in benchmark.plan(1, [])} == set(benchmark.NAMES)
    monkeypatch.setattr("sys.argv", ["transfer", "--only", "pigeon"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert "stalled" in capsys.readouterr().err


def test_wrong_bytes_stand_out() -> None:
    wrong = "byte 3 is 0x00, not 0x01"
    row = throughput_row("tcp", "read", Case(8, 1), [1.0], NO_BOUND, wrong=wrong)
    assert "WRONG BYTES: byte 3" in plain([row])


def printed(width: int) -> str | None:
    """The table as a terminal of that width shows it."""
    shown = table(FINDINGS, width)
    if shown is None:
        return None
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(shown)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140, 240])
def test_table_with_bars_fits_the_terminal(width: int) -> None:
    text = printed(width)
    assert text is not None
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    bars = [line.count("━") for line in lines if " read " in line or " write " in line]
    assert bars[0] > bars[1] > 0  # 0.9 of the limit beside 0.8
    assert "9.000" in text


def test_a_narrow_terminal_leaves_the_limits_out_and_a_tiny_one_has_no_table() -> None:
    shown = {width: printed(width) for width in range(40, 120)}
    for width, text in shown.items():
        if text is not None:
            assert "━" in text
            assert "9.000" in text
            assert "0.90" in text
            assert max(map(len, text.splitlines())) <= width
    assert "memcpy" not in (shown[80] or "memcpy")
    assert "memcpy" in (shown[119] or "")
    assert shown[40] is None


@pytest.mark.parametrize("rows_follow", [True, False])
def test_progress_is_silent_where_the_end_or_rows_come_soon(
    rows_follow: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress(2, rows_follow=rows_follow) as report:
        report("one")
        report("two")
    assert capsys.readouterr() == ("", "")


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    report = lines_of_progress(40, lambda: now_s)
    for number in range(1, 41):
        now_s += LINE_INTERVAL_S / 8
        report(f"tcp read, {number} x 8 bytes")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"measured {number} of 40: tcp read, {number} x 8 bytes" for number in (8, 16, 24, 32, 40)
    ]


def measured(factor: float) -> dict[str, list[Finding]]:
    """What a machine finds whose every figure is ``factor`` times its target."""
    found: dict[str, list[Finding]] = {}
    for run in benchmark.plan(5, []):
        name = run.transport
        target = {"loopback": 0.85, "shm": 0.75, "tcp": 0.85, "ucx": 0.5, "stalled": 0.9}[name]
        rows: list[Finding] = found.setdefault(run.command, [])
        ops: tuple[Op, ...] = ("read", "write")
        if name == "stalled":
            rows.append(throughput("tcp", "stalled_peer", Case(MIB, 96), target * factor, 1.0))
        elif "64KiB" in run.arguments:
            rows += [throughput("tcp", op, benchmark.SMALL, 0.425 * factor**2, 1.0) for op in ops]
        else:
            rows += [
                throughput(name, op, case, target * factor, 1.0)
                for case in (benchmark.SMOL, benchmark.LARGE)
                for op in ops
            ]
            slow = 150 if name == "tcp" else 300
            rows.append(small_read(name, slow / factor, 1000 / factor))
    return found


@pytest.mark.parametrize(("factor", "passes"), [(1.01, True), (0.99, False)])
def test_benchmark_passes_each_target_that_is_reached_and_no_other(
    factor: float, passes: bool
) -> None:
    found = measured(factor)
    figures = benchmark.measure(benchmark.plan(5, []), lambda run: found[run.command])
    assert len(figures) == 4 + 4 + (4 + 2 + 2) + 2 * (4 + 1) + 1
    assert [figure.name for figure in figures if figure.passed is not passes] == []
    text = benchmark.show(figures)
    assert text.count("| pass |") == (len(figures) if passes else 0)
    assert text.count("| short |") == (0 if passes else len(figures))


def test_benchmark_counts_a_missing_transport_and_wrong_bytes_as_short() -> None:
    ucx = benchmark.plan(1, ["ucx"])
    assert [run.environment for run in ucx] == [{"UCX_TLS": "tcp"}, {"UCX_TLS": "posix"}]
    assert not any(figure.passed for figure in benchmark.measure(ucx, lambda run: [MISSING]))
    bound = Bound("memcpy", [9.0])
    wrong = throughput_row("shm", "read", benchmark.SMOL, [1.0], bound, wrong="byte 0")
    figures = benchmark.measure(benchmark.plan(1, ["shm"]), lambda run: [wrong])
    assert [figure.passed for figure in figures] == [False]


def test_benchmark_counts_a_run_that_measured_nothing_as_short() -> None:
    runs = benchmark.plan(1, ["tcp"])
    figures = benchmark.measure(runs, lambda run: [])
    assert [figure.passed for figure in figures] == [False] * len(runs)
