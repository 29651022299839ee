"""How pages are used: matches, read leases, renewals, pins, and reports of corruption.

Owns the read leases of one directory. A leased or pinned page is never evicted; the pinned part of
the memory is bounded, so that eviction always has something to take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.config import LEASE_LIFE_S_MAX
from kvstore.messages import LeasedPage
from kvstore.page import PageKey
from kvstore.server.entry import Lease
from kvstore.server.leases import Leases
from kvstore.server.ledger import Ledger
from kvstore.server.page_table import READY, SPILLED


class Reading:
    """See the module's docstring.

    Args:
        pinned_max: fraction of the segment that may be pinned.
    """

    def __init__(self, ledger: Ledger, *, lease_s: float, pinned_max: float) -> None:
        self._ledger = ledger
        self._table = ledger.table
        self._pinned_nbytes_max = int(pinned_max * ledger.segment.nbytes)
        self._leases = Leases(lease_s, max(LEASE_LIFE_S_MAX, lease_s))

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def match(self, packed: bytes, *, touch: bool) -> bytes:
        """The state codes of packed keys; with ``touch`` the pages found count as used."""
        table, counters = self._table, self._ledger.counters
        rows = table.find_many(packed)
        codes = table.states[rows]
        if touch:
            found = rows[rows != 0]
            self._ledger.touch_many(found)
            hits = rows[codes >= READY]
            counters["hits"] += len(hits)
            counters["misses"] += len(rows) - len(hits)
            counters["hit_tokens"] += int(table.token_counts[hits].sum())
        return codes.astype(np.uint8, copy=False).tobytes()

    def acquire(self, keys: Sequence[PageKey], *, touch: bool = True) -> Lease | None:
        """Lease those of ``keys`` that are ready in memory; None when none is."""
        ledger, table = self._ledger, self._table
        rows = []
        for key in dict.fromkeys(keys):
            row = table.find(key)
            if not row:
                continue
            if touch:
                ledger.touch(row)
            if table.state[row] == READY:
                rows.append(row)
                ledger.counters["leased_tokens"] += table.num_tokens[row]
        if not rows:
            return None
        for row in rows:
            ledger.hold(row)
        ledger.counters["leased_pages"] += len(rows)
        return self._leases.grant(rows, ledger.now_s)

    def leased(self, lease: Lease) -> tuple[LeasedPage, ...]:
        """What the reader is told; right after ``acquire``."""
        table = self._table
        return tuple(
            LeasedPage(table.record(row), table.offset[row], table.generation[row])
            for row in lease.rows
        )

    def release(self, lease_id: int) -> bool:
        """End a lease; unknown, ended and repeated ones are counted and ignored."""
        lease = self._leases.end(lease_id)
        if lease is None:
            self._ledger.counters["late_releases"] += 1
            return False
        self._let_go(lease)
        return True

    def _let_go(self, lease: Lease) -> None:
        for row in lease.rows:
            self._ledger.unhold(row)

    def renew(self, lease_id: int) -> bool:
        """Promise a reader a whole lease from now."""
        renewed = self._leases.renew(lease_id, self._ledger.now_s)
        self._ledger.counters["renewed_leases"] += renewed
        return renewed

    def expire(self) -> None:
        """End the leases whose time is over."""
        for lease in self._leases.expire(self._ledger.now_s):
            self._ledger.counters["expired_leases"] += 1
            self._let_go(lease)

    def drop(self, key: PageKey, generation: int) -> bool:
        """Forget a ready page that turned out to be corrupt."""
        row = self._table.find(key)
        if not row or self._table.generation[row] != generation:
            return False
        if self._table.state[row] != READY:
            return False
        self._ledger.counters["dropped"] += 1
        self._ledger.unindex(row)
        return True

    # ---- pins

    def pin(self, keys: Sequence[PageKey]) -> list[bool]:
        """Keep ready pages for good; False: not in memory, or too much is pinned already."""
        return [self._pin(key) for key in keys]

    def _pin(self, key: PageKey) -> bool:
        ledger, row = self._ledger, self._table.find(key)
        if not row or self._table.state[row] != READY:
            return False
        nbytes = self._table.page_nbytes(row)
        if not self._table.pinned[row]:
            if ledger.num_pinned_nbytes + nbytes > self._pinned_nbytes_max:
                ledger.counters["pins_refused"] += 1
                return False
            ledger.pin(row)
        return True

    def unpin(self, keys: Sequence[PageKey]) -> list[bool]:
        """Take pins off; False where there was none."""
        out = []
        for key in keys:
            row = self._table.find(key)
            out.append(bool(row) and self._ledger.unpin(row))
            if out[-1]:
                self._ledger.offer(row)
        return out

    # ---- forgetting

    def within(self, rows: Sequence[int], namespace: bytes | None) -> Sequence[int]:
        """Those of ``rows`` that are of ``namespace``; all when it is None."""
        if namespace is None:
            return rows
        number = self._table.namespaces.find(namespace)
        return [row for row in rows if self._table.namespace[row] == number]

    def clear(self, rows: Sequence[int]) -> int:
        """Forget those of ``rows`` that are present; returns how many."""
        present = [row for row in rows if self._table.state[row] in (READY, SPILLED)]
        for row in present:
            self._ledger.unindex(row)
        self._ledger.counters["cleared"] += len(present)
        return len(present)

    def check(self) -> None:
        holds: dict[int, int] = {}
        for lease in self._leases:
            for row in lease.rows:
                holds[row] = holds.get(row, 0) + 1
        for row, count in holds.items():
            assert self._table.num_holds[row] >= count, row
            assert self._table.generation[row], f"the slot of leased row {row} was freed"
        pinned = [row for row in self._table.used_rows() if self._table.pinned[row]]
        nbytes = sum(self._table.page_nbytes(row) for row in pinned)
        assert nbytes == self._ledger.num_pinned_nbytes <= self._pinned_nbytes_max
