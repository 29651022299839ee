"""Whether what was found is what was required: the rule behind ``--require`` and ``--min-ratio``.

Pure. Wrong bytes are a failure whether or not anything is required. A ratio is judged on rows of
throughput that move at least ``JUDGED_NBYTES_MIN`` in a batch, or on all where none is that large:
below that the fixed cost of an operation dominates, which the percentiles of the small read show.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.doctor.grid import MIB
from launch.doctor.rows import Finding, Row, Unavailable
from launch.errors import LaunchError

EXIT_UNMET = 3  # measured, and it is not what was required
JUDGED_NBYTES_MIN = MIB


class RequirementUnmet(LaunchError):
    """A required transport is missing, too slow, or moved wrong bytes."""

    exit_code = EXIT_UNMET


def judged_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of throughput that ``--min-ratio`` applies to."""
    throughput = [row for row in rows if not row.is_latency]
    large = [row for row in throughput if row.nbytes >= JUDGED_NBYTES_MIN]
    return large or throughput


def check(findings: Sequence[Finding], required: Sequence[str], min_ratio: float | None) -> None:
    """Compare what was found with what was required.

    Raises:
        RequirementUnmet: the message names the row and both numbers.
    """
    for finding in findings:
        if isinstance(finding, Row) and not finding.verified:
            raise RequirementUnmet(f"{finding.name}: wrong bytes arrived: {finding.note}")
    for name in required:
        rows = [f for f in findings if isinstance(f, Row) and f.transport == name]
        if not rows:
            raise RequirementUnmet(_missing(name, findings))
        if min_ratio is not None:
            _check_ratio(name, rows, min_ratio)


def _missing(name: str, findings: Sequence[Finding]) -> str:
    for finding in findings:
        if isinstance(finding, Unavailable) and finding.transport == name:
            return f"--require {name}: not available: {finding.reason}: {finding.remedy}"
    return f"--require {name}: was not measured"


def _check_ratio(name: str, rows: Sequence[Row], min_ratio: float) -> None:
    known = [(row.ratio, row) for row in judged_rows(rows) if row.ratio is not None]
    if not known:
        reason = next((row.note for row in rows if row.note), "no row has a limit")
        raise RequirementUnmet(f"--require {name}: no ratio to compare with --min-ratio: {reason}")
    ratio, worst = min(known, key=lambda pair: pair[0])
    if ratio < min_ratio:
        raise RequirementUnmet(
            f"--require {name}: {worst.name}: ratio {ratio:.3f} ({worst.gbytes_per_s:.3f} of "
            f"{worst.limit_gbytes_per_s:.3f} GB/s of {worst.limit}), --min-ratio is {min_ratio:g}"
        )
