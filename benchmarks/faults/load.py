"""A steady load of puts and gets on a page store, every byte of which is checked.

Owns the prompts, their bytes (a function of the page's key) and the ledger: which pages are
*committed*, that is, stored by a put that has returned, and what every later read of them gave.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import numpy as np

from kvstore.client.store_client import StoreClient
from kvstore.keys import namespace_of, page_keys
from kvstore.page import PageSpec
from kvstore.store import GetOutcome, GetPage, PageIdentity, PutOutcome, PutPage, identities
from transfer.interface import Region, Transfer, deadline_after

NUM_PAGES = 8  # of one prompt
OP_S = 10.0  # deadline of every put and get
_GOOD = (PutOutcome.STORED, PutOutcome.PRESENT)


@dataclass
class Done:
    """One finished call: when it began and ended, seconds since the start of the load."""

    began_s: float
    ended_s: float
    num_pages: int
    num_failed: int


@dataclass
class Ledger:
    """Everything that happened."""

    puts: list[Done] = field(default_factory=list)
    gets: list[Done] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of reads of committed pages
    num_wrong: int = 0  # pages that were READ and held other bytes


class Load:
    """Puts and gets through one client, until ``stop``.

    Args:
        pause_s: between two calls of one worker.
    """

    def __init__(
        self, client: StoreClient, transfer: Transfer, spec: PageSpec, *, seed: int, pause_s: float
    ) -> None:
        self.ledger = Ledger()
        self.committed: list[int] = []  # numbers of prompts whose pages are all committed
        self._client = client
        self._transfer = transfer
        self._spec = spec
        self._rng = random.Random(seed)
        self._pause_s = pause_s
        self._next = 0
        self._stopped = False
        self._started_s = asyncio.get_running_loop().time()

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._started_s

    def stop(self) -> None:
        self._stopped = True

    async def run(self, num_putters: int, num_getters: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_putters):
                tasks.create_task(self._puts())
            for _ in range(num_getters):
                tasks.create_task(self._gets())

    async def _puts(self) -> None:
        region = self._transfer.allocate(NUM_PAGES * self._spec.page_nbytes)
        while not self._stopped:
            number, self._next = self._next, self._next + 1
            pages = self.prompt(number)
            for i, page in enumerate(pages):
                _at(region, i, self._spec)[:] = self.bytes_of(page)
            puts = [PutPage(page, i * self._spec.page_nbytes) for i, page in enumerate(pages)]
            began_s = self.now_s
            deadline_s = deadline_after(OP_S)
            result = await self._client.put(puts, source=region, deadline_s=deadline_s)
            num_failed = sum(outcome not in _GOOD for outcome in result.outcomes)
            self.ledger.puts.append(Done(began_s, self.now_s, len(pages), num_failed))
            if not num_failed:
                self.committed.append(number)
            await asyncio.sleep(self._pause_s)

    async def _gets(self) -> None:
        region = self._transfer.allocate(NUM_PAGES * self._spec.page_nbytes)
        while not self._stopped:
            if self.committed:
                await self.get(self._rng.choice(self.committed), region)
            await asyncio.sleep(self._pause_s)

    async def get(self, number: int, region: Region) -> int:
        """Read a committed prompt and check its bytes; returns how many pages failed."""
        pages = self.prompt(number)
        region.view[:] = bytes(region.nbytes)
        gets = [GetPage(page, i * self._spec.page_nbytes) for i, page in enumerate(pages)]
        began_s = self.now_s
        result = await self._client.get(gets, into=region, deadline_s=deadline_after(OP_S))
        num_failed = 0
        for i, (page, outcome) in enumerate(zip(pages, result.outcomes, strict=True)):
            if outcome is not GetOutcome.READ:
                num_failed += 1
                text = f"{began_s:.2f}..{self.now_s:.2f} s: page {i} of prompt {number}: {outcome}"
                self.ledger.failures.append(text)
            elif bytes(_at(region, i, self._spec)) != self.bytes_of(page):
                self.ledger.num_wrong += 1
        self.ledger.gets.append(Done(began_s, self.now_s, len(pages), num_failed))
        return num_failed

    async def get_all(self) -> int:
        """Read every committed prompt once; returns how many pages failed."""
        region = self._transfer.allocate(NUM_PAGES * self._spec.page_nbytes)
        return sum([await self.get(number, region) for number in list(self.committed)])

    def prompt(self, number: int) -> list[PageIdentity]:
        """The pages of prompt ``number``; no two prompts share one."""
        size = self._spec.page_size
        tokens = np.arange(NUM_PAGES * size, dtype="<i4") + number * NUM_PAGES * size
        namespace = namespace_of("faults", self._spec)
        keys = page_keys(namespace, tokens.tolist(), size)
        return identities(namespace, keys, tokens.tobytes(), size)

    def bytes_of(self, page: PageIdentity) -> bytes:
        seed = int.from_bytes(page.key[:8], "little")
        return np.random.default_rng(seed).bytes(self._spec.page_nbytes)


def _at(region: Region, index: int, spec: PageSpec) -> memoryview:
    return region.view[index * spec.page_nbytes : (index + 1) * spec.page_nbytes]
