"""What goes to the SSD and comes back: decisions only.

Owns which pages are copied to the tier below, which of them leave it, and promotions under way.
Moves no bytes: ``tiering.py`` does, between ``begin_*`` and ``end_*``.

::

    READY ──begin_spill──▶ READY, held ──end_spill──▶ READY, on SSD ──evicted──▶ SPILLED
      ▲                                                                            │
      └────────────── end_promote ◀── SPILLED, slot granted ◀── begin_promote ─────┘

Pages are copied ahead of eviction, in the order of eviction, so that evicting never waits for the
disk: a page with a copy just gives up its slot. When the SSD is full, a page is copied only if it
is hotter than the coldest page there, which then leaves.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from kvstore.page import PageKey
from kvstore.server.evictor import Evictor
from kvstore.server.ledger import Ledger
from kvstore.server.page_table import READY, SPILLED
from kvstore.server.segment import Slot
from kvstore.server.tenants import COMMON
from kvstore.server.tier import TierPage
from kvstore.store import PageIdentity, PutPolicy
from kvstore.verify import well_formed

SPILL_AHEAD_MAX = 256  # pages copied, or being copied, before it is their turn to go
EARLIER_LIFE = 1e9  # half-lives: heats of an earlier life are an order below all of this one
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_STEPS = 1 << 16  # heats closer than this part of a half-life count as equal


class Spill(NamedTuple):
    """A page to copy to the SSD; it keeps its slot until ``end_spill``."""

    row: int
    slot: Slot
    page: TierPage


class Promotion(NamedTuple):
    """A page to read back into ``slot``, which is its own until ``end_promote``."""

    row: int
    key: PageKey
    slot: Slot
    checksum: bytes


class Spilling:
    """See the module's docstring."""

    def __init__(self, ledger: Ledger, evictor: Evictor) -> None:
        self._ledger = ledger
        self._table = ledger.table
        self._evictor = evictor
        self._coldest: list[int] = []  # heap of (heat, row) of pages on the SSD, lazily ordered
        self._num_spilling = 0
        self._promoting: dict[int, Promotion] = {}
        self.num_on_ssd = 0

    # ---- the SSD's pages

    def adopt(self, page: TierPage) -> bool:
        """Index a page found on the SSD at start; False: it is no page, or known already."""
        record, spec = page.record, page.spec
        identity = PageIdentity(
            key=record.key, parent=record.parent, depth=record.depth, tokens=record.tokens
        )
        spec_id = self._table.spec_id(spec)
        fits = well_formed(identity, spec) and record.page_nbytes == spec.page_nbytes
        if spec_id is None or not fits or self._table.find(record.key):
            return False
        policy = PutPolicy(namespace=page.namespace, priority=page.priority)
        row = self._ledger.adopt(identity, spec_id, policy, record.checksum)
        self._table.heat[row] = page.heat - EARLIER_LIFE
        self._push(row)
        self.num_on_ssd += 1
        return True

    def _push(self, row: int) -> None:
        order = int(self._table.heat[row] * _STEPS)
        heapq.heappush(self._coldest, order << _ROW_BITS | row)

    def _coldest_row(self) -> int | None:
        """The coldest page on the SSD; it stays in the order."""
        heap, table = self._coldest, self._table
        while heap:
            row = heap[0] & _ROW_MASK
            if not table.on_ssd[row]:
                heapq.heappop(heap)
            elif int(table.heat[row] * _STEPS) != heap[0] >> _ROW_BITS:
                heapq.heappop(heap)
                self._push(row)
            else:
                return row
        return None

    def make_room(self, spill: Spill) -> PageKey | None:
        """Give up the coldest page on the SSD for a hotter one; None: it is not hotter.

        The caller removes the key from the tier.
        """
        row = self._coldest_row()
        if row is None or self._table.heat[row] >= spill.page.heat or row in self._promoting:
            return None
        heapq.heappop(self._coldest)
        self._ledger.counters["ssd_displaced"] += 1
        return self._leave_ssd(row)

    def lost(self, key: PageKey) -> None:
        """The tier has no good copy of ``key`` any more."""
        row = self._table.find(key)
        if row and self._table.on_ssd[row]:
            self._ledger.counters["ssd_lost"] += 1
            self._leave_ssd(row)

    def _leave_ssd(self, row: int) -> PageKey:
        table, key = self._table, self._table.key(row)
        table.on_ssd[row] = 0
        self.num_on_ssd -= 1
        if table.state[row] == SPILLED:
            self._ledger.unindex(row)
        return key

    def take_removals(self) -> list[PageKey]:
        """Keys that were forgotten here and must leave the tier; each is told once."""
        removals, self._ledger.removals = self._ledger.removals, []
        self.num_on_ssd -= len(removals)
        return removals

    # ---- down

    def begin_spill(self, now_s: float) -> Spill | None:
        """The next page to copy; None while there is nothing to do.

        Pages that have a copy already go next without another.
        """
        ledger, table = self._ledger, self._table
        ledger.begin(now_s)
        while self._evictor.above_low and (
            self._num_spilling + self._evictor.num_next() < SPILL_AHEAD_MAX
        ):
            row = self._next_candidate()
            if row is None:
                return None
            if table.on_ssd[row]:
                self._evictor.put_next(row)
                continue
            ledger.hold(row)
            self._num_spilling += 1
            return Spill(row, ledger.slot(row), self._describe(row))
        return None

    def _next_candidate(self) -> int | None:
        tenants = self._ledger.tenants
        for tenant in tenants.givers(None) if tenants.separate else (COMMON,):
            row = self._evictor.pop_candidate(tenant)
            if row is not None:
                return row
        return None

    def _describe(self, row: int) -> TierPage:
        table = self._table
        return TierPage(
            record=table.record(row),
            spec=table.spec_of(row),
            namespace=table.namespaces.name(table.namespace[row]),
            priority=table.priority[row],
            heat=table.heat[row],
        )

    def end_spill(self, spill: Spill, *, stored: bool) -> bool:
        """The copy is made, or was not worth it; False: the page is gone, so must the copy be."""
        row, ledger, table = spill.row, self._ledger, self._table
        self._num_spilling -= 1
        alive = table.state[row] == READY
        if alive and stored:
            table.on_ssd[row] = 1
            self.num_on_ssd += 1
            self._push(row)
            ledger.counters["spilled"] += 1
        table.num_holds[row] -= 1
        if alive and ledger.evictable(row):
            self._evictor.put_next(row)
        elif not table.num_holds[row]:
            ledger.settle(row)
        return alive or not stored

    # ---- up

    def begin_promote(self, key: PageKey, now_s: float) -> Promotion | None:
        """Grant a slot for a spilled page; None: not spilled, under way already, or no room."""
        ledger, table = self._ledger, self._table
        ledger.begin(now_s)
        row = table.find(key)
        if not row or table.state[row] != SPILLED or row in self._promoting:
            return None
        nbytes = table.page_nbytes(row)
        self._evictor.make_room(nbytes, table.namespaces.name(table.namespace[row]))
        self._evictor.end_request()
        slot = ledger.segment.allocate(nbytes)
        if slot is None:
            ledger.counters["promotions_refused"] += 1
            return None
        ledger.give_slot(row, slot)
        ledger.protect(row)
        ledger.hold(row)
        self._promoting[row] = Promotion(row, key, slot, table.checksum(row))
        return self._promoting[row]

    def promoting(self, key: PageKey) -> bool:
        return self._table.find(key) in self._promoting

    def end_promote(self, promotion: Promotion, *, loaded: bool) -> bool:
        """The bytes are in the slot and verified, or not; True when the page is ready now."""
        row, ledger, table = promotion.row, self._ledger, self._table
        del self._promoting[row]
        spilled = table.state[row] == SPILLED  # else it was forgotten meanwhile
        if spilled and loaded:
            ledger.counters["promoted"] += 1
            ledger.restore(row)
        elif spilled:
            ledger.take_slot(row)
        ledger.unhold(row)
        return spilled and loaded

    def check(self) -> None:
        table = self._table
        rows = [row for row in table.used_rows() if table.on_ssd[row]]
        assert self.num_on_ssd == len(rows) + len(self._ledger.removals)
        heaped = {item & _ROW_MASK for item in self._coldest}
        assert heaped >= set(rows)
        for row in table.used_rows():
            if table.state[row] == SPILLED:
                assert bool(table.generation[row]) == (row in self._promoting), row
