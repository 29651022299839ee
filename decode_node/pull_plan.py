"""Which pages of one sequence are still to come, and how far the contiguous prefix reaches.

Owns the outcomes of one sequence's pull. Sans-I/O. A page counts only when everything before it
is there: ``frontier`` is what the sequence may rely on. A page at the frontier whose outcome is
final and bad ends the pull: what lies behind it is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.store import GetOutcome, PageIdentity


class PullPlan:
    """Pages ``first .. first + len(wanted) - 1`` of a sequence.

    Args:
        first: index of the first page that is not there yet.
        wanted: what the pages must be; the last one may be a tail page.
    """

    def __init__(self, first: int, wanted: Sequence[PageIdentity]) -> None:
        self.first = first
        self._wanted = list(wanted)
        self._outcomes: list[GetOutcome | None] = [None] * len(wanted)
        self._frontier = first

    @property
    def frontier(self) -> int:
        """Pages ``0 .. frontier - 1`` of the sequence are there."""
        return self._frontier

    @property
    def complete(self) -> bool:
        return self._frontier == self.first + len(self._wanted)

    @property
    def blocked(self) -> bool:
        """True when the page at the frontier was tried and did not come."""
        outcome = None if self.complete else self._outcomes[self._frontier - self.first]
        return outcome is not None

    def identity(self, index: int) -> PageIdentity:
        return self._wanted[index - self.first]

    def missing(self) -> list[int]:
        """Indices of the pages without any outcome yet."""
        return [self.first + i for i, outcome in enumerate(self._outcomes) if outcome is None]

    def record(self, index: int, outcome: GetOutcome) -> int:
        """Note the outcome of page ``index``; return how many pages the frontier gained."""
        assert self._outcomes[index - self.first] is not GetOutcome.READ, index
        self._outcomes[index - self.first] = outcome
        before = self._frontier
        while not self.complete and self._outcomes[self._frontier - self.first] is GetOutcome.READ:
            self._frontier += 1
        return self._frontier - before

    def try_again(self) -> None:
        """Forget every outcome that was not READ: those pages are missing again."""
        self._outcomes = [o if o is GetOutcome.READ else None for o in self._outcomes]
