"""A ``Tier`` in process memory, with gates and faults at will."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from kvstore.page import PageKey
from kvstore.server.tier import TierPage
from kvstore.store import PageRecord


class FakeTier:
    """Holds copies of up to ``num_pages_max`` pages.

    Attributes:
        gate: stores and loads wait here while it is cleared.
        broken: why it takes nothing any more.
        damaged: keys that do not verify when they are loaded.
    """

    def __init__(self, num_pages_max: int = 1000) -> None:
        self.pages: dict[PageKey, tuple[TierPage, bytes]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken: str | None = None
        self.damaged: set[PageKey] = set()
        self.num_stores = 0
        self.num_loads = 0
        self.closed = False
        self._num_pages_max = num_pages_max

    @property
    def degraded(self) -> str | None:
        return self.broken

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def used_nbytes(self) -> int:
        return sum(len(data) for _, data in self.pages.values())

    @property
    def nbytes(self) -> int:
        return 1 << 30

    def has_room(self, page_nbytes: int) -> bool:
        return len(self.pages) < self._num_pages_max

    async def store(self, page: TierPage, data: memoryview) -> bool:
        self.num_stores += 1
        await self.gate.wait()
        if self.broken is not None or not self.has_room(len(data)):
            return False
        self.pages[page.record.key] = (page, bytes(data))
        return True

    async def load(self, key: PageKey, into: memoryview) -> PageRecord | None:
        self.num_loads += 1
        await self.gate.wait()
        if self.broken is not None or key not in self.pages:
            return None
        page, data = self.pages[key]
        into[:] = data
        if key in self.damaged:
            into[0] ^= 1
            return None
        return page.record

    def remove(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.pages.pop(key, None)

    def contents(self) -> Iterator[TierPage]:
        for page, _ in list(self.pages.values()):
            yield page

    def numbers(self) -> dict[str, float]:
        return {"ssd_pages": self.num_pages}

    async def close(self) -> None:
        self.closed = True
