"""What goes to the SSD and comes back: decisions only.

Owns which pages are copied to the tier below and promotions under way. Which pages leave the tier
for warmer ones is the tier's to decide. Moves no bytes: ``tiering.py`` does, between ``begin_*``
and ``end_*``.

::

    READY ──begin_spill──▶ READY, held ──end_spill──▶ READY, in line ──evicted──▶ SPILLED
      ▲                                                                             │
      └────────────── end_promote ◀── SPILLED, slot granted ◀── begin_promote ──────┘

Pages are copied ahead of eviction and in its order, as many as lie above the spill watermark: a
page with a copy just gives up its slot. A page that the tier did not want stands in line all the
same, and goes for good. Before the node closes, all others are copied too, the hottest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.page import PageKey
from kvstore.server.evictor import Evictor
from kvstore.server.ledger import Ledger
from kvstore.server.page_table import READY, SPILLED
from kvstore.server.segment import Slot
from kvstore.server.tenants import COMMON, STICKY_EVICTIONS
from kvstore.server.tier import TierPage
from kvstore.server.unwritten import Unwritten
from kvstore.store import PutPolicy
from kvstore.verify import well_formed

CHOSEN_MAX = 256  # pages with a copy that are lined up at once
EARLIER_LIFE = 1e9  # half-lives: heats of an earlier life are an order below all of this one


class Spill(NamedTuple):
    """A page to copy to the SSD; it keeps its slot until ``end_spill``.

    Attributes:
        early: it is not its turn to go, and comes to be only by the copy.
    """

    row: int
    slot: Slot
    stamp: int
    page: TierPage
    early: bool = False


class Adopted(NamedTuple):
    """What became of pages found on the SSD. ``strange``: they must go, being no pages, or older
    than those of this life."""

    num_adopted: int
    strange: list[PageKey]


class Promotion(NamedTuple):
    """A page to read back into ``slot``, which is its own until ``end_promote``."""

    row: int
    key: PageKey
    slot: Slot
    checksum: bytes


class Spilling:
    """See the module's docstring.

    Args:
        watermark: used bytes above which pages are copied.
    """

    def __init__(self, ledger: Ledger, evictor: Evictor, *, watermark: int) -> None:
        self._ledger = ledger
        self._table = ledger.table
        self._evictor = evictor
        self._watermark = watermark
        self._spilling_nbytes = 0
        self._promoting: dict[int, Promotion] = {}
        self._turn: int | None = None  # tenant whose pages are chosen
        self._turn_left = 0

    @property
    def num_on_ssd(self) -> int:
        """Pages with a copy on the SSD."""
        return self._ledger.num_on_ssd

    @property
    def sparing(self) -> bool:
        """Who can wait is given no room of pages without a copy."""
        return self._evictor.sparing

    def set_working(self, *, working: bool) -> None:
        """The tier takes pages (again), or does not: then nobody waits to be copied."""
        self._evictor.sparing, self._evictor.has_ssd = working, True

    # ---- the SSD's pages

    def adopt(self, page: TierPage) -> bool:
        """Index a page found on the SSD at start; False: it is no page, or known already."""
        return self.adopt_many([page]).num_adopted == 1

    def adopt_many(self, pages: Sequence[TierPage]) -> Adopted:
        """Index pages found on the SSD at start, but for those that are known already."""
        keys = [key for page in pages for key in (page.record.key, page.record.parent)]
        policies: dict[tuple[bytes, int], PutPolicy] = {}
        num_adopted, strange = 0, []
        with self._table.adding(keys):
            for page in pages:
                key = page.record.key
                row = self._table.find(key)
                if (row and self._table.on_ssd[row]) or key in self._ledger.removals:
                    continue  # what the tier has is of this life, or is about to leave it
                if row or not self._adopt(page, policies):
                    strange.append(key)
                else:
                    num_adopted += 1
        return Adopted(num_adopted, strange)

    def _adopt(self, page: TierPage, policies: dict[tuple[bytes, int], PutPolicy]) -> bool:
        record, spec = page.record, page.spec
        fits = spec.page_nbytes == record.page_nbytes <= self._ledger.segment.nbytes
        if not fits or not well_formed(record, spec):
            return False
        spec_id = self._table.spec_id(spec)
        if spec_id is None:
            return False
        policy = policies.get((page.namespace, page.priority))
        if policy is None:
            policy = PutPolicy(namespace=page.namespace, priority=page.priority)
            policies[page.namespace, page.priority] = policy
        row = self._ledger.adopt(record, spec_id, policy)
        self._table.heat[row] = page.heat - EARLIER_LIFE
        return True

    def displaced(self, key: PageKey) -> None:
        """The tier gave ``key`` up for a warmer page."""
        self._ledger.counters["ssd_displaced"] += self._leave_ssd(key)

    def lost(self, key: PageKey) -> None:
        """The tier has no good copy of ``key`` any more."""
        self._ledger.counters["ssd_lost"] += self._leave_ssd(key)

    def _leave_ssd(self, key: PageKey) -> bool:
        row = self._table.find(key)
        if not row or not self._table.on_ssd[row]:
            return False
        self._ledger.note_copy(row, on_ssd=False)
        if self._table.state[row] == SPILLED:
            self._ledger.unindex(row)
        return True

    def take_removals(self, num_max: int) -> list[PageKey]:
        """Keys that were forgotten here and must leave the tier; each is told once."""
        removals = self._ledger.removals
        taken = [key for key, _ in zip(removals, range(num_max), strict=False)]
        for key in taken:
            del removals[key]
        return taken

    def take_removal(self, key: PageKey) -> bool:
        """Likewise for one key: True when the tier may still hold an older page of it."""
        return self._ledger.removals.pop(key, key) is None

    def take_vacated(self) -> list[tuple[PageKey, float]]:
        """Keys and heats of pages that are only on the SSD since the last call."""
        table = self._table
        vacated, self._ledger.vacated = self._ledger.vacated, []
        rows = (row for row in vacated if table.state[row] == SPILLED)
        return [(table.key(row), table.heat[row]) for row in rows]

    # ---- down

    def begin_spill(self, now_s: float) -> Spill | None:
        """The next page to copy; None while there is nothing to do.

        Pages that have a copy already are lined up without another.
        """
        ledger, table = self._ledger, self._table
        ledger.begin(now_s)
        if (spill := self._begin_wanted()) is not None:
            return spill
        for _ in range(CHOSEN_MAX):
            ahead_nbytes = ledger.line.nbytes + self._spilling_nbytes
            if ledger.segment.used_nbytes - ahead_nbytes <= self._watermark:
                return None
            row = self._choose()
            if row is None:
                return None
            if table.on_ssd[row]:
                ledger.line_up(row)
                continue
            return self._begin(row)
        return None

    def _begin(self, row: int) -> Spill:
        ledger = self._ledger
        ledger.hold(row)
        slot = ledger.slot(row)
        self._spilling_nbytes += slot.nbytes
        return Spill(row, slot, self._table.stamp[row], self._describe(row))

    def _begin_wanted(self) -> Spill | None:
        """A page of the slab that is to be emptied."""
        table, wanted = self._table, self._evictor.wanted
        while wanted:
            row = wanted.pop()
            if table.state[row] == READY and not table.num_holds[row] and not table.on_ssd[row]:
                return self._begin(row)
        return None

    @property
    def num_unwritten(self) -> int:
        """Ready pages without a copy."""
        num_ready, num_spilled = self._ledger.num_in(READY), self._ledger.num_in(SPILLED)
        return num_ready - (self.num_on_ssd - num_spilled)

    def unwritten(self) -> Unwritten:
        """These pages, to be found."""
        return Unwritten(self._table)

    def begin_copy(self, key: PageKey, now_s: float) -> Spill | None:
        """Copy this page, whether it would be evicted or not; None: it is not there to be copied,
        or has been."""
        self._ledger.begin(now_s)
        row = self._table.find(key)
        if not row or self._table.state[row] != READY or self._table.on_ssd[row]:
            return None
        return self._begin(row)._replace(early=True)

    def _choose(self) -> int | None:
        """Take out the next candidate of the tenant that will have to give."""
        ledger = self._ledger
        if not ledger.tenants.separate:
            return ledger.queues.pop(COMMON, ledger.eligible, ledger.now)
        if self._turn is None or not self._turn_left:
            self._turn = ledger.tenants.next_giver()
            self._turn_left = STICKY_EVICTIONS
        self._turn_left -= 1
        if self._turn is None:
            return None
        row = ledger.queues.pop(self._turn, ledger.eligible, ledger.now)
        if row is None:
            self._turn_left = 0
        return row

    def _describe(self, row: int) -> TierPage:
        table = self._table
        return TierPage(
            record=table.record(row),
            spec=table.spec_of(row),
            namespace=table.namespaces.name(table.namespace[row]),
            priority=table.priority[row],
            heat=table.heat[row],
        )

    def end_spill(self, spill: Spill, *, stored: bool, failed: bool = False) -> bool:
        """The copy is made, or was not worth it, or the disk ``failed``: then the page waits for
        its turn again. False: the page is gone, so must the copy be."""
        row, ledger, table = spill.row, self._ledger, self._table
        self._spilling_nbytes -= spill.slot.nbytes
        alive = table.state[row] == READY
        if alive and stored:
            ledger.note_copy(row, on_ssd=True)
            ledger.counters["spilled"] += 1
        table.num_holds[row] -= 1
        unused = table.stamp[row] == spill.stamp
        unused = unused and (stored or not failed)
        if spill.early and stored and row not in ledger.line:
            ledger.dequeue(row)  # who needs room during a drain is given that of copied pages
        if alive and unused and not table.queued[row] and ledger.eligible(row):
            ledger.line_up(row)
        elif not table.num_holds[row]:
            ledger.settle(row)
        return alive or not stored

    # ---- up

    def may_promote(self, key: PageKey) -> bool:
        """The page is only on the SSD, and not on its way up."""
        row = self._table.find(key)
        return self._table.state[row] == SPILLED and row not in self._promoting

    def begin_promote(
        self, key: PageKey, now_s: float, *, patient: bool = False
    ) -> Promotion | None:
        """Grant a slot for a spilled page; None: not spilled, under way already, or no room.

        ``patient``: no room is made of pages that the SSD has yet to be given.
        """
        ledger, table = self._ledger, self._table
        ledger.begin(now_s)
        row = table.find(key)
        if not row or table.state[row] != SPILLED or row in self._promoting:
            return None
        nbytes = table.page_nbytes(row)
        namespace = table.namespaces.name(table.namespace[row])
        self._evictor.make_room(nbytes, namespace, patient=patient)
        self._evictor.end_request()
        slot = ledger.segment.allocate(nbytes)
        if slot is None:
            ledger.counters["promotions_refused"] += not (patient and self._evictor.sparing)
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
        for row in table.used_rows():
            if table.state[row] == SPILLED:
                assert table.on_ssd[row], row
                assert bool(table.generation[row]) == (row in self._promoting), row
