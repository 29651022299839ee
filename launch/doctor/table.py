"""How the doctor's findings look: a table with bars, aligned columns, or one JSON object a line.

Owns the presentation only. Results go to stdout, each row that ``--min-ratio`` judges among them;
progress to stderr: a bar where that is a terminal, else a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launch.doctor.rows import Finding, Row, Unavailable
from launch.output import write_line
from launch.progress import say
from launch.sizes import human_size

if TYPE_CHECKING:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

WIDTH_MAX = 10_000  # of a table that is measured before it is shown
LINE_INTERVAL_S = 10.0  # without a terminal: at most one line of progress in so many seconds
BAR_WIDTH_MIN, BAR_WIDTH_MAX = 8, 40
HEADINGS = (
    "transport",
    "op",
    "page",
    "batch",
    "GB/s",
    "limit",
    "of",
    "ratio",
    "p50 us",
    "p99 us",
    "bytes",
)
NARROW = tuple(heading for heading in HEADINGS if heading not in ("limit", "of"))
RIGHT = {"page", "batch", "GB/s", "limit", "ratio", "p50 us", "p99 us"}

Report = Callable[[str], None]


def cells(row: Row) -> tuple[str, ...]:
    """Return the row under ``HEADINGS``."""
    return (
        row.transport,
        row.op.replace("_", " ") + ("+checksum" if row.checksum else ""),
        human_size(row.page_nbytes).replace(".0", ""),
        str(row.batch),
        f"{row.gbytes_per_s:.3f}",
        "" if row.limit_gbytes_per_s is None else f"{row.limit_gbytes_per_s:.3f}",
        (row.limit or "").removesuffix(f" + {row.checksum}"),  # the op says so already
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.p50_us is None else f"{row.p50_us:.0f}",
        "" if row.p99_us is None else f"{row.p99_us:.0f}",
        "right" if row.verified else "WRONG",
    )


def notes(findings: Sequence[Finding]) -> list[str]:
    """Return what the rows do not say: paths in use, what is missing, what was wrong."""
    lines: dict[str, None] = {}  # in order, each once
    for finding in findings:
        if isinstance(finding, Unavailable):
            state = "failed" if finding.failed else "not available"
            lines[f"{finding.transport}: {state}: {finding.reason}"] = None
            lines[f"{finding.transport}: to do: {finding.remedy}"] = None
            continue
        if finding.via:
            lines[f"{finding.transport}: {finding.via}"] = None
        if finding.note and not finding.verified:
            lines[f"{finding.name}: WRONG BYTES: {finding.note}"] = None
        elif finding.note:
            lines[f"{finding.transport}: no limit: {finding.note}"] = None
    return list(lines)


def _rows_of(findings: Sequence[Finding]) -> list[Row]:
    """The rows, every one: whatever a verdict names can be found."""
    return [finding for finding in findings if isinstance(finding, Row)]


def plain(findings: Sequence[Finding]) -> str:
    """Return aligned columns of whatever width they need, and the notes below them."""
    rows = [cells(row) for row in _rows_of(findings)]
    lines = notes(findings)
    if rows:
        lines = [*_aligned([HEADINGS, *rows]), *lines]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if heading in RIGHT else cell.ljust(width)
            for heading, cell, width in zip(HEADINGS, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def table(findings: Sequence[Finding], width: int) -> Table | None:
    """Return the rows for a terminal of ``width`` columns: all figures, or those that fit.

    None when there is no room for figures and bars.
    """
    from rich.console import Console

    rows = _rows_of(findings)
    for headings in (HEADINGS, NARROW):
        needed = Console(width=WIDTH_MAX).measure(_table(rows, headings, BAR_WIDTH_MIN)).maximum
        if needed <= width:
            return _table(rows, headings, min(BAR_WIDTH_MAX, BAR_WIDTH_MIN + width - needed))
    return None


def _table(rows: Sequence[Row], headings: Sequence[str], bar_width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    gap = 0 if headings is NARROW else 1  # besides the one column of the box
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False)
    for heading in headings:
        justify = "right" if heading in RIGHT else "left"
        shown.add_column(heading, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    shown.add_column("", width=bar_width)
    for index, row in enumerate(rows):
        if index and rows[index - 1].transport != row.transport:
            shown.add_section()
        style = "" if row.verified else "bold red"
        texts = dict(zip(HEADINGS, cells(row), strict=True))
        shown.add_row(*(Text(texts[name], style=style) for name in headings), _bar(row, bar_width))
    return shown


def _bar(row: Row, width: int) -> ProgressBar | str:
    """The share of the limit that was reached; full at the limit and beyond."""
    from rich.progress_bar import ProgressBar

    if row.ratio is None:
        return ""
    done = min(1.0, row.ratio)
    style = "green"  # also of a full bar, which rich would draw in a style of its own
    return ProgressBar(
        total=1.0, completed=done, width=width, complete_style=style, finished_style=style
    )


def show(findings: Sequence[Finding]) -> None:
    """Print all findings for people: a table where it fits the terminal, else plain text."""
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        shown = table(findings, console.width)
        if shown is not None:
            console.print(shown)
            for line in notes(findings):
                console.print(line, highlight=False, markup=False)
            return
    write_line(plain(findings), sys.stdout)


def lines_of_progress(total: int, clock: Callable[[], float]) -> Report:
    """Return what is told each step's name, and says one in ``LINE_INTERVAL_S`` at most."""
    done, said_s = 0, clock()

    def report(step: str) -> None:
        nonlocal done, said_s
        done, now_s = done + 1, clock()
        if now_s - said_s >= LINE_INTERVAL_S:
            said_s = now_s
            say(f"measured {done} of {total}: {step}")

    return report


@contextmanager
def progress(total: int, *, rows_follow: bool) -> Iterator[Report]:
    """Yield what is told each step's name; on stderr a bar, or a line now and then.

    ``rows_follow``: rows are printed meanwhile, which a bar on the same terminal would garble, and
    which say more than lines would.
    """
    is_terminal = sys.stderr.isatty()
    if rows_follow and (not is_terminal or sys.stdout.isatty()):
        yield lambda step: None
        return
    if not is_terminal:
        yield lines_of_progress(total, time.monotonic)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    # No thread that redraws: it would take the interpreter from what is being timed.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting the other side", total=total)
        bar.refresh()

        def report(step: str) -> None:
            bar.update(task, advance=1, description=step, refresh=True)

        yield report
