"""Who may hold how much: shares of the memory by namespace.

Owns bytes held per tenant, their shares and whose turn it is to give. Knows no pages. There may be
as many tenants as pages (each names its own): who has most is found in O(log n).

Without quotas all namespaces are one tenant: the coldest page goes, whoever stored it. With quotas
every namespace is a tenant. A configured one has its fraction of the memory; the others share the
rest equally, as many as hold anything. Shares are guaranteed minima, not limits: free memory may be
used by anybody, and who is above its share gives first, the one farthest above before others.

Shares are of the low watermark: whenever eviction has work to do, somebody is above its share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import takewhile

from kvstore.server.largest import Largest

STICKY_EVICTIONS = 32  # pages that one tenant gives before it is looked again who has most

COMMON = 0  # the tenant of all, without quotas


class Tenants:
    """See the module's docstring.

    Args:
        quotas: fraction by namespace, together at most 1.
        nbytes: what the fractions are of.
    """

    def __init__(self, quotas: Mapping[bytes, float], nbytes: int) -> None:
        self._quotas = dict(quotas)
        self._nbytes = nbytes
        self._rest = max(0.0, 1.0 - sum(quotas.values()))
        self._held: dict[int, int] = {}  # bytes by tenant
        self._fractions: dict[int, float | None] = {}  # of those who hold something
        self._named: dict[int, None] = {}  # those of the configured that hold something
        self._unnamed = Largest(lambda tenant: self._held.get(tenant, 0))
        self._in_line: dict[int, int] = {}
        self._staying = Largest(self._left)
        self._num_unnamed = 0
        self._turn: int | None = None
        self._turn_left = 0

    @property
    def separate(self) -> bool:
        """Namespaces are tenants."""
        return bool(self._quotas)

    def tenant_of(self, number: int) -> int:
        """The tenant of a namespace number."""
        return number if self._quotas else COMMON

    def hold(self, tenant: int, namespace: bytes, nbytes: int) -> None:
        """``tenant`` has been given a slot."""
        if tenant not in self._held:
            fraction = self._quotas.get(namespace) if self._quotas else 1.0
            self._fractions[tenant] = fraction
            self._num_unnamed += fraction is None
            self._held[tenant] = 0
            if fraction is not None:
                self._named[tenant] = None
        self._held[tenant] += nbytes
        if self._fractions[tenant] is None:
            self._unnamed.rose(tenant)
            self._staying.rose(tenant)

    def give(self, tenant: int, nbytes: int) -> None:
        """A slot of ``tenant`` is free."""
        self._held[tenant] -= nbytes
        if not self._held[tenant]:
            del self._held[tenant]
            self._num_unnamed -= self._fractions.pop(tenant) is None
            self._named.pop(tenant, None)

    def held(self) -> dict[int, int]:
        """Bytes by tenant."""
        return dict(self._held)

    def share(self, tenant: int) -> int:
        """Bytes that others cannot take from ``tenant``."""
        fraction = self._fractions.get(tenant)
        if fraction is None:
            fraction = self._rest / max(1, self._num_unnamed)
        return int(fraction * self._nbytes)

    def excess(self, tenant: int) -> int:
        """Bytes above the share; at most 0 for who is protected."""
        return self._held.get(tenant, 0) - self.share(tenant)

    def givers(self, asking: int | None) -> Iterator[int]:
        """Tenants that may have to give a page now, in order; ``asking`` wants room for itself."""
        if not self._quotas:
            yield COMMON
            return
        if self._turn is not None and self._turn_left and self.excess(self._turn) > 0:
            self._turn_left -= 1
            yield self._turn
        for tenant in self._over():
            self._turn, self._turn_left = tenant, STICKY_EVICTIONS
            yield tenant
        if asking is not None and asking in self._held:
            yield asking

    def _over(self) -> Iterator[int]:
        """Tenants above their share, the farthest first. Unnamed ones all have the same share."""
        named = iter(sorted(self._named, key=lambda tenant: (-self.excess(tenant), tenant)))
        ranked = heapq.merge(
            named, self._unnamed.ranked(), key=lambda tenant: (-self.excess(tenant), tenant)
        )
        return takewhile(lambda tenant: self.excess(tenant) > 0, ranked)

    # ---- ahead of time

    def stand(self, tenant: int, nbytes: int) -> None:
        """So many bytes more (or less) of ``tenant`` stand in line to go."""
        self._in_line[tenant] = self._in_line.get(tenant, 0) + nbytes
        if not self._in_line[tenant]:
            del self._in_line[tenant]
        if nbytes < 0:
            self._told_left(tenant)

    def in_line(self) -> dict[int, int]:
        """Bytes in line by tenant."""
        return dict(self._in_line)

    def _left(self, tenant: int) -> int:
        return self._held.get(tenant, 0) - self._in_line.get(tenant, 0)

    def _told_left(self, tenant: int) -> None:
        if self._fractions.get(tenant, 0.0) is None:
            self._staying.rose(tenant)

    def next_giver(self) -> int | None:
        """Who will have to give once all who stand in line are gone; None: nobody is left."""
        unnamed = next(self._staying.ranked(), None)
        left = [
            (self.share(tenant) - self._left(tenant), tenant)
            for tenant in (*self._named, *(() if unnamed is None else (unnamed,)))
            if self._left(tenant) > 0
        ]
        return min(left)[1] if left else None
