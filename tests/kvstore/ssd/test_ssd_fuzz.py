"""The tier against a naive model, over random histories with faults and crashes.

The model keeps what was acknowledged. A page may be lost at a crash, by a fault or, in a tier that
evicts, by a warmer page; a page that is served has its own bytes; a page that was removed before
the last flush does not come back.
"""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.page import PageKey, PageSpec
from kvstore.ssd import SsdConfig, SsdTier
from kvstore.ssd.opening import PAGES_NAME
from tests.kvstore.ssd.disks import FaultyDisk, flip_bytes
from tests.kvstore.ssd.ssd_pages import LARGE, SMALL, get, key, put

NBYTES = 1 << 20
NUM_PAGES = 120
STEPS = 120


def spec_of(number: int) -> PageSpec:
    return LARGE if number % 3 == 0 else SMALL


class Model:
    """What must hold, by page number."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.evicts = seed % 2 == 0
        self.disk = FaultyDisk()
        self.here: dict[int, float] = {}
        self.numbers = {key(number): number for number in range(NUM_PAGES)}
        self.num_crashes = 0
        self.tier: SsdTier

    async def open(self) -> None:
        config = SsdConfig(
            path=self.folder, nbytes=NBYTES, flush_s=60, retry_s=1e-6, read_errors_max=1024
        )
        self.tier = await SsdTier.open(config, disk=self.disk)
        if self.evicts:
            self.tier.displace(self.evicted)

    def evicted(self, keys: Sequence[PageKey]) -> None:
        for evicted in keys:
            assert self.here.pop(self.numbers[evicted], None) is not None, "evicted twice"

    async def store(self) -> None:
        number, heat = self.rng.randrange(NUM_PAGES), self.rng.random()
        had_room = self.tier.has_room(spec_of(number).page_nbytes)
        known = number in self.here
        if await put(self.tier, number, spec=spec_of(number), heat=heat):
            self.here.setdefault(number, heat)
        else:
            assert not known, "a page was there and is refused"
            assert self.evicts or not had_room

    async def store_many(self) -> None:
        await asyncio.gather(*(self.store() for _ in range(8)))

    async def load(self) -> None:
        for number in self.rng.sample(range(NUM_PAGES), 6):
            there = await get(self.tier, number, spec=spec_of(number))
            assert there == (number in self.here), number

    async def remove(self) -> None:
        gone = self.rng.sample(range(NUM_PAGES), 4)
        self.tier.remove([key(number) for number in gone])
        for number in gone:
            self.here.pop(number, None)

    async def remove_all(self) -> None:
        if self.rng.random() < 0.1:
            self.tier.remove([key(number) for number in self.here])
            self.here.clear()

    async def flip(self) -> None:
        """Flip bits somewhere; what is lost shows when everything is loaded."""
        path = self.folder / PAGES_NAME
        flip_bytes(path, 4096, NBYTES - 4096, self.rng, count=3)
        await self.settle()

    async def fail_writes(self) -> None:
        self.disk.write_error = self.rng.choice([errno.EIO, errno.ENOSPC])
        number = self.rng.randrange(NUM_PAGES)
        if number not in self.here:
            assert not await put(self.tier, number, spec=spec_of(number), heat=2.0)
        self.disk.write_error = None

    async def lie_about_writes(self) -> None:
        self.disk.forget, self.disk.tear = self.rng.choice([(True, None), (False, 4096)])
        await self.store_many()
        self.disk.forget, self.disk.tear = False, None
        await self.settle()

    async def flush(self) -> None:
        assert await self.tier.flush()

    async def restart(self) -> None:
        await self.tier.close()
        await self.open()
        found = {self.numbers[p.record.key] for p in self.tier.contents()}
        assert found == set(self.here)

    async def crash(self) -> None:
        """Go on with a copy of the files as they are now: nothing is flushed or closed."""
        self.num_crashes += 1
        copy = self.folder.with_name(f"crash-{self.num_crashes}")
        await asyncio.to_thread(shutil.copytree, self.folder, copy)
        await self.tier.close()
        self.folder = copy
        acknowledged = set(self.here)
        await self.open()
        # Removals that were not flushed may come back: they are pages all the same.
        list(self.tier.contents())
        await self.settle(acknowledged | set(range(NUM_PAGES)))

    async def settle(self, candidates: set[int] | None = None) -> None:
        """Load everything that could be there; what is gone may only be lost, never wrong."""
        looked = sorted(candidates if candidates is not None else self.here)
        there = [number for number in looked if await get(self.tier, number, spec=spec_of(number))]
        self.here = {number: self.here.get(number, 0.0) for number in there}

    def check(self) -> None:
        self.tier.check()
        assert self.tier.num_pages == len(self.here)
        nbytes = sum(spec_of(number).page_nbytes for number in self.here)
        assert self.tier.used_nbytes == nbytes


@pytest.mark.parametrize("seed", range(16))
async def test_random_histories_with_faults_serve_nothing_wrong(tmp_path: Path, seed: int) -> None:
    m = Model(tmp_path / "tier", seed)
    await m.open()
    usual = [m.store, m.store_many, m.store_many, m.load, m.load, m.remove, m.remove_all, m.flush]
    rare = [m.flip, m.fail_writes, m.lie_about_writes, m.restart, m.crash]
    for _ in range(STEPS):
        await m.rng.choice(usual if m.rng.random() < 0.85 else rare)()
        m.check()
    await m.tier.close()
