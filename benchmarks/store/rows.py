"""One figure of a benchmark of the store, as a row for machines and for people."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the result.

    Attributes:
        name: what was measured.
        subject: of which store.
        value: the median over the rounds, in ``unit``; None where it could not be measured.
        samples: one value a round.
        target: what it is held against, if anything; ``at_least`` says on which side.
        detail: what else there is to say.
    """

    name: str
    subject: str
    unit: str
    value: float | None
    samples: tuple[float, ...] = ()
    target: float | None = None
    at_least: bool = True
    detail: str = ""

    @property
    def passed(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.target if self.at_least else self.value <= self.target


def of_samples(name: str, subject: str, unit: str, samples: Iterable[float]) -> Figure:
    """The median of ``samples`` as a figure without a target."""
    values = tuple(samples)
    return Figure(name=name, subject=subject, unit=unit, value=median(values), samples=values)


def show(figures: Iterable[Figure]) -> str:
    """Return the figures as a table of Markdown."""
    lines = ["| figure | store | measured | target | | |", "|---|---|---|---|---|---|"]
    verdicts = {None: "", True: "pass", False: "short"}
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
        sign = "≥" if figure.at_least else "≤"
        target = "" if figure.target is None else f"{sign} {figure.target:g}"
        cells = (figure.name, figure.subject, value, target, verdicts[figure.passed], figure.detail)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
