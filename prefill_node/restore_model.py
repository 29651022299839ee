"""Restore or recompute? The cost model of a prefill node.

Owns what has been measured and the decision. Sans-I/O: elapsed times are passed in. Knows no store.

    restore_s   = slowdown · (latency + nbytes / restore rate)      latency, rate: configured priors
    recompute_s = num_tokens / compute rate                         measured

``slowdown`` is how much longer restores took than the priors say: an average of the ratio, in
logarithms, so that one number serves small restores (latency) and large ones (rate). It rises
faster than it falls: a tier that was slow once is believed. The compute rate is a ratio of decayed
sums, Σ tokens / Σ seconds, so that large steps weigh more than small ones.

A tier that has been measured as too slow would never be asked again, so every ``PROBE_EVERY``-th
refusal becomes a restore of at most ``PROBE_PAGES`` pages: its cost is bounded, and it notices when
the tier is fast again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DECAY = 0.8  # weight of all steps so far, per new one
PRIOR_WEIGHT_S = 0.02  # the prior of the compute rate counts as so many seconds of steps
SLOWER_WEIGHT = 0.7  # of a new measurement that is slower than the average, in logarithms
FASTER_WEIGHT = 0.4
PROBE_EVERY = 64
PROBE_PAGES = 4
DEADLINE_FLOOR_S = 0.05  # of a restore, beyond what recomputing would cost
PROBE_TIMEOUT_S = 0.02


class Rate:
    """Amount per second, as an exponentially decayed ratio of sums."""

    def __init__(self, prior_per_s: float) -> None:
        self._seconds = PRIOR_WEIGHT_S
        self._amount = prior_per_s * PRIOR_WEIGHT_S

    @property
    def per_s(self) -> float:
        return self._amount / self._seconds

    def observe(self, amount: float, elapsed_s: float) -> None:
        """Take in one measurement; instant ones (a simulated clock) say nothing."""
        if elapsed_s > 0:
            self._amount = self._amount * DECAY + amount
            self._seconds = self._seconds * DECAY + elapsed_s


class Decision(NamedTuple):
    """What was decided for one request, and from which numbers.

    Attributes:
        restore: pull ``num_pages`` pages; else recompute all.
        timeout_s: a restore is given up after this; what has arrived by then is kept.
    """

    restore: bool
    num_pages: int
    restore_s: float
    recompute_s: float
    timeout_s: float
    probe: bool = False


class RestoreModel:
    """Decides per request; learns from every restore and every step."""

    def __init__(
        self, *, latency_s: float, restore_bytes_per_s: float, compute_tokens_per_s: float
    ) -> None:
        self._latency_s = latency_s
        self._prior_bytes_per_s = restore_bytes_per_s
        self._log_slowdown = 0.0
        self._num_refused = 0
        self.compute_rate = Rate(compute_tokens_per_s)

    @property
    def slowdown(self) -> float:
        """How many times longer restores took than the priors say."""
        return math.exp(self._log_slowdown)

    @property
    def restore_bytes_per_s(self) -> float:
        """The rate that large restores are expected to have."""
        return self._prior_bytes_per_s / self.slowdown

    def decide(self, *, num_pages: int, page_nbytes: int, num_tokens: int) -> Decision:
        """Decide about ``num_pages`` pages that hold ``num_tokens`` tokens."""
        restore_s = self.slowdown * self._prior_s(num_pages * page_nbytes)
        recompute_s = num_tokens / max(self.compute_rate.per_s, 1e-3)
        if restore_s < recompute_s:
            timeout_s = recompute_s + DEADLINE_FLOOR_S
            return Decision(True, num_pages, restore_s, recompute_s, timeout_s)
        if self._prior_s(num_pages * page_nbytes) < recompute_s:  # only the slowdown is against it
            self._num_refused += 1
            if self._num_refused % PROBE_EVERY == 0:
                num_probed = min(num_pages, PROBE_PAGES)
                return Decision(
                    True, num_probed, restore_s, recompute_s, PROBE_TIMEOUT_S, probe=True
                )
        return Decision(False, 0, restore_s, recompute_s, 0.0)

    def observe_restore(self, nbytes: int, wanted_nbytes: int, elapsed_s: float) -> None:
        """A restore moved ``nbytes`` in ``elapsed_s``.

        One that ran out of time is told with more ``wanted_nbytes``: it counts as if the rest had
        come at the same pace.
        """
        assert wanted_nbytes >= nbytes >= 0
        if elapsed_s <= 0 or wanted_nbytes == 0:
            return
        share = max(nbytes, wanted_nbytes / 100) / wanted_nbytes
        ratio = math.log(elapsed_s / share / self._prior_s(wanted_nbytes))
        weight = SLOWER_WEIGHT if ratio > self._log_slowdown else FASTER_WEIGHT
        self._log_slowdown += weight * (ratio - self._log_slowdown)

    def observe_compute(self, num_tokens: int, elapsed_s: float) -> None:
        self.compute_rate.observe(num_tokens, elapsed_s)

    def _prior_s(self, nbytes: int) -> float:
        return self._latency_s + nbytes / self._prior_bytes_per_s
