"""A simulated SSD below a store node: the ``Tier`` interface over a disk that outlives the process.

Owns ``SimDisk`` (what lies on one disk, written and synced or only written) and ``SimTier`` (one
life of one node using it, in virtual time). A crash loses, tears or damages what was not synced;
what was synced may still be flipped by ``rot``. Knows no directory.

As a real tier does, it lists a torn page at start and finds out when it reads it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.checksum import checksum_of
from kvstore.page import PageKey
from kvstore.server.tier import TierPage
from kvstore.store import PageRecord
from tests.sim.loop import Life

SYNC_EVERY = 4  # stores between two syncs
LATENCY_S_MEAN = 2e-3
LOST, TORN = 0.4, 0.8  # of the writes that were not synced: lost, or torn, or whole
BACK = 0.8  # of the removals that were not synced: the page comes back


@dataclass
class _Stored:
    page: TierPage
    data: bytes
    synced: bool = False


class SimDisk:
    """One disk; it belongs to a node, not to one of its lives."""

    def __init__(self, rng: random.Random, nbytes: int) -> None:
        self.rng = rng
        self.nbytes = nbytes
        self.slots: dict[PageKey, _Stored] = {}
        self._removed: dict[PageKey, _Stored] = {}  # not synced yet
        self.num_lost = 0
        self.num_torn = 0

    @property
    def used_nbytes(self) -> int:
        return sum(len(stored.data) for stored in self.slots.values())

    def remove(self, key: PageKey) -> None:
        stored = self.slots.pop(key, None)
        if stored is not None and stored.synced:
            self._removed[key] = stored

    def sync(self) -> None:
        self._removed.clear()
        for stored in self.slots.values():
            stored.synced = True

    def lose_power(self) -> None:
        """What was written last is lost or torn, what was removed last may be back."""
        for key, stored in list(self.slots.items()):
            if stored.synced:
                continue
            drawn = self.rng.random()
            if drawn < LOST:
                del self.slots[key]
                self.num_lost += 1
            elif drawn < TORN:
                written = self.rng.randrange(len(stored.data))
                stored.data = stored.data[:written] + bytes(len(stored.data) - written)
                self.num_torn += 1
        for key, stored in self._removed.items():
            if key not in self.slots and self.rng.random() < BACK:
                self.slots[key] = stored
        self.sync()

    def rot(self) -> None:
        """Flip one bit of one page."""
        if self.slots:
            stored = self.rng.choice(list(self.slots.values()))
            data = bytearray(stored.data)
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            stored.data = bytes(data)


class SimTier:
    """``kvstore.server.tier.Tier`` of one life.

    Attributes:
        known: every key that this life has found or stored, for checkers.
    """

    degraded: str | None = None

    def __init__(self, disk: SimDisk, life: Life) -> None:
        self.known: dict[PageKey, None] = dict.fromkeys(disk.slots)
        self._disk = disk
        self._life = life
        self._counters: Counter[str] = Counter()
        self._heats: dict[PageKey, float] = {}  # of pages whose heat has changed
        self._told: Callable[[Sequence[PageKey]], None] | None = None
        self._num_stores = 0
        self._closed = False

    @property
    def num_pages(self) -> int:
        return len(self._disk.slots)

    @property
    def used_nbytes(self) -> int:
        return self._disk.used_nbytes

    @property
    def nbytes(self) -> int:
        return self._disk.nbytes

    def displace(self, told: Callable[[Sequence[PageKey]], None]) -> None:
        self._told = told

    def __contains__(self, key: PageKey) -> bool:
        return key in self._disk.slots

    def touch(self, key: PageKey, heat: float) -> None:
        self._heats[key] = heat

    async def store(self, page: TierPage, data: memoryview) -> bool:
        copy = bytes(data)
        await asyncio.sleep(self._latency_s())
        if self._closed or not self._life.alive or not self._make_room(page.heat, len(copy)):
            return False
        self._disk.slots[page.record.key] = _Stored(page, copy)
        self.known[page.record.key] = None
        self._num_stores += 1
        if not self._num_stores % SYNC_EVERY:
            self._disk.sync()
        return True

    async def load(self, key: PageKey, into: memoryview) -> PageRecord | None:
        await asyncio.sleep(self._latency_s())
        stored = self._disk.slots.get(key)
        if self._closed or not self._life.alive or stored is None:
            return None
        page = stored.page
        into[:] = stored.data
        if checksum_of(page.spec, into, page.record.num_tokens) != page.record.checksum:
            self._counters["sim_damaged"] += 1
            self.remove([key])
            return None
        return page.record

    def remove(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._heats.pop(key, None)
            self._disk.remove(key)

    async def flush(self) -> bool:
        await asyncio.sleep(self._latency_s())
        if self._closed or not self._life.alive:
            return False
        self._disk.sync()
        return True

    def contents(self) -> Iterator[TierPage]:
        for stored in list(self._disk.slots.values()):
            if stored.page.record.key in self._disk.slots:
                yield stored.page

    def numbers(self) -> dict[str, float]:
        return {"ssd_pages": self.num_pages, "ssd_used_nbytes": self.used_nbytes, **self._counters}

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disk.sync()

    def _make_room(self, heat: float, nbytes: int) -> bool:
        """Give up colder pages for one of this heat; False: it is not worth that."""
        while self.used_nbytes + nbytes > self.nbytes:
            coldest = min(self._disk.slots, key=self._heat)
            if self._told is None or self._heat(coldest) >= heat:
                return False
            self.remove([coldest])
            self._told([coldest])
        return True

    def _heat(self, key: PageKey) -> float:
        return self._heats.get(key, self._disk.slots[key].page.heat)

    def _latency_s(self) -> float:
        return self._disk.rng.expovariate(1 / LATENCY_S_MEAN)
