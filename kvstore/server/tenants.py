"""Who may hold how much: shares of the memory by namespace.

Owns bytes held per tenant, their shares and whose turn it is to give. Knows no pages.

Without quotas all namespaces are one tenant: the coldest page goes, whoever stored it. With quotas
every namespace is a tenant. A configured one has its fraction of the memory; the others share the
rest equally, as many as hold anything. Shares are guaranteed minima, not limits: free memory may be
used by anybody, and who is above its share gives first, the one farthest above before others.

Shares are of the low watermark: whenever eviction has work to do, somebody is above its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        self._held[tenant] += nbytes

    def give(self, tenant: int, nbytes: int) -> None:
        """A slot of ``tenant`` is free."""
        self._held[tenant] -= nbytes
        if not self._held[tenant]:
            del self._held[tenant]
            self._num_unnamed -= self._fractions.pop(tenant) is None

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
        over = sorted(
            (-excess, tenant) for tenant in self._held if (excess := self.excess(tenant)) > 0
        )
        for _, tenant in over:
            self._turn, self._turn_left = tenant, STICKY_EVICTIONS
            yield tenant
        if asking is not None and asking in self._held:
            yield asking

    def next_giver(self, in_line: Mapping[int, int]) -> int | None:
        """Who will have to give once the bytes ``in_line`` are gone; None: nobody holds any."""
        left = [
            (in_line.get(tenant, 0) + self.share(tenant) - nbytes, tenant)
            for tenant, nbytes in self._held.items()
            if nbytes > in_line.get(tenant, 0)
        ]
        return min(left)[1] if left else None
