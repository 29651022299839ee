"""Readers of spilled pages wait for room before all who write, once for all pages of a call."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvstore.server import promoting as promoting_module
from kvstore.server import room as room_module
from kvstore.server.promoting import PROMOTIONS_MAX
from kvstore.server.room import Room, Want
from kvstore.server.spilling import Spilling
from kvstore.server.tiering import SPILLS_MAX
from kvstore.store import PageIdentity, PageState
from tests.kvstore.directories import single
from tests.kvstore.fake_tier import FakeTier
from tests.kvstore.faulty import until
from tests.kvstore.pages import SPEC
from tests.kvstore.test_room import reserved
from tests.kvstore.tiering_bench import Bench

NUM_SLOTS = 100
NUM_READ = PROMOTIONS_MAX + 10  # less than half of the memory


class Slots:
    """Slots that come free one by one, and who got them."""

    def __init__(self) -> None:
        self.num_free = 0
        self.served: list[str] = []
        self.room = Room(lambda: None, lambda: True, Counter())

    def want(self, name: str, *, reads: bool) -> Want:
        def attempt(patient: bool) -> bool:
            done = self.num_free > 0
            if done:
                self.num_free -= 1
                self.served.append(name)
            return done

        return Want(attempt, SPEC.page_nbytes, lambda: False, reads)

    def ask(self, name: str, *, reads: bool) -> asyncio.Future[None]:
        want = self.want(name, reads=reads)
        assert not self.room.now(want)
        return asyncio.ensure_future(self.room.wait(want, 60.0))

    async def free(self) -> None:
        num = len(self.served)
        self.num_free = 1
        self.room.copied()
        await until(lambda: len(self.served) > num)


async def test_a_reader_does_not_wait_behind_those_who_write(patience: None) -> None:
    slots = Slots()
    waiting = [slots.ask(name, reads=False) for name in ("writer 1", "writer 2")]
    await asyncio.sleep(0)
    waiting += [slots.ask(name, reads=True) for name in ("reader 1", "reader 2")]
    await asyncio.sleep(0)
    for _ in range(4):
        await slots.free()
    assert slots.served == ["reader 1", "reader 2", "writer 1", "writer 2"]
    await asyncio.gather(*waiting)


async def test_a_free_slot_is_a_readers_though_writers_wait(patience: None) -> None:
    slots = Slots()
    writer = slots.ask("writer", reads=False)
    await asyncio.sleep(0)
    slots.num_free = 1
    assert slots.room.now(slots.want("reader", reads=True))
    slots.num_free = 1
    assert not slots.room.now(slots.want("late writer", reads=False))
    await slots.free()
    assert slots.served == ["reader", "writer"]
    await writer


async def test_a_writer_goes_on_when_the_last_reader_before_it_has_given_up(
    patience: None,
) -> None:
    slots = Slots()
    reader = slots.ask("reader", reads=True)
    writer = slots.ask("writer", reads=False)
    await asyncio.sleep(0)
    slots.num_free = 1
    reader.cancel()
    await writer
    assert slots.served == ["writer"]


async def full_of_unwritten() -> tuple[Bench, list[PageIdentity]]:
    """Memory without a single page that has a copy, and hot ones that are only on the SSD; its disk
    stands still."""
    bench = Bench(NUM_SLOTS, FakeTier(), high=1.0, low=1.0, spill=0.5)
    pages = bench.put_all(range(NUM_SLOTS))
    for _ in range(5):
        bench.now_s += 0.01
        bench.d.match(b"".join(page.key for page in pages[:NUM_READ]), bench.now_s)
    await bench.tiering.copy_all()
    await bench.tiering.idle()
    bench.tier.gate.clear()
    bench.put_all(range(1000, 1000 + NUM_SLOTS))
    assert bench.d.num_spilled == NUM_SLOTS
    return bench, pages[:NUM_READ]


async def ended(bench: Bench, *tasks: asyncio.Future[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    bench.tier.gate.set()
    await bench.tiering.close()
    bench.d.check()


async def test_pages_that_wait_for_room_hold_up_no_load(patience: None) -> None:
    bench, pages = await full_of_unwritten()
    reading = asyncio.ensure_future(bench.promote(*pages))
    await until(lambda: bench.d.counters["room_waits"] == NUM_READ)
    await ended(bench, reading)


async def test_all_pages_of_a_call_share_one_wait(
    patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoting_module, "PROMOTION_WAIT_S", 0.0)
    bench, pages = await full_of_unwritten()
    reading = asyncio.ensure_future(bench.promote(*pages))
    await until(lambda: bench.tier.num_loads == PROMOTIONS_MAX)
    assert bench.d.counters["room_waits"] == 1
    bench.tier.gate.set()
    await reading
    assert all(bench.d.state(page.key) is PageState.READY for page in pages)
    assert bench.d.counters["room_waits"] == 1
    await ended(bench)


async def test_readers_and_writers_lose_nothing_at_a_disk_that_works(patience: None) -> None:
    bench, pages = await full_of_unwritten()
    writing = [asyncio.ensure_future(reserved(bench, single(5000 + n))) for n in range(10)]
    await until(lambda: bench.d.counters["room_waits"] == len(writing))
    reading = asyncio.ensure_future(bench.promote(*pages))
    await until(lambda: bench.d.counters["room_waits"] == len(writing) + NUM_READ)
    bench.tier.gate.set()
    await asyncio.gather(reading, *writing)
    assert all(bench.d.state(page.key) is PageState.READY for page in pages)
    assert bench.d.counters["evicted_unspilled"] == 0
    await ended(bench)


async def test_a_reader_who_is_granted_a_slot_and_never_loads_gives_it_back(
    patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node ends while a page, which had to wait for room, waits for its turn to be read."""
    bench, pages = await full_of_unwritten()
    begun: list[object] = []
    begin = Spilling.begin_promote

    def counted(self: Spilling, *args: object, patient: bool = False) -> object:
        begun.append(promotion := begin(self, *args, patient=patient))  # type: ignore[arg-type]
        return promotion

    monkeypatch.setattr(Spilling, "begin_promote", counted)
    load = bench.tier.load
    stuck = asyncio.Event()

    async def never(*args: object) -> object:
        await stuck.wait()
        return await load(*args)  # type: ignore[arg-type]

    bench.tier.load = never  # type: ignore[method-assign, assignment]
    reading = asyncio.ensure_future(bench.promote(*pages))
    await until(lambda: bench.d.counters["room_waits"] == NUM_READ)
    bench.tier.gate.set()
    await until(lambda: sum(one is not None for one in begun) == NUM_READ)
    bench.tiering.abort()
    await ended(bench, reading)
    assert all(bench.d.state(page.key) is PageState.SPILLED for page in pages)
    assert bench.tiering.numbers()["num_promoting"] == 0


# ---- commits


class Clock:
    """The loop's time, and a bit more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.later_s = 0.0
        monkeypatch.setattr(room_module, "now_s", self)

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.later_s


@pytest.mark.parametrize(("copying", "stalled"), [(False, False), (True, True)])
async def test_a_commit_begins_the_disks_time_only_where_it_had_nothing_to_copy(
    monkeypatch: pytest.MonkeyPatch, copying: bool, stalled: bool
) -> None:
    monkeypatch.setattr(room_module, "STILL_S", 1000.0)
    clock, tries = Clock(monkeypatch), list[bool]()

    def attempt(patient: bool) -> bool:
        tries.append(patient)
        return not patient

    room = Room(lambda: None, lambda: copying, Counter())
    want = Want(attempt, SPEC.page_nbytes, lambda: False)
    waiting = asyncio.ensure_future(room.wait(want, 1e6))
    await asyncio.sleep(0)
    clock.later_s = 900.0
    num_tries = len(tries)
    room.committed()
    await until(lambda: len(tries) > num_tries)
    assert tries[-1], "a commit wakes who waits, whatever the clock"
    clock.later_s = 1800.0
    num_tries = len(tries)
    room.look()
    await until(lambda: len(tries) > num_tries)
    for _ in range(3):
        await asyncio.sleep(0)
    assert waiting.done() == stalled
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_page_put_by_force_does_not_hide_that_the_disk_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "STILL_S", 0.05)
    bench = Bench(20, FakeTier(), high=1.0, low=1.0, spill=0.5)
    bench.tier.gate.clear()
    bench.put_all(range(20))
    for number in range(100, 100 + SPILLS_MAX):
        page = single(number)
        (granted,) = await reserved(bench, page, wait_s=0.02)
        assert granted.slot is not None
        assert bench.d.commit(page.key, granted.slot.generation, b"c" * 16)
        bench.tiering.room.committed()
    assert bench.d.counters["room_waits"] < SPILLS_MAX - 2
    bench.tier.gate.set()
    await bench.tiering.close()
