"""Whether what was found is what was required: the rule behind ``--require`` and ``--min-ratio``.

Pure. Wrong bytes are a failure whether or not anything is required; so is a transport that broke
while it was measured. A ratio is judged on rows of throughput that move at least
``JUDGED_NBYTES_MIN`` in a batch, or on all where none is that large: below that the fixed cost of
an operation dominates, which the percentiles of the small read show, and a memcpy of the same pages
stays within the processor's cache, which no transport can.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.doctor.grid import MIB
from launch.doctor.rows import Finding, Row, Unavailable
from launch.errors import LaunchError, StartError

EXIT_UNMET = 3  # measured, and it is not what was required
JUDGED_NBYTES_MIN = 8 * MIB  # with its copy, more than a core's share of a cache


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
        RequirementUnmet: the message names the transports, the worst rows and both numbers.
        StartError: nothing that was required is unmet, but a transport broke.
    """
    for finding in findings:
        if isinstance(finding, Row) and not finding.verified:
            raise RequirementUnmet(f"{finding.name}: wrong bytes arrived: {finding.note}")
    unmet = [words for name in required for words in _missing(name, findings)]
    if min_ratio is not None and not unmet:
        unmet = _below(min_ratio, findings, required)
    if unmet:
        raise RequirementUnmet("; ".join(unmet))
    for finding in findings:
        if isinstance(finding, Unavailable) and finding.failed:
            raise StartError(f"{finding.transport}: failed: {finding.reason}: {finding.remedy}")


def _missing(name: str, findings: Sequence[Finding]) -> list[str]:
    """Return what is wrong with a required transport apart from its speed; empty when nothing."""
    mine = [finding for finding in findings if finding.transport == name]
    for finding in mine:
        if isinstance(finding, Unavailable):
            state = "failed" if finding.failed else "not available"
            return [f"--require {name}: {state}: {finding.reason}: {finding.remedy}"]
    return [] if mine else [f"--require {name}: was not measured"]


def _below(min_ratio: float, findings: Sequence[Finding], required: Sequence[str]) -> list[str]:
    """Return what is slower than asked for: of what is required, else of all that has a limit."""
    rows = [finding for finding in findings if isinstance(finding, Row)]
    limited = tuple(dict.fromkeys(row.transport for row in rows if row.ratio is not None))
    if not required and not limited:
        return ["--min-ratio: nothing was measured that has a limit to compare with"]
    unmet: list[str] = []
    for name in required or limited:
        option = f"--require {name}" if required else "--min-ratio"
        words = _shortfall([row for row in rows if row.transport == name], min_ratio)
        unmet += [f"{option}: {words}"] if words else []
    return unmet


def _shortfall(rows: Sequence[Row], min_ratio: float) -> str:
    """Return how many rows of one transport fall short, and the worst; empty when none does."""
    known = [(row.ratio, row) for row in judged_rows(rows) if row.ratio is not None]
    if not known:
        reason = next((row.note for row in rows if row.note), "no row has a limit")
        return f"no ratio to compare with --min-ratio: {reason}"
    short = sum(ratio < min_ratio for ratio, _ in known)
    if not short:
        return ""
    ratio, worst = min(known, key=lambda pair: pair[0])
    return (
        f"{short} of {len(known)} rows fall short of --min-ratio {min_ratio:g}, the worst is "
        f"{worst.name}: ratio {ratio:.3f} ({worst.gbytes_per_s:.3f} of "
        f"{worst.limit_gbytes_per_s:.3f} GB/s of {worst.limit})"
    )
