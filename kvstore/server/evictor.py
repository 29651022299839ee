"""Whom to evict, and when: watermarks, demand, quotas and slabs.

Owns the decision to evict for one directory. Which page goes is decided in this order:

1. the tenant: who is above its share, the one farthest above first (``tenants.py``);
2. the lowest priority of that tenant;
3. leaves only: a page with children in memory, a lease or a pin is no candidate;
4. who stands in line (``line.py``), then the policy's order among the others.

Never a page of the request being served. Eviction is spread out: every page that is reserved while
memory is above the watermark evicts up to ``EVICT_PER_PAGE``, every tick a bounded batch; so no
request pays for another's, and the store is never far above the high watermark.

While an SSD takes copies (``sparing``), only pages in line go, which it has seen: by the watermarks
always, and to make room for who is ``patient`` (can wait until one more has been copied, see
``room.py``). Who has waited long enough takes anybody's place: a page that goes without a copy on a
node with an SSD is counted as ``unspilled``, whatever it went for.

The one exception to 3: when pages of another size need a slab and none can be had, the coldest slab
that nobody holds is emptied whole.
"""

from __future__ import annotations

from kvstore.server.ledger import Ledger
from kvstore.server.page_table import READY
from kvstore.server.segment import Slab

EVICT_PER_PAGE = 2  # pages evicted per page reserved, above the watermark
EVICT_ON_DEMAND_MAX = 64  # pages evicted to make room for one page of another size
EMPTY_SLABS_MAX = 4  # slabs emptied after that
SLABS_TRIED_MAX = 64  # slabs looked at for that
PASSED_MAX = 1024  # candidates passed over: of the request itself, or with children in line


class Evictor:
    """See the module's docstring.

    Args:
        high, low: used bytes between which eviction goes on by itself.

    Attributes:
        sparing: an SSD takes copies of the pages that go next.
        has_ssd: there is one, whether it works or not.
        wanted: rows of a slab that is wanted for pages of another size: to be copied first.
    """

    def __init__(self, ledger: Ledger, *, high: int, low: int) -> None:
        assert low <= high, (low, high)
        self._ledger = ledger
        self._table = ledger.table
        self._high = high
        self._low = low
        self._evicting = False  # between the watermarks, on the way down
        self._passed: list[int] = []  # candidates that cannot go for this request
        self.sparing = False
        self.has_ssd = False
        self.wanted: list[int] = []

    @property
    def evicting(self) -> bool:
        """Memory is on its way down to the low watermark."""
        used = self._ledger.segment.used_nbytes
        if used > self._high:
            self._evicting = True
        elif used <= self._low:
            self._evicting = False
        return self._evicting

    def tick(self, num_max: int) -> int:
        """Evict up to ``num_max`` pages between the watermarks; returns how many."""
        num = 0
        while num < num_max and self.evicting and self._evict_one("watermark", None):
            num += 1
        self.end_request()
        return num

    def end_request(self) -> None:
        """The request is served: what was passed over for it are candidates again."""
        if self._passed:
            passed, self._passed = self._passed, []
            for row in passed:
                self._ledger.offer(row)

    # ---- room

    def make_room(self, page_nbytes: int, namespace: bytes, *, patient: bool = False) -> None:
        """Evict until a page of this size fits, within named bounds.

        ``patient``: while an SSD takes copies, nobody goes without one.
        """
        segment = self._ledger.segment
        if not self.evicting and segment.can_allocate(page_nbytes):
            return
        asking, spare = self._tenant(namespace), patient and self.sparing
        for _ in range(EVICT_PER_PAGE):
            if not self.evicting or not self._evict_one("watermark", asking):
                break
        for _ in range(EVICT_ON_DEMAND_MAX):
            fits = segment.can_allocate(page_nbytes)
            if fits or not self._evict_one("demand", asking, spare=spare):
                break
        if not segment.can_allocate(page_nbytes):
            self._empty_slabs(page_nbytes, spare=spare)

    def _tenant(self, namespace: bytes) -> int | None:
        number = self._table.namespaces.find(namespace)
        return None if number is None else self._ledger.tenants.tenant_of(number)

    def _evict_one(self, reason: str, asking: int | None, *, spare: bool = False) -> bool:
        """Evict the first candidate, ``spare`` one in line; False when there is none."""
        tenants = self._ledger.tenants
        spare = spare or (self.sparing and reason == "watermark")
        for tenant in tenants.givers(asking):
            row = self._from_line(tenant) if spare else self._first_of(tenant)
            if row is not None:
                quota = tenants.separate and reason == "demand" and tenant != asking
                self.evict(row, "quota" if quota else reason)
                return True
        return False

    def evict(self, row: int, reason: str) -> None:
        """Take a page out of memory; what is on the SSD stays there."""
        ledger, table = self._ledger, self._table
        if self.has_ssd and not table.on_ssd[row]:
            reason = "unspilled"
        ledger.counters["evicted"] += 1
        ledger.counters[f"evicted_{reason}"] += 1
        ledger.counters["evicted_tokens"] += table.num_tokens[row]
        if table.on_ssd[row]:
            ledger.counters["evicted_to_ssd"] += 1
            ledger.vacate(row)
        else:
            ledger.unindex(row)

    # ---- candidates

    def _first_of(self, tenant: int) -> int | None:
        """Who goes first: of the lowest priority, those in line before others."""
        first = self._ledger.line.first(tenant)
        if first is None:
            return self._from_queue(tenant, None)
        row = self._from_queue(tenant, self._table.priority[first.row])
        if row is None:
            row = self._from_line(tenant)
        return self._from_queue(tenant, None) if row is None else row

    def _from_queue(self, tenant: int, below: int | None) -> int | None:
        """Take out the first candidate that may go now and is not of this request."""
        ledger = self._ledger
        while len(self._passed) < PASSED_MAX:
            row = ledger.queues.pop(tenant, ledger.eligible, ledger.now, below)
            if row is None:
                return None
            if self._table.stamp[row] != ledger.now and ledger.evictable(row):
                return row
            self._passed.append(row)
        return None

    def _from_line(self, tenant: int) -> int | None:
        """Take out the first in line; who was used or held since it was chosen leaves the line."""
        ledger = self._ledger
        while (place := ledger.line.first(tenant)) is not None:
            row = place.row
            ledger.dequeue(row)
            if self._table.stamp[row] == place.stamp and ledger.evictable(row):
                return row
            ledger.offer(row)
        return None

    def cool(self, row: int) -> None:
        """Make a page the first to go, until it is used again."""
        ledger = self._ledger
        self._table.stamp[row] = 0
        self._table.heat[row] = 0.0
        if self._table.state[row] != READY:
            return
        ledger.policy.cooled(row)
        ledger.dequeue(row)
        if ledger.evictable(row):
            ledger.line_up_first(row)
        else:
            ledger.offer(row)

    # ---- slabs

    def _empty_slabs(self, page_nbytes: int, *, spare: bool) -> None:
        """Evict the coldest idle slabs of other sizes whole, until a page of this size fits.

        ``spare``: only such as are on the SSD; of the first that is not, ``wanted`` are the pages
        to be copied.
        """
        ledger = self._ledger
        others = (s for s in ledger.segment.slabs() if s.page_nbytes != page_nbytes)
        cold = sorted(others, key=lambda slab: (ledger.slabs.of(slab.slab_id + 1), slab.offset))
        num_emptied = 0
        for slab in cold[:SLABS_TRIED_MAX]:
            rows = self._idle_rows(slab)
            if rows is None:
                continue
            if spare and (unseen := [row for row in rows if not self._seen(row)]):
                self.wanted = self.wanted or unseen
                continue
            for row in rows:
                self.evict(row, "slab")
            num_emptied += 1
            if ledger.segment.can_allocate(page_nbytes) or num_emptied == EMPTY_SLABS_MAX:
                return

    def _seen(self, row: int) -> bool:
        """The SSD has a copy, or did not want one."""
        return bool(self._table.on_ssd[row]) or row in self._ledger.line

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
