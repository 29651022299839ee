"""Whom to evict, and when: watermarks, demand, quotas and slabs.

Owns the decision to evict for one directory. Which page goes is decided in this order:

1. the tenant: who is above its share, the one farthest above first (``tenants.py``);
2. the lowest priority of that tenant;
3. leaves only: a page with children in memory, a lease or a pin is no candidate;
4. the policy's order among those.

Never a page of the request being served. Eviction is spread out: every page that is reserved while
memory is above the watermark evicts up to ``EVICT_PER_PAGE``, every tick a bounded batch; so no
request pays for another's, and the store is never far above the high watermark.

The one exception to 3: when pages of another size need a slab and none can be had, the coldest slab
that nobody holds is emptied whole.
"""

from __future__ import annotations

from collections import deque

from kvstore.server.ledger import Ledger
from kvstore.server.page_table import READY
from kvstore.server.segment import Slab

EVICT_PER_PAGE = 2  # pages evicted per page reserved, above the watermark
EVICT_ON_DEMAND_MAX = 64  # pages evicted to make room for one page of another size
EMPTY_SLABS_MAX = 4  # slabs emptied after that
SLABS_TRIED_MAX = 64  # slabs looked at for that
OWN_PAGES_MAX = 1024  # candidates passed over because they belong to the request

IN_NEXT = 2  # ``PageTable.queued`` of a page that goes next


class Evictor:
    """See the module's docstring.

    Args:
        high, low: used bytes between which eviction goes on by itself.
    """

    def __init__(self, ledger: Ledger, *, high: int, low: int) -> None:
        assert low <= high, (low, high)
        self._ledger = ledger
        self._table = ledger.table
        self._high = high
        self._low = low
        self._evicting = False  # between the watermarks, on the way down
        self._own: list[int] = []  # candidates that the present request uses
        self._next: dict[int, deque[tuple[int, int, int]]] = {}  # see ``put_next``

    @property
    def evicting(self) -> bool:
        """Memory is on its way down to the low watermark."""
        used = self._ledger.segment.used_nbytes
        if used > self._high:
            self._evicting = True
        elif used <= self._low:
            self._evicting = False
        return self._evicting

    @property
    def above_low(self) -> bool:
        return self._ledger.segment.used_nbytes > self._low

    def tick(self, num_max: int) -> int:
        """Evict up to ``num_max`` pages between the watermarks; returns how many."""
        num = 0
        while num < num_max and self.evicting and self._evict_one("watermark", None):
            num += 1
        self.end_request()
        return num

    def end_request(self) -> None:
        """The request is served: its pages are candidates again."""
        if self._own:
            own, self._own = self._own, []
            for row in own:
                self._ledger.offer(row)

    # ---- room

    def make_room(self, page_nbytes: int, namespace: bytes) -> None:
        """Evict until a page of this size fits, within named bounds."""
        segment = self._ledger.segment
        if not self.evicting and segment.can_allocate(page_nbytes):
            return
        asking = self._tenant(namespace)
        for _ in range(EVICT_PER_PAGE):
            if not self.evicting or not self._evict_one("watermark", asking):
                break
        for _ in range(EVICT_ON_DEMAND_MAX):
            if segment.can_allocate(page_nbytes) or not self._evict_one("demand", asking):
                break
        if not segment.can_allocate(page_nbytes):
            self._empty_slabs(page_nbytes)

    def _tenant(self, namespace: bytes) -> int | None:
        number = self._table.namespaces.find(namespace)
        return None if number is None else self._ledger.tenants.tenant_of(number)

    def _evict_one(self, reason: str, asking: int | None) -> bool:
        """Evict the first candidate; False when there is none."""
        tenants = self._ledger.tenants
        for tenant in tenants.givers(asking):
            row = self._first_of(tenant)
            if row is not None:
                quota = tenants.separate and reason == "demand" and tenant != asking
                self.evict(row, "quota" if quota else reason)
                return True
        return False

    def evict(self, row: int, reason: str) -> None:
        """Take a page out of memory; what is on the SSD stays there."""
        ledger, table = self._ledger, self._table
        ledger.counters["evicted"] += 1
        ledger.counters[f"evicted_{reason}"] += 1
        ledger.counters["evicted_tokens"] += table.num_tokens[row]
        if table.on_ssd[row]:
            ledger.vacate(row)
        else:
            ledger.unindex(row)

    # ---- candidates

    def _first_of(self, tenant: int) -> int | None:
        row = self._pop_next(tenant)
        return self.pop_candidate(tenant) if row is None else row

    def pop_candidate(self, tenant: int) -> int | None:
        """Take out the first candidate of ``tenant`` that the request does not use."""
        ledger = self._ledger
        while len(self._own) < OWN_PAGES_MAX:
            row = ledger.queues.pop(tenant, ledger.evictable, ledger.now)
            if row is None or self._table.stamp[row] != ledger.now:
                return row
            self._own.append(row)
        return None

    def put_next(self, row: int) -> None:
        """Evict ``row``, a candidate taken out before, ahead of all others of its tenant.

        Its turn is over when it is used or held before its time comes.
        """
        table = self._table
        table.queued[row] = IN_NEXT
        queue = self._next.setdefault(self._ledger.queues.tenant_of(row), deque())
        queue.append((row, table.generation[row], table.stamp[row]))

    def cool(self, row: int) -> None:
        """Make a page the first to go, until it is used again."""
        self._table.stamp[row] = 0
        self._table.heat[row] = 0.0
        if self._table.state[row] == READY:
            self._ledger.policy.cooled(row)
            self._table.queued[row] = 0
            if self._ledger.evictable(row):
                self.put_next(row)

    def num_next(self) -> int:
        return sum(len(queue) for queue in self._next.values())

    def _pop_next(self, tenant: int) -> int | None:
        queue, table = self._next.get(tenant), self._table
        while queue:
            row, generation, stamp = queue.popleft()
            if table.generation[row] != generation or table.queued[row] != IN_NEXT:
                continue
            table.queued[row] = 0
            if table.stamp[row] == stamp and self._ledger.evictable(row):
                return row
            self._ledger.offer(row)
        self._next.pop(tenant, None)
        return None

    # ---- slabs

    def _empty_slabs(self, page_nbytes: int) -> None:
        """Evict the coldest idle slabs of other sizes whole, until a page of this size fits."""
        ledger = self._ledger
        others = (s for s in ledger.segment.slabs() if s.page_nbytes != page_nbytes)
        cold = sorted(others, key=lambda slab: (ledger.slabs.of(slab.slab_id + 1), slab.offset))
        num_emptied = 0
        for slab in cold[:SLABS_TRIED_MAX]:
            rows = self._idle_rows(slab)
            if rows is None:
                continue
            for row in rows:
                self.evict(row, "slab")
            num_emptied += 1
            if ledger.segment.can_allocate(page_nbytes) or num_emptied == EMPTY_SLABS_MAX:
                return

    def _idle_rows(self, slab: Slab) -> list[int] | None:
        """All rows of a slab, or None when one is held or belongs to this request."""
        table, now = self._table, self._ledger.now
        rows = [row for row in slab.owners if row]
        idle = all(
            table.state[row] == READY
            and not table.num_holds[row]
            and not table.pinned[row]
            and table.stamp[row] != now
            for row in rows
        )
        return rows if idle and len(rows) == slab.num_used else None
