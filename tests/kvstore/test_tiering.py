"""Pages go to the tier below ahead of eviction, and come back when they are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from kvstore.page import PageKey
from kvstore.server.promoting import PROMOTIONS_MAX
from kvstore.server.tiering import SPILLS_MAX
from kvstore.store import PageState, PutPolicy
from tests.kvstore.directories import match, present, single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.faulty import until
from tests.kvstore.pages import bytes_of
from tests.kvstore.tiering_bench import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(20, FakeTier())
    yield made
    made.d.check()
    await made.tiering.close()
    await made.tiering.close()
    made.d.check()
    assert made.tier.closed


async def test_a_page_that_was_copied_ahead_is_evicted_without_waiting(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    assert present(bench.d, pages) == [True] * 19, "a copy alone evicts nothing"
    assert bench.tier.num_pages == 19
    assert bench.evict(9) == 9
    states = match(bench.d, pages, bench.now_s)
    assert states == [PageState.SPILLED] * 9 + [PageState.READY] * 10
    assert bench.d.num_spilled == 9


async def test_a_spilled_page_comes_back_with_its_bytes(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    await bench.promote(pages[0], pages[0], pages[18])
    assert bench.d.state(pages[0].key) is PageState.READY
    assert bench.bytes_in_memory(pages[0]) == bytes_of(pages[0]).tobytes()
    assert bench.tier.num_loads == 1
    assert bench.d.counters["promoted"] == 1


async def test_many_readers_of_one_spilled_page_share_one_load(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    bench.tier.gate.clear()
    readers = [asyncio.ensure_future(bench.promote(pages[0])) for _ in range(5)]
    await until(lambda: bench.tier.num_loads == 1)
    readers[0].cancel()
    bench.tier.gate.set()
    await asyncio.gather(*readers, return_exceptions=True)
    assert bench.tier.num_loads == 1
    assert present(bench.d, pages[:1]) == [True]


async def test_a_damaged_page_is_absent_afterwards_and_never_readable(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    bench.tier.damaged.add(pages[3].key)
    await bench.promote(pages[3])
    assert bench.d.state(pages[3].key) is PageState.ABSENT
    assert pages[3].key not in bench.tier.pages
    assert bench.d.counters["ssd_lost"] == 1


async def test_without_patience_room_is_made_however_slow_the_disk(bench: Bench) -> None:
    bench.tier.gate.clear()
    pages = bench.put_all(range(19))
    bench.tiering.kick()
    await asyncio.sleep(0)
    assert bench.tier.num_stores == SPILLS_MAX
    assert bench.evict(20) == 0, "there is room yet: pages wait for their copies"
    more = bench.put_all(range(100, 110))  # each is granted at once
    assert present(bench.d, more) == [True] * 10
    assert present(bench.d, pages[:SPILLS_MAX]) == [True] * SPILLS_MAX, "held on their way down"
    assert bench.d.counters["evicted"] == 9, "for want of room others go without a copy"
    assert bench.d.counters["evicted_unspilled"] == 9, "and that is told"
    assert bench.evict(20) == 0, "nobody wants room now: the others wait for their copies"
    bench.tier.gate.set()
    await bench.tiering.idle()


async def test_a_broken_disk_costs_copies_and_nothing_else(bench: Bench) -> None:
    bench.tier.broken = "the disk is full"
    pages = bench.put_all(range(19))
    await bench.spill()
    assert bench.tier.num_stores == 0
    assert bench.evict(20) == 9
    assert match(bench.d, pages)[:9] == [PageState.ABSENT] * 9


async def test_a_disk_that_breaks_while_a_page_is_on_it_leaves_it_for_later(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    bench.tier.broken = "gone"
    await bench.promote(pages[0])
    assert bench.d.state(pages[0].key) is PageState.SPILLED
    bench.tier.broken = None
    await bench.promote(pages[0])
    assert present(bench.d, pages[:1]) == [True]


async def test_a_page_that_a_degraded_tier_has_dropped_is_absent_and_can_be_put_again(
    bench: Bench,
) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    bench.tier.full = "no space left"
    bench.tier.damaged.add(pages[0].key)
    await bench.promote(pages[0], pages[1])
    assert match(bench.d, pages[:2]) == [PageState.ABSENT, PageState.READY]
    assert bench.d.counters["ssd_lost"] == 1
    bench.put(pages[0])
    assert present(bench.d, pages[:1]) == [True]


async def test_a_page_that_was_not_loaded_stays_while_the_tier_has_it(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    bench.tier.busy = True
    await bench.promote(pages[0])
    assert match(bench.d, pages[:1]) == [PageState.SPILLED]
    assert pages[0].key in bench.tier
    bench.tier.busy = False
    await bench.promote(pages[0])
    assert present(bench.d, pages[:1]) == [True]


@pytest.mark.parametrize("full", [None, "no space left"])
async def test_a_page_of_other_bytes_leaves_the_tier_and_is_absent(
    bench: Bench, full: str | None
) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    bench.tier.full = full
    page, data = bench.tier.pages[pages[0].key]
    other = msgspec.structs.replace(page.record, checksum=b"o" * 16)
    bench.tier.pages[pages[0].key] = (page._replace(record=other), data)
    await bench.promote(pages[0])
    assert match(bench.d, pages[:1]) == [PageState.ABSENT]
    assert pages[0].key not in bench.tier


async def test_a_full_tier_admits_only_pages_hotter_than_its_coldest() -> None:
    bench = Bench(20, FakeTier(num_pages_max=4), low=0.2, spill=0.2)
    cold = bench.put_all(range(4))
    await bench.spill()
    assert bench.tier.num_pages == 0, "below the watermark nothing is copied"
    bench.put_all(range(4, 14))
    await bench.spill()
    assert list(bench.tier.pages) == [single(i).key for i in range(6, 10)], "the hottest stay"
    assert bench.d.counters["ssd_displaced"] == 6
    assert bench.d.spilling.num_on_ssd == 4
    assert present(bench.d, cold) == [True] * 4
    bench.d.check()
    await bench.tiering.close()


async def test_forgotten_pages_leave_the_tier_too(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    assert bench.d.clear() == 19
    await bench.spill()
    assert bench.tier.num_pages == 0
    assert match(bench.d, pages) == [PageState.ABSENT] * 19


async def test_a_page_forgotten_on_its_way_down_is_not_kept(bench: Bench) -> None:
    bench.tier.gate.clear()
    bench.put_all(range(19))
    bench.tiering.kick()
    await asyncio.sleep(0)
    bench.d.clear()
    bench.tier.gate.set()
    await bench.spill()
    assert bench.tier.num_pages == 0
    assert bench.d.segment.num_used == 0


async def test_a_page_forgotten_on_its_way_up_frees_its_slot(bench: Bench) -> None:
    pages = bench.put_all(range(19))
    await bench.spill()
    bench.evict(9)
    bench.tier.gate.clear()
    reading = asyncio.ensure_future(bench.promote(pages[0]))
    await until(lambda: bench.tier.num_loads == 1)
    bench.d.clear()
    bench.d.check()
    bench.tier.gate.set()
    await reading
    assert bench.d.segment.num_used == 0


async def test_promotions_are_bounded() -> None:
    bench = Bench(200, FakeTier(), high=0.9, low=0.3)
    pages = bench.put_all(range(181))
    await bench.spill()
    assert bench.tier.num_pages == 181
    assert bench.evict(100) == 100
    bench.tier.gate.clear()
    reading = asyncio.ensure_future(bench.promote(*pages[:100]))
    await until(lambda: bench.tier.num_loads == PROMOTIONS_MAX)
    await asyncio.sleep(0)
    assert bench.tier.num_loads == PROMOTIONS_MAX
    bench.tier.gate.set()
    await reading
    assert present(bench.d, pages[:100]).count(True) > 50
    bench.d.check()
    await bench.tiering.close()


async def test_a_restart_finds_what_the_tier_kept() -> None:
    tier = FakeTier()
    old = Bench(20, tier)
    pages = old.put_all(range(17))
    old.put(single(50), PutPolicy(namespace=b"t" * 32, priority=70))
    await old.spill()
    await old.tiering.close()
    new = Bench(20, tier)
    assert await new.tiering.adopt() == 18
    kept = new.d.kept_as(single(50).key)
    assert kept is not None
    assert kept.policy == PutPolicy(namespace=b"t" * 32, priority=70)
    assert match(new.d, pages) == [PageState.SPILLED] * 17
    await new.promote(*pages[:9])
    await new.promote(*pages[9:])
    assert [new.bytes_in_memory(page) for page in pages] == [
        bytes_of(page).tobytes() for page in pages
    ]
    new.d.check()
    await new.tiering.close()


async def test_pages_of_an_earlier_life_are_colder_than_all_of_this_one() -> None:
    tier = FakeTier(num_pages_max=18)
    old = Bench(20, tier)
    old.now_s = 1e6  # of a clock that starts anew with the machine
    old.put_all(range(18))
    await old.spill()
    await old.tiering.close()
    new = Bench(20, tier)
    assert await new.tiering.adopt() == 18
    newer = new.put_all(range(100, 119))
    await new.spill()
    assert list(tier.pages) == [page.key for page in newer][1:]
    new.d.check()
    await new.tiering.close()


async def test_an_absent_page_is_not_looked_for_on_the_tier(bench: Bench) -> None:
    await bench.promote(single(1))
    await bench.tiering.promote([PageKey(b"short")], 1.0)
    assert bench.tier.num_loads == 0
