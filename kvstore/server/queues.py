"""All candidates for eviction: by tenant, then by priority, then in the policy's order.

Owns one ``Candidates`` per tenant and priority, and when raised priorities lapse. Knows no slots.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable

from kvstore.server.candidates import Candidates
from kvstore.server.page_table import PageTable
from kvstore.server.policies import EvictionPolicy
from kvstore.server.tenants import Tenants
from kvstore.store import PRIORITY_DEFAULT

_LAPSES_SLACK = 1024  # stale lapses kept before the heap is cleaned


class Queues:
    """See the module's docstring."""

    def __init__(self, table: PageTable, policy: EvictionPolicy, tenants: Tenants) -> None:
        self._table = table
        self._policy = policy
        self._tenants = tenants
        self._queues: dict[int, dict[int, Candidates]] = {}
        self._priorities: dict[int, list[int]] = {}  # by tenant: sorted, those with a queue
        self._lapses: dict[int, float] = {}  # row -> when its priority falls back
        self._lapse_heap: list[tuple[float, int]] = []

    def tenant_of(self, row: int) -> int:
        return self._tenants.tenant_of(self._table.namespace[row])

    def offer(self, row: int) -> None:
        """Make ``row`` a candidate of its class; does nothing when it is one already."""
        if self._table.queued[row]:
            return
        tenant, priority = self.tenant_of(row), self._table.priority[row]
        queue = self._queues.get(tenant, {}).get(priority)
        if queue is None:
            queue = self._make(tenant, priority)
        queue.offer(row)

    def _make(self, tenant: int, priority: int) -> Candidates:
        table = self._table

        def belongs(row: int) -> bool:
            return table.priority[row] == priority and self.tenant_of(row) == tenant

        queue = Candidates(table, self._policy, belongs)
        self._queues.setdefault(tenant, {})[priority] = queue
        insort(self._priorities.setdefault(tenant, []), priority)
        return queue

    def pop(
        self, tenant: int, may_go: Callable[[int], bool], now: int, below: int | None = None
    ) -> int | None:
        """Take out the first candidate of ``tenant``; None when it has none.

        ``below``: only of a priority below this one.
        """
        priorities = self._priorities.get(tenant)
        while priorities and (below is None or priorities[0] < below):
            queue = self._queues[tenant][priorities[0]]
            row = queue.pop(may_go, now)
            if row is not None:
                return row
            del self._queues[tenant][priorities.pop(0)]
        if not priorities:
            self._priorities.pop(tenant, None)
            self._queues.pop(tenant, None)
        return None

    # ---- priorities

    def set_priority(self, row: int, priority: int, until_s: float | None) -> None:
        """Give a page its priority; one that is raised ``until_s`` falls back then."""
        self._table.priority[row] = priority
        if until_s is not None and priority > PRIORITY_DEFAULT:
            self._lapses[row] = until_s
            heapq.heappush(self._lapse_heap, (until_s, row))
            if len(self._lapse_heap) > 2 * len(self._lapses) + _LAPSES_SLACK:
                self._lapse_heap = [(end_s, row) for row, end_s in self._lapses.items()]
                heapq.heapify(self._lapse_heap)

    def lapses_s(self, row: int) -> float | None:
        """When the priority of ``row`` falls back; None: it does not."""
        return self._lapses.get(row)

    def forget(self, row: int) -> None:
        """The page is gone."""
        self._lapses.pop(row, None)

    def lapse(self, now_s: float) -> list[int]:
        """Lower the priorities whose time is over; returns the rows, to be queued anew."""
        lapsed = []
        while self._lapse_heap and self._lapse_heap[0][0] <= now_s:
            end_s, row = heapq.heappop(self._lapse_heap)
            if self._lapses.get(row) == end_s:
                del self._lapses[row]
                self._table.priority[row] = PRIORITY_DEFAULT
                lapsed.append(row)
        return lapsed
