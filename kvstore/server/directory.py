"""The directory of one store node: which page is in which slot, and who may rely on it.

Owns the parts and puts them behind one face; a synchronous core: no clock (``now_s`` is passed in),
no socket, no bytes. The shell (``kvstore/server/node.py``) moves messages and checks checksums.

::

              reserve                     commit (generation fits, bytes verified)
    absent ─────────────▶ writing ──────────────────────────────▶ ready ◀─┐ acquire: lease + 1
      ▲                   │     │                                 │  │ └──┘ release / lease ends
      │   abort, quiet    │     │ abort, not quiet;               │  │
      ├───────────────────┘     ▼ writer dead              evict  │  │ drop (corrupt), clear
      │   quarantine ends    fenced                               │  │ while leased
      ├─────────────────────────┘           (with an SSD copy:    │  ▼
      ├────────────────────────────────────  spilled) ────────────┘ dropped
      └── last lease released or ended ───────────────────────────────┘

*Fenced* and *dropped* slots are not reachable by key but still owed: a writer's bytes may be on the
wire, a reader may be reading. They become free by timer or with the last lease. The parts:
``Admission`` (reserve to commit), ``Reading`` (match, leases, pins), ``Evictor`` (watermarks,
quotas), ``Spilling`` (SSD), all moving rows through ``Ledger`` in a ``PageTable``.

Invariants (``check``): slots free + writing + ready + fenced + dropped = total; a slot under a
lease is never freed; every ready page that is a leaf without leases is a candidate for eviction.
A page is evicted before its ancestors, and an ancestor is as recent as the latest of its
descendants once it is its turn.

Fencing: a grant is named by its generation, which is never used again. A commit, abort or report
that names another generation than the present one changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvstore.events import KvEventLog
from kvstore.messages import STATES, LeasedPage
from kvstore.page import PageKey, PageSpec
from kvstore.replication.holdings import KeptAs
from kvstore.server.admission import Admission
from kvstore.server.entry import Counters, Grant, Lease, Reservation
from kvstore.server.evictor import Evictor
from kvstore.server.heat import HeatMeter
from kvstore.server.ledger import Ledger
from kvstore.server.page_table import DROPPED, FENCED, READY, SPILLED, WRITING, PageTable
from kvstore.server.policies import policy_named
from kvstore.server.reading import Reading
from kvstore.server.segment import Segment
from kvstore.server.spilling import Spilling
from kvstore.server.tenants import Tenants
from kvstore.server.usage import Usage
from kvstore.server.watches import Watches
from kvstore.store import DEFAULT_POLICY, PageIdentity, PageRecord, PageState, PutPolicy

CLEAR_BATCH = 256  # rows looked at, and pages forgotten, at a time


class Directory:
    """See the module's docstring.

    Args:
        segment: the slots to manage; nobody else allocates from it.
        lease_s: length of reservations and read leases, the grace included.
        high, low: used bytes between which ``tick`` evicts.
        spill: used bytes above which pages are copied to the SSD ahead of their eviction; at most
            ``low``, which is the default.
        policy: name of the eviction policy.
        quotas: fraction of the memory that is guaranteed, by namespace.
        pinned_max: fraction of the segment that may be pinned.
        half_life_s: of a page's heat.
        seed: unknown to clients; they cannot choose keys that make the index slow.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        lease_s: float,
        high: int,
        low: int,
        spill: int | None = None,
        policy: str = "lru",
        quotas: Mapping[bytes, float] | None = None,
        pinned_max: float = 0.25,
        half_life_s: float = 600.0,
        seed: bytes = b"",
    ) -> None:
        self.segment = segment
        self._table = PageTable(seed)
        self._tenants = Tenants(quotas or {}, low)
        self._ledger = Ledger(
            segment,
            self._table,
            policy=policy_named(policy, self._table),
            tenants=self._tenants,
            heat=HeatMeter(self._table, half_life_s),
        )
        self._evictor = Evictor(self._ledger, high=high, low=low)
        self._admission = Admission(self._ledger, self._evictor, lease_s=lease_s)
        self._reading = Reading(self._ledger, lease_s=lease_s, pinned_max=pinned_max)
        watermark = low if spill is None else min(spill, low)
        self.spilling = Spilling(self._ledger, self._evictor, watermark=watermark)
        self.policy = policy

    @property
    def event_log(self) -> KvEventLog:
        """What became readable here, and what did not stay so."""
        return self._ledger.announcer.log

    @property
    def counters(self) -> Counters:
        return self._ledger.counters

    @property
    def watches(self) -> Watches:
        return self._ledger.watches

    # ---- looking

    def state(self, key: PageKey) -> PageState:
        return STATES[self._table.state[self._table.find(key)]]

    def match(self, packed: bytes, now_s: float, *, touch: bool = True) -> bytes:
        """The state code of every packed key; with ``touch`` the pages found count as used."""
        self._ledger.begin(now_s)
        return self._reading.match(packed, touch=touch)

    def find(self, key: PageKey, generation: int) -> Grant | None:
        """The page of ``key`` if it is still the grant ``generation``."""
        table = self._table
        row = table.find(key)
        if not row or table.generation[row] != generation or table.state[row] == SPILLED:
            return None
        return Grant(
            row=row,
            key=key,
            slot=self._ledger.slot(row),
            spec=table.spec_of(row),
            num_tokens=table.num_tokens[row],
            ready=table.state[row] == READY,
            checksum=table.checksum(row),
        )

    def record(self, key: PageKey) -> PageRecord | None:
        """The record of a page in memory or on the SSD; None when there is none to read."""
        row = self._table.find(key)
        return self._table.record(row) if self._table.state[row] in (READY, SPILLED) else None

    def uses(self, key: PageKey, now_s: float) -> float:
        """Heat of a page in uses, decayed; 0 when it is absent."""
        row = self._table.find(key)
        return self._ledger.heat.uses_now(row, now_s) if row else 0.0

    def scan(self, cursor: int, num_max: int) -> tuple[list[PageKey], int | None]:
        """``kvstore.replication.holdings.Holdings``."""
        end = cursor + num_max
        keys = [self._table.key(row) for row in self._table.present_rows(cursor, end)]
        return keys, end if end < self._table.end_row else None

    def page_nbytes(self, key: PageKey) -> int:
        """Size of an indexed page; 0 when the key is absent."""
        row = self._table.find(key)
        return self._table.page_nbytes(row) if row else 0

    def kept_as(self, key: PageKey) -> KeptAs | None:
        """``kvstore.replication.holdings.Holdings``."""
        row = self._table.find(key)
        if self._table.state[row] not in (READY, SPILLED):
            return None
        return KeptAs(self._table.spec_of(row), self._ledger.policy_of(row))

    def forget(self, keys: Sequence[PageKey]) -> int:
        """``kvstore.replication.holdings.Holdings``."""
        return self._reading.clear([self._table.find(key) for key in keys])

    def cool(self, keys: Sequence[PageKey]) -> int:
        """``kvstore.replication.holdings.Holdings``."""
        rows = [row for key in keys if (row := self._table.find(key))]
        rows = [row for row in rows if self._table.state[row] in (READY, SPILLED)]
        for row in rows:
            self._evictor.cool(row)
        return len(rows)

    # ---- numbers

    @property
    def num_pages(self) -> int:
        """Ready pages in memory."""
        return self._ledger.num_in(READY)

    @property
    def num_spilled(self) -> int:
        """Pages that are only on the SSD."""
        return self._ledger.num_in(SPILLED)

    @property
    def num_writing(self) -> int:
        return self._ledger.num_in(WRITING)

    @property
    def num_owed(self) -> int:
        """Slots that are fenced or dropped and not free yet."""
        return self._ledger.num_in(FENCED) + self._ledger.num_in(DROPPED)

    @property
    def num_leases(self) -> int:
        return self._reading.num_leases

    @property
    def num_held(self) -> int:
        """Promises to writers and readers that have not ended."""
        return self.num_writing + self.num_owed + self.num_leases

    @property
    def last_page_nbytes(self) -> int:
        """Size of the page reserved last; 0 before the first."""
        return self._admission.last_page_nbytes

    @property
    def evicting(self) -> bool:
        """Eviction is under way between the watermarks."""
        return self._evictor.evicting

    def gauges(self) -> dict[str, float]:
        """What is where, by name."""
        ledger = self._ledger
        return {
            "num_pages": self.num_pages,
            "num_spilled": self.num_spilled,
            "num_on_ssd": ledger.num_on_ssd,
            "num_in_line": len(ledger.line),
            "num_writing": self.num_writing,
            "num_fenced": ledger.num_in(FENCED),
            "num_dropped": ledger.num_in(DROPPED),
            "num_owed": self.num_owed,
            "num_leases": self.num_leases,
            "num_waits": len(self.watches),
            "num_namespaces": len(self._table.namespaces),
            "pinned_nbytes": ledger.num_pinned_nbytes,
            "reclaim_s_max": ledger.reclaim_s_max,
            "reclaim_s_sum": ledger.reclaim_s_sum,
            "oldest_owed_s": ledger.oldest_owed_s,
        }

    def namespace_nbytes(self) -> dict[bytes, int]:
        """Bytes of memory by namespace; without quotas all under the empty one."""
        names = self._table.namespaces
        return {names.name(number): n for number, n in self._tenants.held().items()}

    def usage(self) -> Usage:
        """What each namespace holds, to be counted."""
        return Usage(self._table)

    # ---- writing

    def expect(self, tier_nbytes: int, page_nbytes: int | None = None) -> None:
        """There is a tier of this size, too: its pages, of that size if known, need rows. Before
        the first page."""
        self._ledger.capacity_nbytes += tier_nbytes
        if page_nbytes is not None:
            self._table.reserve(self._ledger.capacity_nbytes // page_nbytes)

    def reserve(
        self,
        pages: Sequence[PageIdentity],
        spec: PageSpec,
        now_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
        writer: str = "",
        *,
        patient: bool = False,
    ) -> list[Reservation]:
        """Grant slots for absent pages; the writer must commit each before its lease ends.

        ``writer`` names the process that writes, for ``bury``. ``patient``: rather than push out
        pages that the SSD has yet to be given, say LATER.
        """
        self._ledger.begin(now_s)
        return self._admission.reserve(pages, spec, policy, writer, patient=patient)

    def commit(self, key: PageKey, generation: int, checksum: bytes) -> bool:
        """Make a written page visible; False when the reservation is gone."""
        return self._admission.commit(key, generation, checksum)

    def abort(self, key: PageKey, generation: int, *, quiet: bool) -> bool:
        """Give a reservation up; False when it is gone already.

        ``quiet`` says that no bytes of the writer can arrive any more; else the slot stays fenced
        until the reservation would have ended.
        """
        return self._admission.abort(key, generation, quiet=quiet)

    def renew_write(self, key: PageKey, generation: int, now_s: float) -> bool:
        """Promise a writer a whole lease from now; False when its reservation is gone."""
        self._ledger.begin(now_s)
        return self._admission.renew(key, generation)

    def bury(self, writer: str, now_s: float) -> int:
        """The process ``writer`` is dead: give up what it reserved; returns how many pages."""
        self._ledger.begin(now_s)
        return self._admission.bury(writer)

    def hold(self, key: PageKey, generation: int) -> int | None:
        """Owe the slot of a reservation to this process until ``let_go``, whatever becomes of it.

        Returns the row to let go of; None when the reservation is gone.
        """
        row = self._table.find(key)
        if not row or self._table.generation[row] != generation:
            return None
        self._ledger.hold(row)
        return row

    def let_go(self, row: int) -> None:
        """Nothing of this process touches the slot of ``row`` any more."""
        self._ledger.unhold(row)

    # ---- reading

    def acquire(self, keys: Sequence[PageKey], now_s: float, *, touch: bool = True) -> Lease | None:
        """Lease those of ``keys`` that are ready in memory; None when none is."""
        self._ledger.begin(now_s)
        return self._reading.acquire(keys, touch=touch)

    def leased(self, lease: Lease) -> tuple[LeasedPage, ...]:
        """Records and places of the pages of a lease, right after ``acquire``."""
        return self._reading.leased(lease)

    def release(self, lease_id: int) -> bool:
        """End a lease; unknown, ended and repeated ones are counted and ignored."""
        return self._reading.release(lease_id)

    def renew_lease(self, lease_id: int, now_s: float) -> bool:
        """Promise a reader a whole lease from now; False when its lease has ended."""
        self._ledger.begin(now_s)
        return self._reading.renew(lease_id)

    def drop(self, key: PageKey, generation: int) -> bool:
        """Forget a ready page that turned out to be corrupt."""
        return self._reading.drop(key, generation)

    def pin(self, keys: Sequence[PageKey]) -> list[bool]:
        """Never evict these; False: not ready in memory, or too much is pinned already."""
        return self._reading.pin(keys)

    def unpin(self, keys: Sequence[PageKey]) -> list[bool]:
        """Take pins off; False where there was none."""
        return self._reading.unpin(keys)

    def clear(self, namespace: bytes | None = None) -> int:
        """Forget all present pages, or those of one namespace; returns how many."""
        return sum(self.clearing(namespace))

    def clearing(self, namespace: bytes | None = None) -> Iterator[int]:
        """Likewise in batches, for callers with other things to do; yields how many each.

        Writers in flight go on; pages stored after the start may stay or go.
        """
        start = 0
        while start < self._table.end_row:
            rows = self._table.present_rows(start, start + CLEAR_BATCH)
            yield self._reading.clear(self._reading.within(rows, namespace))
            start += CLEAR_BATCH

    # ---- time

    def tick(self, now_s: float, num_evict_max: int) -> int:
        """End what has expired; evict a bounded number of pages between the watermarks.

        Returns how many were evicted. Costs a few comparisons when there is nothing to do.
        """
        self._ledger.begin(now_s)
        self._reading.expire()
        self._admission.expire()
        for row in self._ledger.queues.lapse(now_s):
            self.counters["lapsed_priorities"] += 1
            self._ledger.requeue(row)
        return self._evictor.tick(num_evict_max)

    # ---- proof

    def check(self) -> None:
        """Assert the invariants; O(pages)."""
        self.segment.check()
        self._table.check()
        self._admission.check()
        self._reading.check()
        self.spilling.check()
        self._ledger.check()
