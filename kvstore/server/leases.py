"""Read leases of one store node: which rows are promised to readers, and until when.

Owns lease ids and their ends. Frees nothing and counts no holds: ``Reading`` does, with the rows of
an ended lease in hand. A lease id is never used again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from kvstore.server.entry import Lease

_ENDS_SLACK = 1024  # ends of released leases kept before the heap is cleaned


class Leases:
    """Read leases that last ``lease_s``, and never longer than ``life_s`` however often renewed."""

    def __init__(self, lease_s: float, life_s: float) -> None:
        self._lease_s = lease_s
        self._life_s = life_s
        self._leases: dict[int, Lease] = {}
        self._ends: list[tuple[float, int]] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(self, rows: Sequence[int], now_s: float) -> Lease:
        """Make a lease over ``rows``."""
        self._last_id += 1
        return self._put(Lease(self._last_id, now_s, now_s + self._lease_s, tuple(rows)))

    def renew(self, lease_id: int, now_s: float) -> bool:
        """Promise ``lease_s`` from now; False when the lease has ended or lived its life."""
        lease = self._leases.get(lease_id)
        if lease is None or now_s + self._lease_s > lease.granted_s + self._life_s:
            return False
        self._put(lease._replace(expires_s=now_s + self._lease_s))
        return True

    def _put(self, lease: Lease) -> Lease:
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._ends, (lease.expires_s, lease.lease_id))
        if len(self._ends) > 2 * len(self._leases) + _ENDS_SLACK:
            self._ends = [(kept.expires_s, kept.lease_id) for kept in self]
            heapq.heapify(self._ends)
        return lease

    def end(self, lease_id: int) -> Lease | None:
        """Forget a lease; None when it is unknown or has ended."""
        return self._leases.pop(lease_id, None)

    def expire(self, now_s: float) -> list[Lease]:
        """Forget the leases whose time is over."""
        ended = []
        while self._ends and self._ends[0][0] <= now_s:
            expires_s, lease_id = heapq.heappop(self._ends)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_s == expires_s:
                ended.append(self._leases.pop(lease_id))
        return ended
