"""What a prefill node counts. Plain numbers; the launcher turns them into metrics.

Owns counters and the last restore decisions. Knows no Prometheus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from engine.request import RequestId
from kvstore.store import GetOutcome
from prefill_node.config import RESTORE_RECORDS_MAX
from prefill_node.restore_model import Decision


class RestoreRecord(NamedTuple):
    """One decision, for people."""

    request_id: RequestId
    decision: Decision


@dataclass
class Counters:
    """Everything that only ever rises. Times are sums of seconds."""

    num_requests: int = 0
    num_refused: int = 0
    num_first_tokens: int = 0
    num_published: int = 0
    num_unpublished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_step_failures: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_local_tokens: int = 0
    cached_store_tokens: int = 0
    num_restore_decisions: int = 0
    num_recompute_decisions: int = 0
    restore_s: float = 0.0
    pages_pulled: int = 0
    bytes_pulled: int = 0
    pages_pulled_unused: int = 0
    pages_pulled_corrupt: int = 0
    pages_pulled_failed: int = 0
    pages_pushed: int = 0
    bytes_pushed: int = 0
    pages_push_refused: int = 0
    pages_push_failed: int = 0
    pages_evicted: int = 0


class PrefillStats:
    """The counters of one node, and its last restore decisions."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.decisions: deque[RestoreRecord] = deque(maxlen=RESTORE_RECORDS_MAX)

    def record(self, request_id: RequestId, decision: Decision) -> None:
        """Remember what was decided for a request."""
        if decision.restore:
            self.counters.num_restore_decisions += 1
        else:
            self.counters.num_recompute_decisions += 1
        self.decisions.append(RestoreRecord(request_id, decision))

    def count_restore(
        self, outcomes: Sequence[GetOutcome], *, num_used: int, elapsed_s: float
    ) -> None:
        """Count what became of a pull, page by page."""
        counters = self.counters
        counters.restore_s += elapsed_s
        num_read = sum(outcome is GetOutcome.READ for outcome in outcomes)
        counters.pages_pulled_unused += num_read - num_used
        counters.pages_pulled_corrupt += sum(o is GetOutcome.CORRUPT for o in outcomes)
        counters.pages_pulled_failed += sum(o is GetOutcome.FAILED for o in outcomes)

    def as_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self.counters).items()}
