"""A page store inside one process: a fake that keeps the contract, for tests of nodes.

Owns copies of the pages it was given, shared by reference between all nodes that hold the object.
Keeps the whole ``PageStore`` contract, waits and joins included, and can be told to misbehave
(``MemoryFaults``). Knows no network.

    absent ──put──▶ writing ──copied──▶ ready ──(capacity: oldest first)──▶ absent
              ▲        │ cancelled, refused, failed
              └────────┘
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.asking import check_keys, check_pages
from kvstore.checksum import checksum_of
from kvstore.page import PageKey, PageSpec
from kvstore.store import (
    DEFAULT_POLICY,
    GetOutcome,
    GetPage,
    GetResult,
    PageRecord,
    PageState,
    PutOutcome,
    PutPage,
    PutPolicy,
    PutResult,
    TransferCount,
)
from kvstore.verify import same_identity, verify
from transfer.interface import Region


@dataclass
class MemoryFaults:
    """What goes wrong from now on; change the fields at any time.

    Page numbers are depths: the index of the page in its sequence.

    Attributes:
        absent_depths: pages that ``match`` and ``get`` do not find.
        fail_depths: pages whose read fails (``GetOutcome.FAILED``).
        corrupt_depths: pages of which ``get`` delivers one flipped byte (detected: CORRUPT).
        refuse_puts: no space (``PutOutcome.REFUSED``).
        fail_puts: the write breaks (``PutOutcome.FAILED``).
        unreachable: the whole store cannot be reached.
        match_delay_s, put_delay_s, get_delay_s: added to every call.
        page_delay_s: added to every page that a get delivers.
    """

    absent_depths: set[int] = field(default_factory=set)
    fail_depths: set[int] = field(default_factory=set)
    corrupt_depths: set[int] = field(default_factory=set)
    refuse_puts: bool = False
    fail_puts: bool = False
    unreachable: bool = False
    match_delay_s: float = 0.0
    put_delay_s: float = 0.0
    get_delay_s: float = 0.0
    page_delay_s: float = 0.0


class StoredPage(NamedTuple):
    """One committed page."""

    record: PageRecord
    data: bytearray


class MemoryStore:
    """``PageStore`` in process memory.

    Args:
        spec: geometry of all pages.
        num_pages_max: capacity; the oldest pages leave first. None: without limit.

    Attributes:
        faults: see ``MemoryFaults``.
        pages: the committed pages, oldest first; tests may look and tamper.
        put_counts: how often each key was really written.
        num_corrupt: pages that did not verify on a get.
    """

    def __init__(self, spec: PageSpec, *, num_pages_max: int | None = None) -> None:
        self.spec = spec
        self.faults = MemoryFaults()
        self.pages: dict[PageKey, StoredPage] = {}
        self.put_counts: Counter[PageKey] = Counter()
        self.num_corrupt = 0
        self._num_pages_max = num_pages_max
        self._writing: dict[PageKey, None] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def match(self, keys: Sequence[PageKey], *, deadline_s: float) -> list[PageState]:
        check_keys(keys, deadline_s)
        if not await self._pause(self.faults.match_delay_s, deadline_s):
            return [PageState.ABSENT] * len(keys)
        return [self._state(key) for key in keys]

    def _state(self, key: PageKey) -> PageState:
        if self.faults.unreachable:
            return PageState.ABSENT
        page = self.pages.get(key)
        if page is not None and page.record.depth not in self.faults.absent_depths:
            return PageState.READY
        return PageState.WRITING if key in self._writing else PageState.ABSENT

    # ---- put

    async def put(
        self,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> PutResult:
        check_pages(pages, self.spec, source, deadline_s)
        outcomes: dict[int, PutOutcome] = {}
        written = 0
        todo = list(range(len(pages)))
        while todo:
            mine, joined = self._claim(pages, todo, outcomes)
            try:
                in_time = await self._pause(self.faults.put_delay_s, deadline_s)
                for i in mine:
                    outcomes[i] = self._write(pages[i], source) if in_time else PutOutcome.FAILED
                    written += outcomes[i] is PutOutcome.STORED
            finally:
                for i in mine:
                    self._writing.pop(pages[i].identity.key, None)
                self._wake()
            todo = joined
            if not await self._settled([pages[i].identity.key for i in joined], deadline_s):
                outcomes.update(dict.fromkeys(todo, PutOutcome.FAILED))
                break
        moved = TransferCount(written, written * self.spec.page_nbytes)
        return PutResult([outcomes[i] for i in range(len(pages))], moved)

    def _claim(
        self, pages: Sequence[PutPage], todo: Sequence[int], outcomes: dict[int, PutOutcome]
    ) -> tuple[list[int], list[int]]:
        """Split ``todo`` into pages to write now and pages that somebody is writing."""
        mine, joined = [], []
        for i in todo:
            identity = pages[i].identity
            present = self.pages.get(identity.key)
            if self.faults.unreachable or self.faults.fail_puts:
                outcomes[i] = PutOutcome.FAILED
            elif present is not None:
                same = same_identity(present.record, identity)
                outcomes[i] = PutOutcome.PRESENT if same else PutOutcome.REFUSED
            elif self.faults.refuse_puts:
                outcomes[i] = PutOutcome.REFUSED
            elif identity.key in self._writing:
                joined.append(i)
            else:
                self._writing[identity.key] = None
                mine.append(i)
        return mine, joined

    def _write(self, page: PutPage, source: Region) -> PutOutcome:
        if self.faults.fail_puts or self.faults.unreachable:
            return PutOutcome.FAILED
        identity, nbytes = page.identity, self.spec.page_nbytes
        data = bytearray(source.view[page.local_offset : page.local_offset + nbytes])
        record = PageRecord(
            key=identity.key,
            parent=identity.parent,
            depth=identity.depth,
            tokens=identity.tokens,
            checksum=checksum_of(self.spec, memoryview(data), identity.num_tokens),
            page_nbytes=nbytes,
        )
        if self._num_pages_max is not None and len(self.pages) >= self._num_pages_max:
            del self.pages[next(iter(self.pages))]
        self.pages[identity.key] = StoredPage(record, data)
        self.put_counts[identity.key] += 1
        return PutOutcome.STORED

    # ---- get

    async def get(
        self,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        wait: bool = False,
        on_page: Callable[[int, GetOutcome], None] | None = None,
    ) -> GetResult:
        check_pages(pages, self.spec, into, deadline_s)
        outcomes: dict[int, GetOutcome] = {}
        moved = 0

        def finish(i: int, outcome: GetOutcome) -> None:
            outcomes[i] = outcome
            if on_page is not None:
                on_page(i, outcome)

        todo = list(range(len(pages)))
        alive = await self._pause(self.faults.get_delay_s, deadline_s)
        while todo and alive:
            missing = []
            for i in todo:
                if self.faults.unreachable:
                    finish(i, GetOutcome.FAILED)
                elif self._state(pages[i].identity.key) is not PageState.READY:
                    missing.append(i)
                elif await self._pause(self.faults.page_delay_s, deadline_s):
                    outcome, copied = self._read(pages[i], into)
                    moved += copied
                    finish(i, outcome)
                else:
                    missing.append(i)
            todo = missing
            alive = wait and bool(todo) and await self._changed_or_ready(pages, todo, deadline_s)
        for i in todo:
            finish(i, GetOutcome.ABSENT)
        count = TransferCount(moved, moved * self.spec.page_nbytes)
        return GetResult([outcomes[i] for i in range(len(pages))], count)

    def _read(self, page: GetPage, into: Region) -> tuple[GetOutcome, bool]:
        """Copy and verify one page; also tells whether bytes moved."""
        stored = self.pages.get(page.identity.key)
        if stored is None:  # evicted while this get was delayed
            return GetOutcome.ABSENT, False
        if page.identity.depth in self.faults.fail_depths:
            return GetOutcome.FAILED, False
        target = into.view[page.local_offset : page.local_offset + self.spec.page_nbytes]
        target[:] = stored.data
        if page.identity.depth in self.faults.corrupt_depths:
            target[0] ^= 0xFF
        outcome = verify(stored.record, page.identity, self.spec, target)
        self.num_corrupt += outcome is GetOutcome.CORRUPT
        return outcome, True

    # ---- waiting

    async def _pause(self, delay_s: float, deadline_s: float) -> bool:
        """Sleep ``delay_s``, at most until the deadline; False when the deadline cut it short."""
        remaining = deadline_s - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, min(delay_s, remaining)))
        return delay_s < remaining

    async def _changed_or_ready(
        self, pages: Sequence[GetPage], todo: Sequence[int], deadline_s: float
    ) -> bool:
        """Wait for a change, unless a wanted page became ready while others were delivered."""
        if any(self._state(pages[i].identity.key) is PageState.READY for i in todo):
            return asyncio.get_running_loop().time() < deadline_s
        return await self._changed(deadline_s)

    async def _settled(self, keys: Sequence[PageKey], deadline_s: float) -> bool:
        """Wait while all of ``keys`` are being written by others; False at the deadline."""
        while keys and all(key in self._writing for key in keys):
            if not await self._changed(deadline_s):
                return False
        return True

    async def _changed(self, deadline_s: float) -> bool:
        """Return True at the next commit or failed write, False at the deadline."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(waiter, None)
        return True

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> int:
        """Forget all pages; returns how many there were."""
        count = len(self.pages)
        self.pages.clear()
        return count

    async def close(self) -> None:
        """Nothing to stop: the pages stay for the other holders of this object."""
