"""How pages come in: reservations, commits, aborts, and writers that die.

Owns the reservations of one directory. A reservation ends in exactly one of four ways: commit,
abort, its lease runs out, or its writer's process is found dead. In the last three the key is
absent at once (who waits is told at once), and the slot stays fenced while bytes of the writer may
still be on the wire: until the reservation would have ended, unless the abort was quiet.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.config import LEASE_LIFE_S_MAX
from kvstore.messages import ReserveStatus
from kvstore.page import PageKey, PageSpec
from kvstore.server.entry import Reservation
from kvstore.server.evictor import Evictor
from kvstore.server.ledger import Ledger
from kvstore.server.page_table import FENCED, READY, SPILLED, WRITING
from kvstore.server.segment import Slot
from kvstore.server.writes import Writes
from kvstore.store import PageIdentity, PutPolicy


class Admission:
    """See the module's docstring."""

    def __init__(self, ledger: Ledger, evictor: Evictor, *, lease_s: float) -> None:
        self._ledger = ledger
        self._table = ledger.table
        self._evictor = evictor
        self._writes = Writes(lease_s, max(LEASE_LIFE_S_MAX, lease_s))
        self.last_page_nbytes = 0  # page size reserved last, for gauges

    def reserve(
        self,
        pages: Sequence[PageIdentity],
        spec: PageSpec,
        policy: PutPolicy,
        writer: str,
        *,
        patient: bool,
    ) -> list[Reservation]:
        """Grant slots for absent pages; the writer must commit each before its lease ends.

        ``patient``: LATER for what would have to push out pages without a copy on the SSD.
        """
        page_nbytes = spec.page_nbytes
        spec_id = self._table.known_spec(spec)
        for page in pages:  # first all parents, so that none is evicted for its children
            parent = self._table.find(page.parent)
            if parent and not (patient and self._table.on_ssd[parent]):
                self._ledger.protect(parent)  # one with a copy may have to: all memory is its own
        out: list[Reservation] = []
        evict = fits = self._fits(spec)
        for page in pages:
            row = self._table.find(page.key)
            if row:
                out.append(self._joined(row, page, spec_id))
                continue
            if evict:
                self._evictor.make_room(page_nbytes, policy.namespace, patient=patient)
            slot = self._ledger.segment.allocate(page_nbytes) if fits else None
            if slot is None:
                evict = False
                later = patient and fits and self._evictor.sparing
                self._ledger.counters["refused"] += not later
                out.append(Reservation(ReserveStatus.LATER if later else ReserveStatus.REFUSED))
            else:
                spec_id = self._table.spec_id(spec)  # from here on, as there is a page of it
                assert spec_id is not None, "pages have only gone since it was asked"
                out.append(self._grant(page, spec_id, slot, policy, writer))
        self._evictor.end_request()
        return out

    def _fits(self, spec: PageSpec) -> bool:
        """Memory has room for a page of ``spec``, and the table for its geometry."""
        page_nbytes = spec.page_nbytes
        if page_nbytes > self._ledger.segment.nbytes or not self._table.takes_spec(spec):
            return False
        self.last_page_nbytes = page_nbytes
        return True

    def _grant(
        self,
        page: PageIdentity,
        spec_id: int,
        slot: Slot,
        policy: PutPolicy,
        writer: str,
    ) -> Reservation:
        ledger = self._ledger
        row = ledger.admit(page, spec_id, policy, slot)
        parent = self._table.parent_row(row)
        if parent:
            ledger.protect(parent)
        self._writes.begin(row, slot.generation, writer, ledger.now_s)
        ledger.counters["reserved"] += 1
        return Reservation(ReserveStatus.GRANTED, slot)

    def _joined(self, row: int, page: PageIdentity, spec_id: int | None) -> Reservation:
        self._ledger.touch(row)
        if not self._table.is_page(row, page, spec_id):
            self._ledger.counters["collisions"] += 1
            return Reservation(ReserveStatus.COLLISION)
        writing = self._table.state[row] == WRITING
        return Reservation(ReserveStatus.WRITING if writing else ReserveStatus.PRESENT)

    def _writing(self, key: PageKey, generation: int) -> int:
        """The row of a reservation that is still good, or the null row."""
        row = self._table.find(key)
        if row and self._table.generation[row] == generation and self._table.state[row] == WRITING:
            return row
        return 0

    def commit(self, key: PageKey, generation: int, checksum: bytes) -> bool:
        """Make a written page visible; False when the reservation is gone."""
        row = self._writing(key, generation)
        if not row:
            self._ledger.counters["stale_commits"] += 1
            return False
        self._writes.finish(row)
        self._ledger.publish(row, key, checksum)
        self._ledger.counters["committed"] += 1
        self._ledger.counters["committed_tokens"] += self._table.num_tokens[row]
        return True

    def abort(self, key: PageKey, generation: int, *, quiet: bool) -> bool:
        """Give a reservation up; False when it is gone already."""
        row = self._writing(key, generation)
        if not row:
            self._ledger.counters["late_aborts"] += 1
            return False
        self._ledger.counters["aborted"] += 1
        if quiet:
            self._writes.finish(row)
        else:
            self._writes.abandon(row)
        self._ledger.unindex(row, fenced=not quiet)
        return True

    def renew(self, key: PageKey, generation: int) -> bool:
        """Promise a writer a whole lease from now."""
        row = self._writing(key, generation)
        renewed = bool(row) and self._writes.renew(row, self._ledger.now_s)
        self._ledger.counters["renewed_writes"] += renewed
        return renewed

    def bury(self, writer: str) -> int:
        """The writer's process is dead: give its reservations up; returns how many."""
        rows = self._writes.of_writer(writer)
        for row in rows:
            self._writes.abandon(row)
            self._ledger.unindex(row, fenced=True)
        self._ledger.counters["buried_writes"] += len(rows)
        return len(rows)

    def expire(self) -> None:
        """End the reservations and quarantines whose time is over."""
        for row in self._writes.expire(self._ledger.now_s):
            self._writes.finish(row)
            if self._table.state[row] == FENCED:
                self._ledger.unfence(row)
            else:  # the lease included the grace: nothing of the writer is on the wire
                self._ledger.counters["expired_writes"] += 1
                self._ledger.unindex(row)

    def check(self) -> None:
        ledger = self._ledger
        assert len(self._writes) == ledger.num_in(WRITING) + ledger.num_in(FENCED)
        for row in self._table.used_rows():
            if self._table.state[row] in (WRITING, READY, FENCED):
                assert self._table.generation[row], row
            if self._table.state[row] == SPILLED:
                assert self._table.on_ssd[row], row
