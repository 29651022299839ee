"""Staged operations without any transport: the wire is the test's, the device a fake one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.transfer.bulk_harness import engine_threads, pattern, soon, until
from tests.transfer.device_fakes import FakeDevice
from transfer.device_copier import DeviceCopiers
from transfer.device_memory import Run
from transfer.device_slots import SlotLimits
from transfer.device_stage import DeviceStages, Staged, pack
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost, RegionRevoked, TransferError
from transfer.interface import Priority, Range, deadline_after
from transfer.region import HostRegion, RegionTable

SLOT = 4096
SLOTS = 3
PER_PEER = 2
NUM_CHUNKS = 7
NBYTES = NUM_CHUNKS * SLOT
STAGES = ["slot", "wire", "fence", "copy"]


class World:
    """Stages over a fake device, and a far side whose wire can be held.

    Attributes:
        far: the other side's bytes.
        wire_is_open: cleared, no byte of the wire moves.
        on_wire: chunks that are under way on the wire.
    """

    def __init__(self) -> None:
        self.gpu = FakeDevice()
        self.table = RegionTable(lambda region, rights, capability: b"")
        self.copiers = DeviceCopiers()
        limits = SlotLimits(SLOT, SLOTS, PER_PEER, max_ranges=16)
        self.stages = DeviceStages(self.copiers, self.table, limits)
        self.memory = self.gpu.memory(bytes(NBYTES))
        self.region = self.table.register_device(self.memory)
        self.far = bytearray(pattern(NBYTES).tobytes())
        self.wire_is_open = asyncio.Event()
        self.wire_is_open.set()
        self.wire_error: TransferError | None = None
        self.on_wire = 0
        self.most_on_wire = 0

    def staged(self, *, into_device: bool, deadline_s: float, peer: str = "peer") -> Staged:
        return Staged(
            self.region,
            [Range(0, 0, NBYTES)],
            into_device,
            peer,
            Priority.NOW,
            deadline_s,
            lambda: RegionRevoked("the local region is revoked"),
        )

    async def read(self, deadline_s: float, peer: str = "peer") -> None:
        async def wire(slot: HostRegion, ranges: list[Range]) -> None:
            await self.travel()
            for far, near, nbytes in ranges:
                slot.view[near : near + nbytes] = self.far[far : far + nbytes]

        staged = self.staged(into_device=True, deadline_s=deadline_s, peer=peer)
        await self.stages.move(staged, wire)

    async def write(self, deadline_s: float) -> None:
        async def wire(slot: HostRegion, ranges: list[Range]) -> None:
            await self.travel()
            for far, near, nbytes in ranges:
                self.far[far : far + nbytes] = slot.view[near : near + nbytes]

        await self.stages.move(self.staged(into_device=False, deadline_s=deadline_s), wire)

    async def travel(self) -> None:
        self.on_wire += 1
        self.most_on_wire = max(self.most_on_wire, self.on_wire)
        try:
            await self.wire_is_open.wait()
        finally:
            self.on_wire -= 1
        if self.wire_error is not None:
            raise self.wire_error

    @property
    def num_free(self) -> int:
        return self.stages.slots(self.memory).ring.num_free


@pytest.fixture
async def world() -> AsyncIterator[World]:
    threads = engine_threads()
    made = World()
    yield made
    made.gpu.let_go()
    made.copiers.close()
    await until(lambda: engine_threads() == threads)
    assert made.num_free == SLOTS, "slots were not given back"
    assert (made.gpu.pending, made.gpu.torn) == ([], 0)


async def reach(world: World, stage: str) -> Callable[[], Awaitable[None]]:
    """Bring a read to ``stage`` and keep it there; return what lets it go on."""
    if stage == "slot":
        world.wire_is_open.clear()
        others = [asyncio.create_task(world.read(soon(), peer)) for peer in ("a", "b")]
        await until(lambda: world.num_free == 0)

        async def let_go() -> None:
            world.wire_is_open.set()
            await asyncio.gather(*others)

        return let_go
    if stage == "wire":
        world.wire_is_open.clear()
    elif stage == "fence":
        world.gpu.compute()
    else:
        world.gpu.hold()

    async def open_all() -> None:
        world.wire_is_open.set()
        world.gpu.let_go()

    return open_all


def is_there(world: World, stage: str) -> bool:
    """True when the read is at the stage that ``reach`` prepared."""
    ring = world.stages.slots(world.memory).ring
    if stage == "slot":
        return ring.num_waiting > 2  # PER_PEER lanes of ours, beside one of the others
    if stage == "wire":
        return world.on_wire == PER_PEER
    if stage == "fence":
        return world.on_wire == 0 and ring.num_free == SLOTS - PER_PEER
    return bool(world.gpu.pending) and world.on_wire == 0


@pytest.mark.parametrize("how", ["deadline", "cancel", "cancel twice"])
@pytest.mark.parametrize("stage", STAGES)
async def test_an_end_at_any_stage_leaves_nothing_behind(
    world: World, stage: str, how: str
) -> None:
    let_go = await reach(world, stage)
    deadline_s = deadline_after(0.05) if how == "deadline" else soon()
    task = asyncio.create_task(world.read(deadline_s))
    await until(lambda: is_there(world, stage) or task.done())
    if how == "deadline":
        await until(lambda: asyncio.get_running_loop().time() > deadline_s)
    else:
        for _ in how.split():
            task.cancel()
            await asyncio.sleep(0)
    if world.gpu.pending:
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done, "the operation ended while the device worked on its memory"
        world.gpu.release()
    with pytest.raises(DeadlineExceeded if how == "deadline" else asyncio.CancelledError):
        await task
    after = bytes(world.memory.data)
    assert world.gpu.pending == []
    if stage != "slot":  # there, the others' reads go on
        await let_go()
        assert bytes(world.memory.data) == after
    else:
        await let_go()


async def test_a_failed_wire_stops_the_other_lanes(world: World) -> None:
    world.wire_is_open.clear()
    task = asyncio.create_task(world.read(soon()))
    await until(lambda: world.on_wire == PER_PEER)
    world.wire_error = PeerLost("gone")
    world.wire_is_open.set()
    with pytest.raises(PeerLost, match="gone"):
        await task
    assert world.on_wire == 0
    assert world.gpu.num_copies == 0


async def test_a_failure_leaves_the_task_as_it_was(world: World) -> None:
    world.wire_error = PeerLost("gone")
    with pytest.raises(PeerLost):
        await world.read(soon())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("num_operations", [1, 20])
async def test_many_operations_share_few_slots(world: World, num_operations: int) -> None:
    await asyncio.gather(*(world.read(soon(), f"peer {i}") for i in range(num_operations)))
    assert world.memory.data == world.far
    assert world.most_on_wire <= SLOTS


async def test_a_stalled_peer_keeps_its_slots_and_no_other(world: World) -> None:
    world.wire_is_open.clear()
    stalled = [asyncio.create_task(world.read(soon(), "stalled")) for _ in range(5)]
    await until(lambda: world.on_wire == PER_PEER)
    assert world.num_free == SLOTS - PER_PEER
    moved: list[HostRegion] = []

    async def wire(slot: HostRegion, ranges: list[Range]) -> None:
        moved.append(slot)

    await world.stages.move(world.staged(into_device=True, deadline_s=soon(), peer="b"), wire)
    assert len(moved) == NUM_CHUNKS
    assert not any(task.done() for task in stalled)
    world.wire_is_open.set()
    await asyncio.gather(*stalled)


async def test_a_write_reads_the_device_behind_the_fence_and_no_sooner(world: World) -> None:
    compute = world.gpu.compute()
    task = asyncio.create_task(world.write(soon()))
    await until(lambda: world.num_free == SLOTS - PER_PEER)
    world.memory.data[:] = pattern(NBYTES, 2).data
    assert world.gpu.num_copies == 0
    compute.finish()
    await task
    assert world.far == pattern(NBYTES, 2).tobytes()


async def test_one_who_waits_for_compute_holds_up_no_one_elses_copies(world: World) -> None:
    compute = world.gpu.compute()
    waiting = asyncio.create_task(world.read(soon(), "waiting"))
    await until(lambda: world.num_free == SLOTS - PER_PEER)
    world.gpu.forget_compute()  # the next caller's stream is another
    await world.read(soon(), "quick")
    assert world.gpu.num_copies == NUM_CHUNKS
    assert not waiting.done()
    compute.finish()
    await waiting


async def test_copies_that_end_out_of_order_land_where_they_belong(world: World) -> None:
    world.gpu.hold()
    reading = asyncio.create_task(world.read(soon()))
    await until(lambda: world.gpu.pending)
    other = world.table.register_device(world.gpu.memory(bytes(SLOT)))
    pinned = world.gpu.pin(SLOT)
    copier = world.copiers.of(world.memory)
    leaving = asyncio.create_task(
        copier.copy_out(other, pinned, [Run(0, 0, SLOT)], lambda: RegionRevoked("revoked"))
    )
    await until(lambda: any(not copy.into_device for copy in world.gpu.pending))
    next(copy for copy in world.gpu.pending if not copy.into_device).perform()
    await leaving  # the other direction, asked for later, has ended first
    assert not reading.done()
    world.gpu.release()
    await reading
    assert world.memory.data == world.far


def test_packing_merges_each_side_for_itself() -> None:
    scattered_here = [Range(0, 100, 10), Range(10, 300, 10), Range(20, 310, 10)]
    wire, runs = pack(scattered_here)
    assert wire == [Range(0, 0, 30)]
    assert runs == [(100, 0, 10), (300, 10, 20)]
    scattered_there = [Range(0, 0, 10), Range(50, 10, 10)]
    wire, runs = pack(scattered_there)
    assert wire == [Range(0, 0, 10), Range(50, 10, 10)]
    assert runs == [(0, 0, 20)]


async def test_a_closed_copier_takes_no_more(world: World) -> None:
    await world.read(soon())
    world.copiers.close()
    with pytest.raises(PeerClosed):
        await world.read(soon())
