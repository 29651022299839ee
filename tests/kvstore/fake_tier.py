"""A ``Tier`` in process memory, with gates and faults at will."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvstore.page import PageKey
from kvstore.server.tier import TierPage
from kvstore.store import PageRecord


class FakeTier:
    """Holds copies of up to ``num_pages_max`` pages.

    Attributes:
        gate: stores and loads wait here while it is cleared.
        broken: why it takes nothing any more, and gives nothing.
        full: why it takes nothing any more; what it has can be loaded.
        busy: loads are refused.
        damaged: keys that do not verify when they are loaded.
    """

    def __init__(self, num_pages_max: int = 1000) -> None:
        self.pages: dict[PageKey, tuple[TierPage, bytes]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken: str | None = None
        self.full: str | None = None
        self.busy = False
        self.damaged: set[PageKey] = set()
        self.num_stores = 0
        self.num_loads = 0
        self.num_flushes = 0
        self.closed = False
        self._num_pages_max = num_pages_max
        self._told: Callable[[Sequence[PageKey]], None] | None = None

    @property
    def degraded(self) -> str | None:
        return self.broken or self.full

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def used_nbytes(self) -> int:
        return sum(len(data) for _, data in self.pages.values())

    @property
    def nbytes(self) -> int:
        return 1 << 30

    def displace(self, told: Callable[[Sequence[PageKey]], None]) -> None:
        self._told = told

    def __contains__(self, key: PageKey) -> bool:
        return key in self.pages

    def touch(self, key: PageKey, heat: float) -> None:
        if key in self.pages:
            page, data = self.pages[key]
            self.pages[key] = (page._replace(heat=heat), data)

    def _make_room(self, heat: float) -> bool:
        """Give up the coldest page if it is colder than ``heat`` and there is no room."""
        if len(self.pages) < self._num_pages_max:
            return True
        coldest = min(self.pages, key=lambda key: self.pages[key][0].heat)
        if self._told is None or self.pages[coldest][0].heat >= heat:
            return False
        del self.pages[coldest]
        self._told([coldest])
        return True

    async def store(self, page: TierPage, data: memoryview) -> bool:
        self.num_stores += 1
        await self.gate.wait()
        if self.degraded is not None or not self._make_room(page.heat):
            return False
        self.pages[page.record.key] = (page, bytes(data))
        return True

    async def load(self, key: PageKey, into: memoryview) -> PageRecord | None:
        self.num_loads += 1
        await self.gate.wait()
        if self.broken is not None or self.busy or key not in self.pages:
            return None
        page, data = self.pages[key]
        into[:] = data
        if key in self.damaged:
            into[0] ^= 1
            del self.pages[key]
            return None
        return page.record

    def remove(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.pages.pop(key, None)

    async def flush(self) -> bool:
        self.num_flushes += 1
        return self.broken is None

    def contents(self) -> Iterator[TierPage]:
        found = [page for page, _ in self.pages.values()]
        for key, (page, data) in list(self.pages.items()):
            self.pages[key] = (page._replace(heat=page.heat - 1e9), data)  # than all of this life
        for page in found:
            if page.record.key in self.pages:
                yield page

    def numbers(self) -> dict[str, float]:
        return {"ssd_pages": self.num_pages}

    async def close(self) -> None:
        self.closed = True
