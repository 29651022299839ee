"""A directory with bytes in memory, and a fake tier below it."""

from __future__ import annotations

from kvstore.server.directory import Directory
from kvstore.server.tiering import Tiering
from kvstore.store import PageIdentity, PutPolicy
from tests.kvstore.directories import CHECKSUM, directory, grant, single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.pages import SPEC, bytes_of


class Bench:
    """A directory with bytes, and a tier below it."""

    def __init__(
        self,
        num_pages: int,
        tier: FakeTier,
        *,
        high: float = 0.9,
        low: float = 0.5,
        spill: float = 0.0,
        policy: str = "heat",
    ) -> None:
        mark = int(num_pages * SPEC.page_nbytes * spill)
        self.d: Directory = directory(num_pages, high=high, low=low, policy=policy, spill=mark)
        self.tier = tier
        self.memory = memoryview(bytearray(num_pages * SPEC.page_nbytes))
        self.now_s = 0.0
        self.tiering = Tiering(self.d, tier, self.memory, now_s=lambda: self.now_s)

    def put(self, page: PageIdentity, policy: PutPolicy | None = None) -> None:
        self.now_s += 0.01
        slot = grant(self.d, page, self.now_s, policy or PutPolicy())
        self.memory[slot.offset : slot.offset + slot.nbytes] = bytes_of(page).data
        assert self.d.commit(page.key, slot.generation, CHECKSUM)

    def put_all(self, numbers: range) -> list[PageIdentity]:
        pages = [single(i) for i in numbers]
        for page in pages:
            self.put(page)
        return pages

    async def spill(self) -> None:
        self.tiering.kick()
        await self.tiering.idle()

    def evict(self, num: int) -> int:
        self.now_s += 0.01
        return self.d.tick(self.now_s, num)

    async def promote(self, *pages: PageIdentity) -> None:
        self.now_s += 0.01
        deadline_s = self.now_s + 60.0
        await self.tiering.promote([page.key for page in pages], deadline_s)

    def bytes_in_memory(self, page: PageIdentity) -> bytes:
        lease = self.d.acquire([page.key], self.now_s)
        assert lease is not None
        offset = self.d.leased(lease)[0].offset
        self.d.release(lease.lease_id)
        return bytes(self.memory[offset : offset + SPEC.page_nbytes])
