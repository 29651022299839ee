"""The transfer engine's figures beside their targets, from ``kvferry doctor --json``.

    python -m benchmarks.transfer [--rounds 5] [--only loopback --only tcp ...]

Each target is a ratio to a limit that was measured in the same rounds, or a percentile. ``short``
means that this run, on this machine, fell short; the command exits with 1 then. Pages of 368,640
bytes are 16 tokens of SmolLM2, those of 5 MiB 16 tokens of a model of 70 billion parameters.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.machine import describe
from launch.doctor.grid import MIB, Case
from launch.doctor.rows import Finding, Row, Unavailable, decode_finding

SMOL, LARGE, SMALL = Case(368_640, 64), Case(5 * MIB, 64), Case(65_536, 256)
PAGES = ("--pages", "368640", "--pages", "5MiB", "--batch", "64")
MANY_SMALL = ("--pages", "64KiB", "--batch", "256")
UCX_PATHS = ("tcp", "posix")
NAMES = ("loopback", "shm", "tcp", "ucx", "stalled")


class Run(NamedTuple):
    """One ``kvferry doctor`` of the plan."""

    transport: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}

    @property
    def command(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "kvferry doctor --json", *self.arguments])


class Figure(NamedTuple):
    """One line of the result. ``value`` is None where it could not be measured."""

    name: str
    value: float | None
    target: float
    at_least: bool
    detail: str

    @property
    def passed(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.target if self.at_least else self.value <= self.target


def plan(rounds: int, only: Sequence[str]) -> list[Run]:
    """Return the runs, in the order of the report."""
    common = ("--rounds", str(rounds))
    runs = [Run(name, ("--transfer", name, *PAGES, *common)) for name in ("loopback", "shm")]
    runs.append(Run("tcp", ("--transfer", "tcp", *PAGES, *common)))
    runs.append(Run("tcp", ("--transfer", "tcp", *MANY_SMALL, *common)))
    runs += [
        Run("ucx", ("--transfer", "ucx", *PAGES, *common), {"UCX_TLS": path}) for path in UCX_PATHS
    ]
    runs.append(Run("stalled", ("--stalled-peer", "--transfer", "tcp", *common)))
    return [run for run in runs if not only or run.transport in only]


def perform(run: Run) -> list[Finding]:
    """Run one doctor; return what it found."""
    print(f"$ {run.command}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "launch.main", "doctor", "--json", *run.arguments],
        env={**os.environ, **run.environment},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return [decode_finding(line) for line in done.stdout.splitlines()]


def throughput(rows: Iterable[Row], case: Case) -> Iterator[Row]:
    """Yield the rows of one case: read, read with checksum, write."""
    for row in rows:
        if (row.page_nbytes, row.batch) == case and not row.is_latency:
            yield row


def ratios(run: str, rows: Sequence[Row], target: float) -> Iterator[Figure]:
    """Yield the ratios of both page sizes."""
    for case in (SMOL, LARGE):
        for row in throughput(rows, case):
            what = f"{row.op} + checksum" if row.checksum else row.op
            name = f"{run} {what}, {case.batch} x {case.page_nbytes} B, of {row.limit}"
            value = row.ratio if row.verified else None
            yield Figure(name, value, target, True, _rates(row))


def percentiles(run: str, rows: Sequence[Row], p50_us: float, p99_us: float) -> Iterator[Figure]:
    """Yield the small read's percentiles, in microseconds."""
    for row in rows:
        if row.is_latency:
            detail = "" if row.limit_p50_us is None else f"limit {row.limit_p50_us:.0f} us"
            yield Figure(f"{run} read of 4 KiB, p50 us", row.p50_us, p50_us, False, detail)
            if p99_us:
                yield Figure(f"{run} read of 4 KiB, p99 us", row.p99_us, p99_us, False, "")


def small_pages(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield what 256 pages of 64 KiB reach of the rate of 5 MiB pages."""
    large = {row.op: row.gbytes_per_s for row in throughput(rows, LARGE) if not row.checksum}
    for row in throughput(rows, SMALL):
        if row.op in large and not row.checksum:
            detail = f"{row.gbytes_per_s:.2f} of {large[row.op]:.2f} GB/s"
            value = row.gbytes_per_s / large[row.op]
            yield Figure(f"tcp {row.op}, 256 x 64 KiB of 5 MiB pages", value, 0.5, True, detail)


def _rates(row: Row) -> str:
    limit = row.limit_gbytes_per_s
    return f"{row.gbytes_per_s:.2f} GB/s" + ("" if limit is None else f" of {limit:.2f}")


def _stalled(rows: Sequence[Row]) -> Iterator[Figure]:
    for row in rows:
        if row.op == "stalled_peer":
            name = "tcp, three peers beside a stalled one"
            yield Figure(name, row.ratio if row.verified else None, 0.9, True, _rates(row))


def figures(run: Run, findings: Sequence[Finding], before: Sequence[Row]) -> Iterator[Figure]:
    """Yield the figures of one run; ``before`` are the rows of the same transport's last run."""
    rows = [finding for finding in findings if isinstance(finding, Row)]
    for finding in findings:
        if isinstance(finding, Unavailable):
            yield Figure(f"{run.transport} is available", None, 1, True, finding.reason)
    path = run.environment.get("UCX_TLS")
    match run.transport:
        case "loopback":
            yield from ratios("loopback", rows, 0.85)
        case "shm":
            yield from ratios("shm", rows, 0.75)
        case "tcp":
            yield from ratios("tcp", rows, 0.85)
            yield from percentiles("tcp", rows if not before else (), 150, 1000)
            yield from small_pages([*before, *rows])
        case "ucx":
            yield from ratios(f"ucx over {path}", rows, 0.5)
            yield from percentiles(f"ucx over {path}", rows, 300, 0)
        case _:
            yield from _stalled(rows)


def measure(runs: Sequence[Run], do: Callable[[Run], list[Finding]] = perform) -> list[Figure]:
    """Perform the runs one after the other; return all figures."""
    found: list[Figure] = []
    before: dict[str, list[Row]] = {}
    for run in runs:
        findings = do(run)
        mine = list(figures(run, findings, before.get(run.transport, [])))
        found += mine or [Figure(f"{run.command} measured something", None, 1, True, "see above")]
        before[run.transport] = [row for row in findings if isinstance(row, Row)]
    return found


def show(found: Sequence[Figure]) -> str:
    """Return the figures as a table of Markdown."""
    lines = ["| figure | measured | target | | |", "|---|---|---|---|---|"]
    for figure in found:
        value = "-" if figure.value is None else f"{figure.value:.3g}"
        sign = "≥" if figure.at_least else "≤"
        verdict = "pass" if figure.passed else "short"
        cells = (figure.name, value, f"{sign} {figure.target:g}", verdict, figure.detail)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="interleaved rounds of each figure (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=NAMES,
        help="run only these of the plan; repeatable (default: all)",
    )
    args = parser.parse_args()
    runs = plan(args.rounds, args.only)
    found = measure(runs)
    print(f"{describe()}\n")
    print(show(found))
    print("\n" + "\n".join(run.command for run in runs))
    return 0 if found and all(figure.passed for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
