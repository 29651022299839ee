"""Pages are copied to the tier ahead of eviction, whole chains of them, so that none is lost."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.page import PageKey
from kvstore.server.tiering import REMOVALS_AT_ONCE
from kvstore.store import PageState, PutPolicy
from tests.kvstore.directories import match, present, single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.pages import SPEC, bytes_of, sequence
from tests.kvstore.tiering_bench import Bench


async def test_only_pages_above_the_watermark_are_copied_and_only_those_go() -> None:
    bench = Bench(20, FakeTier(), spill=0.75)
    pages = bench.put_all(range(19))
    await bench.spill()
    assert bench.tier.num_pages == 9, "the spill watermark is never above the low one"
    assert bench.evict(20) == 9
    assert all(bench.d.state(page.key).present for page in pages)
    bench.tier.broken = "the disk is full"
    more = bench.put_all(range(100, 109))
    await bench.spill()
    assert bench.evict(20) == 9, "without a disk the watermarks are kept as ever"
    assert present(bench.d, more) == [True] * 9
    await bench.tiering.close()


async def test_a_chain_is_copied_from_its_end_to_its_root_before_any_of_it_goes() -> None:
    bench = Bench(20, FakeTier())
    chain = sequence(range(32))
    for page in chain:
        bench.put(page)
    await bench.spill()
    assert list(bench.tier.pages) == [page.key for page in reversed(chain)]
    assert present(bench.d, chain) == [True] * 8
    bench.d.check()
    await bench.tiering.close()


async def test_a_trunk_is_copied_after_all_its_branches() -> None:
    bench = Bench(20, FakeTier(), spill=0.15, policy="lru")
    trunk, left = sequence([1, 1, 1, 1, 2, 2, 2, 2])
    right = sequence([1, 1, 1, 1, 3, 3, 3, 3])[1]
    for page in (trunk, left, right, single(50)):
        bench.put(page)
    for number in range(60, 62):
        await bench.spill()  # one more page lies above the watermark each time
        assert trunk.key not in bench.tier.pages
        bench.put(single(number))
    await bench.spill()
    assert list(bench.tier.pages) == [left.key, right.key, trunk.key]
    bench.d.check()
    await bench.tiering.close()


async def test_a_page_that_is_used_leaves_the_line_and_its_trunk_stays_with_it() -> None:
    bench = Bench(20, FakeTier(), high=0.55, low=0.4, policy="lru")
    chain = sequence(range(32))
    for page in chain:
        bench.put(page)
    others = bench.put_all(range(50, 54))
    await bench.spill()
    bench.now_s += 0.01
    match(bench.d, chain, bench.now_s)
    assert bench.evict(20) == 4
    assert present(bench.d, others) == [False] * 4, "the chain was used later"
    assert present(bench.d, chain) == [True] * 8
    bench.d.check()
    await bench.tiering.close()


async def test_a_page_of_low_priority_goes_before_those_in_line_when_room_is_needed() -> None:
    bench = Bench(10, FakeTier(), high=1.0, low=0.0)
    bench.put_all(range(9))
    await bench.spill()
    bench.put(single(99), PutPolicy(priority=0))
    bench.put(single(100))
    assert bench.d.state(single(99).key) is PageState.ABSENT
    await bench.tiering.close()


async def test_more_than_memory_holds_is_kept_when_the_disk_has_room_for_it() -> None:
    """Eight-page prompts, three times what memory holds, some of them used again."""
    bench = Bench(64, FakeTier(), high=0.95, low=0.9, spill=0.75, policy="lru")
    prompts = [sequence(range(start, start + 32)) for start in range(0, 24_000, 1000)]
    for number, prompt in enumerate(prompts):
        for page in prompt:
            bench.put(page)
        await bench.spill()
        bench.evict(256)
        if number % 3 == 0:
            await bench.promote(*prompts[number // 2])
    pages = [page for prompt in prompts for page in prompt]
    num_kept = sum(bench.d.state(page.key).present for page in pages)
    assert num_kept >= 0.95 * len(pages)
    for prompt in prompts:
        await bench.promote(*prompt)
        lease = bench.d.acquire([page.key for page in prompt], bench.now_s)
        assert lease is not None
        by_key = {page.key: page for page in prompt}
        for leased in bench.d.leased(lease):
            found = bench.memory[leased.offset : leased.offset + SPEC.page_nbytes]
            assert found == bytes_of(by_key[leased.record.key]).data
        bench.d.release(lease.lease_id)
        await bench.spill()
    bench.d.check()
    await bench.tiering.close()


async def test_what_the_tier_alone_has_is_as_warm_there_as_it_was_in_memory() -> None:
    bench = Bench(20, FakeTier(), low=0.0)
    pages = bench.put_all(range(19))
    await bench.spill()
    before = bench.tier.pages[pages[0].key][0].heat
    bench.now_s += 60.0
    match(bench.d, pages[:1], bench.now_s)
    assert bench.evict(18) == 18
    assert bench.tier.pages[pages[0].key][0].heat == before, "memory has it: nothing hangs on it"
    await bench.spill()
    assert bench.evict(1) == 1
    bench.tiering.kick()
    assert bench.tier.pages[pages[0].key][0].heat > before
    await bench.tiering.close()


async def test_many_forgotten_pages_leave_the_tier_in_small_steps() -> None:
    bench = Bench(2048, FakeTier(num_pages_max=2048), high=1.0)
    steps: list[int] = []
    remove = bench.tier.remove

    def counted(keys: Sequence[PageKey]) -> None:
        steps.append(len(keys))
        remove(keys)

    bench.tier.remove = counted  # type: ignore[method-assign]
    bench.put_all(range(2000))
    await bench.spill()
    assert bench.tier.num_pages == 2000
    bench.d.clear()
    await bench.spill()
    assert max(steps) == REMOVALS_AT_ONCE
    assert sum(steps) >= 2000
    assert bench.tier.num_pages == 0
    await bench.tiering.close()
