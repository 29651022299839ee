"""Write-back: a ticket ends when the store has answered for every page of its sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from decode_node.page_holds import PageHolds
from decode_node.sequence import SeqStats
from decode_node.write_back import PUT_PAGES_MAX, WriteBack
from engine.fake import FakeRunner
from engine.page_allocator import PageAllocator
from engine.request import FinishReason
from kvstore.keys import namespace_of
from kvstore.page import PageId, PageKey
from kvstore.store import (
    DEFAULT_POLICY,
    PageIdentity,
    PutOutcome,
    PutPage,
    PutPolicy,
    PutResult,
    TransferCount,
)
from tests.decode_node.harness import GREEDY, LocalRegion, S, prompt_of, rig
from tests.kvstore.memory import MemoryStore
from transfer.interface import Region


class GatedStore(MemoryStore):
    """Answers the put of a page only when told; records the order of puts."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner.spec)
        self.gates: list[asyncio.Event] = []
        self.fails = False

    async def put(
        self,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> PutResult:
        gate = asyncio.Event()
        self.gates.append(gate)
        await gate.wait()
        if self.fails:
            return PutResult([PutOutcome.FAILED] * len(pages), TransferCount(0, 0))
        return await super().put(pages, source=source, deadline_s=deadline_s, policy=policy)


class Bench:
    """A write-back over a gated store."""

    def __init__(self, num_pages_max: int = 1000) -> None:
        runner = FakeRunner(num_pages=256, page_size=S)
        self.store = GatedStore(MemoryStore(runner.info.spec))
        self.allocator = PageAllocator(256)
        self.holds = PageHolds(self.allocator, lambda: None)
        self.write_back = WriteBack(
            store=self.store,
            region=LocalRegion(runner.pool.storage),
            spec=runner.info.spec,
            holds=self.holds,
            num_workers=4,
            num_pages_max=num_pages_max,
            timeout_s=60.0,
        )

    def pages(self, *names: int) -> list[tuple[PageIdentity, PageId]]:
        page_ids = self.allocator.allocate(len(names)) or []
        return [
            (
                PageIdentity(
                    key=PageKey(b"%032d" % n), parent=bytes(32), depth=0, tokens=b"\0" * 4 * S
                ),
                page_id,
            )
            for n, page_id in zip(names, page_ids, strict=True)
        ]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - a condition of the bench, not an event
                await asyncio.sleep(0)

    async def open(self, index: int) -> None:
        """Let put number ``index`` through, and wait until its pages are settled."""
        await self.until(lambda: len(self.store.gates) > index)
        before = self.write_back.num_pages
        self.store.gates[index].set()
        await self.until(lambda: self.write_back.num_pages < before)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_submission_that_joins_a_put_ends_with_it(fails: bool) -> None:
    bench = Bench()
    bench.store.fails = fails
    brought, joined = SeqStats(), SeqStats()
    pages = bench.pages(1, 2)
    first = bench.write_back.submit(pages, brought)
    second = bench.write_back.submit(pages, joined)
    assert not second.done.is_set()
    await bench.open(0)
    assert first.done.is_set()
    assert second.done.is_set()
    assert (brought.pages_pushed, joined.pages_pushed) == (0 if fails else 2, 0)
    assert bench.write_back.counters["joined"] == 2
    assert bench.holds.num_held == 0


async def test_a_ticket_waits_for_what_it_joined_and_for_what_it_brought() -> None:
    bench = Bench()
    shared = bench.pages(1)
    bench.write_back.submit(shared, SeqStats())
    await bench.until(lambda: len(bench.store.gates) == 1)
    ticket = bench.write_back.submit([*shared, *bench.pages(2)], SeqStats())
    await bench.open(1)
    assert not ticket.done.is_set()
    await bench.open(0)
    assert ticket.done.is_set()


@pytest.mark.parametrize("last_first", [False, True])
async def test_the_last_ticket_of_a_sequence_waits_for_its_earlier_pages(last_first: bool) -> None:
    bench = Bench()
    stats = SeqStats()
    bench.write_back.submit(bench.pages(1), stats)
    await bench.until(lambda: len(bench.store.gates) == 1)
    last = bench.write_back.submit(bench.pages(2), stats)
    for index in (1, 0) if last_first else (0, 1):
        assert not last.done.is_set()
        await bench.open(index)
    assert last.done.is_set()


async def test_a_submission_of_nothing_is_done_unless_pages_are_on_their_way() -> None:
    bench = Bench()
    stats = SeqStats()
    assert bench.write_back.submit([], stats).done.is_set()
    bench.write_back.submit(bench.pages(1), stats)
    assert bench.write_back.submit([], SeqStats()).done.is_set(), "equal stats are not the same"
    last = bench.write_back.submit([], stats)
    assert not last.done.is_set()
    await bench.open(0)
    assert last.done.is_set()
    assert bench.write_back.submit([], stats).done.is_set()


async def test_nobody_waits_for_dropped_pages() -> None:
    bench = Bench(num_pages_max=1)
    bench.write_back.submit(bench.pages(1), SeqStats())
    assert bench.write_back.submit(bench.pages(2), SeqStats()).done.is_set()
    await bench.open(0)


async def test_closing_ends_every_ticket_and_releases_every_page() -> None:
    bench = Bench()
    pages = bench.pages(*range(5 * PUT_PAGES_MAX // 2))
    tickets = [bench.write_back.submit(pages, SeqStats()) for _ in range(3)]
    await bench.until(lambda: bool(bench.store.gates))
    await bench.write_back.close()
    assert all(ticket.done.is_set() for ticket in tickets)
    assert bench.holds.num_held == bench.write_back.num_pages == 0


async def test_a_leg_that_is_handed_over_waits_for_all_its_puts() -> None:
    """The page it filled while it ran is still on its way when the last one is stored."""
    stores: list[GatedStore] = []

    def wrap(inner: MemoryStore) -> GatedStore:
        stores.append(GatedStore(inner))
        return stores[0]

    async with rig(wrap=wrap, final_write_back_s=20.0, drain_write_back_s=20.0) as r:
        sampling = msgspec.structs.replace(GREEDY, max_tokens=2 * S - 4)
        task = r.start(r.request(prompt_of(3), sampling=sampling), expect_prefill=False)
        await r.until(lambda: len(stores[0].gates) > 0)  # the first full page
        await r.until(lambda: r.counter("num_tokens") >= S - 1)  # KV of S + 1 tokens: a tail
        drained = asyncio.create_task(r.node.drain(0.0))
        await r.until(lambda: len(stores[0].gates) == 2)  # the tail
        stores[0].gates[1].set()
        await r.until(lambda: r.gauge("num_pages_in_transfer") == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        stores[0].gates[0].set()
        answer = await task
        assert answer.finished.pages_pushed == 2
        assert answer.finished.reason in (FinishReason.ABORT, FinishReason.LENGTH)
        await drained


async def test_pages_of_two_namespaces_never_share_a_put() -> None:
    class Recording(MemoryStore):
        def __init__(self, inner: MemoryStore) -> None:
            super().__init__(inner.spec)
            self.puts: list[tuple[bytes, int]] = []

        async def put(
            self,
            pages: Sequence[PutPage],
            *,
            source: Region,
            deadline_s: float,
            policy: PutPolicy = DEFAULT_POLICY,
        ) -> PutResult:
            self.puts.append((policy.namespace, len(pages)))
            return await super().put(pages, source=source, deadline_s=deadline_s, policy=policy)

    bench = Bench()
    store = bench.write_back._store = Recording(bench.store)
    ours, theirs = b"o" * 32, b"t" * 32
    bench.write_back.submit(bench.pages(1, 2), SeqStats(), PutPolicy(namespace=ours))
    bench.write_back.submit(bench.pages(3, 4, 5), SeqStats(), PutPolicy(namespace=theirs))
    bench.write_back.submit(bench.pages(6), SeqStats(), PutPolicy(namespace=ours))
    assert await bench.write_back.flush(20.0)
    assert store.puts == [(ours, 2), (theirs, 3), (ours, 1)]


async def test_a_sequence_is_stored_under_its_namespace() -> None:
    stored: list[bytes] = []

    class Recording(GatedStore):
        async def put(
            self,
            pages: Sequence[PutPage],
            *,
            source: Region,
            deadline_s: float,
            policy: PutPolicy = DEFAULT_POLICY,
        ) -> PutResult:
            stored.append(policy.namespace)
            return PutResult([PutOutcome.STORED] * len(pages), TransferCount(0, 0))

    async with rig(wrap=Recording) as r:
        request = msgspec.structs.replace(r.request(prompt_of(3 * S)), cache_salt="tenant")
        await r.answer(request)
        await r.until(lambda: bool(stored))
    info = FakeRunner(num_pages=4, page_size=S).info
    assert set(stored) == {namespace_of(info.fingerprint, r.store.spec, salt="tenant")}
