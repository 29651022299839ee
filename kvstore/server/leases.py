"""Read leases of one store node: which grants are promised to readers, and until when.

Owns lease ids and their ends; counts the leases of an entry. Frees nothing: the directory does,
with the entries of an ended lease in hand. A lease id is never used again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstore.server.entry import Entry, Lease


class Leases:
    """Read leases that last ``lease_s``."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[int, Lease] = {}
        self._ends: list[tuple[float, int]] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, entries: Sequence[Entry], now_s: float) -> Lease:
        """Put ``entries`` (ready, at least one) under a new lease."""
        self._last_id += 1
        lease = Lease(self._last_id, now_s + self._lease_s, tuple(entries))
        for entry in entries:
            entry.num_leases += 1
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._ends, (lease.expires_s, lease.lease_id))
        return lease

    def end(self, lease_id: int) -> Lease | None:
        """Take a lease off its entries; None when it is unknown or has ended."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            for entry in lease.entries:
                entry.num_leases -= 1
        return lease

    def expire(self, now_s: float) -> list[Lease]:
        """End the leases whose time is over."""
        ended = []
        while self._ends and self._ends[0][0] <= now_s:
            lease = self.end(heapq.heappop(self._ends)[1])
            if lease is not None:
                ended.append(lease)
        return ended

    def counts(self) -> dict[int, int]:
        """Number of leases by generation, counted anew; for checks."""
        counts: dict[int, int] = {}
        for lease in self._leases.values():
            for entry in lease.entries:
                counts[entry.slot.generation] = counts.get(entry.slot.generation, 0) + 1
        return counts
