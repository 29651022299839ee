"""Which operation is hit by which fault: the sans-I/O core of fault injection.

Owns the state of the rules: how many operations each has seen, its chances, what it has done. The
time is passed in; chance comes from the seed. Invariants:

* The same rules, seed and sequence of operations (and times, for rules with a window) give the
  same faults.
* What one rule would do depends on no other rule: each has a random stream of its own and counts
  every operation that it is about. Of several that hit one operation, the one written first wins,
  and only the winner's ``count`` is used up.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

from transfer.fault_rules import IN_THE_MIDDLE, FaultKind, FaultRule, FaultRules, Operation, Span


class Flip(NamedTuple):
    """One byte to corrupt: where in the operation's bytes, and the bits to turn over (not 0)."""

    position: int
    mask: int


class Fault(NamedTuple):
    """What to do to one operation.

    Attributes:
        rule: the rule it comes from.
        after_nbytes: bytes that move before it, fewer than the operation has.
        pause_s: how long a delay or stall takes.
        flips: bytes to corrupt, by ascending position; not empty for ``CORRUPT``.
    """

    rule: FaultRule
    after_nbytes: int = 0
    pause_s: float = 0.0
    flips: tuple[Flip, ...] = ()

    @property
    def kind(self) -> FaultKind:
        return self.rule.kind


class _Track:
    """One rule and its history."""

    def __init__(self, rule: FaultRule, rng: random.Random) -> None:
        self.rule = rule
        self._rng = rng
        self._num_seen = 0
        self._num_done = 0

    def hit(self, operation: Operation, now_s: float) -> Fault | None:
        rule = self.rule
        if not rule.is_about(operation, now_s):
            return None
        self._num_seen += 1
        if self._num_seen % rule.every or self._rng.random() >= rule.probability:
            return None
        fault = self._draw(operation.nbytes)
        return None if self._num_done == rule.limit else fault

    def _draw(self, nbytes: int) -> Fault:
        rule, rng = self.rule, self._rng
        if rule.kind not in IN_THE_MIDDLE:
            return Fault(rule, pause_s=rng.uniform(*rule.pause_s))
        after = self._place(rule.after_nbytes or Span(0, nbytes), nbytes)
        if rule.kind is not FaultKind.CORRUPT:
            return Fault(rule, after, pause_s=rng.uniform(*rule.pause_s))
        spared = after if rule.after_nbytes is not None else 0
        places = rng.sample(range(spared, nbytes), min(rule.num_bytes, nbytes - spared))
        flips = tuple(Flip(place, rng.randrange(1, 256)) for place in sorted(places))
        return Fault(rule, after, flips=flips)

    def _place(self, span: Span, nbytes: int) -> int:
        """Return a place inside of the operation: before its last byte at the latest."""
        return self._rng.randint(int(span.low), min(int(span.high), nbytes - 1))

    def done(self) -> None:
        self._num_done += 1


class FaultSchedule:
    """Decides about each operation, in the order in which they begin. Not thread-safe."""

    def __init__(self, rules: FaultRules) -> None:
        self.injected: Counter[FaultKind] = Counter()
        self._tracks = [
            _Track(rule, random.Random(f"{rules.seed}/{number}"))
            for number, rule in enumerate(rules.rules)
        ]

    def next(self, operation: Operation, now_s: float) -> Fault | None:
        """Return what happens to ``operation``; None leaves it alone.

        Args:
            operation: it moves at least one byte.
            now_s: seconds since the engine started.
        """
        assert operation.nbytes > 0, "an empty operation moves nothing that could be hit"
        hits = [(t, fault) for t in self._tracks if (fault := t.hit(operation, now_s)) is not None]
        if not hits:
            return None
        track, fault = hits[0]
        track.done()
        self.injected[fault.kind] += 1
        return fault
