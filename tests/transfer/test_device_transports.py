"""What a device region promises on every transport; the device is a fake one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.transfer.bulk_harness import (
    Engines,
    checked_engines,
    pattern,
    soon,
    until,
    whole,
)
from tests.transfer.device_fakes import FakeDevice, FakeMemory
from transfer.engine import TransferEngine
from transfer.errors import (
    DeadlineExceeded,
    DeviceFailed,
    PeerClosed,
    RegionRevoked,
    Unauthorized,
)
from transfer.interface import Range, Region, deadline_after
from transfer.region import DeviceRegion

SLOT = 64 * 1024
PER_PEER = 2
SLOTS = 4
SETTINGS = {"bounce_nbytes": SLOT, "bounce_slots": SLOTS, "bounce_slots_per_peer": PER_PEER}
SIZES = [1, 7, 4096, 4097, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT + 3, 40 * SLOT]
PLACES = ["owner", "peer", "both"]


@pytest.fixture(params=["loopback", "shm", "tcp"])
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    async with checked_engines(request.param) as made:
        yield made


class Pair:
    """Two engines and a device; ``place`` says whose memory is on it."""

    def __init__(self, owner: TransferEngine, peer: TransferEngine, place: str) -> None:
        self.owner = owner
        self.peer = peer
        self.place = place
        self.gpu = FakeDevice()

    def region(self, engine: TransferEngine, data: bytes) -> Region:
        on_device = self.place == "both" or (self.place == "owner") == (engine is self.owner)
        return engine.register(self.gpu.memory(data) if on_device else bytearray(data))

    def remote(self, data: bytes) -> Region:
        return self.region(self.owner, data)

    def local(self, data: bytes) -> Region:
        return self.region(self.peer, data)


MakePair = Callable[[str], Awaitable[Pair]]


@pytest.fixture
async def make_pair(engines: Engines) -> AsyncIterator[MakePair]:
    """Make a pair whose device lets go of everything before the engines are closed."""
    made: list[Pair] = []

    async def make(place: str) -> Pair:
        made.append(Pair(await engines.make(**SETTINGS), await engines.make(**SETTINGS), place))
        return made[-1]

    yield make
    for pair in made:
        pair.gpu.let_go()


def content(region: Region) -> bytes:
    if not isinstance(region, DeviceRegion):
        return bytes(region.view)
    assert isinstance(region.memory, FakeMemory)
    return bytes(region.memory.data)


def some(nbytes: int, seed: int = 1) -> bytes:
    return pattern(nbytes, seed).tobytes()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nbytes", SIZES)
async def test_read_and_write_move_every_byte(make_pair: MakePair, place: str, nbytes: int) -> None:
    pair = await make_pair(place)
    remote, local = pair.remote(some(nbytes)), pair.local(bytes(nbytes))
    token = remote.export("rw")
    await pair.peer.read(token, whole(nbytes), into=local, deadline_s=soon())
    assert content(local) == some(nbytes)
    other = pair.local(some(nbytes, 2))
    await pair.peer.write(token, whole(nbytes), source=other, deadline_s=soon())
    assert content(remote) == some(nbytes, 2)
    assert (pair.gpu.pending, pair.gpu.torn) == ([], 0)


@pytest.mark.parametrize("place", PLACES)
async def test_scattered_ranges_land_where_they_belong(make_pair: MakePair, place: str) -> None:
    pair = await make_pair(place)
    num, size = 3000, 200
    order = random.Random(5).sample(range(num), num)
    ranges = [Range(i * size, at * size, size - at % 3) for at, i in enumerate(order)]
    remote, local = pair.remote(some(num * size)), pair.local(b"\x11" * num * size)
    expected, sent = bytearray(content(local)), bytearray(content(remote))
    for r in ranges:
        expected[r.local_offset : r.local_offset + r.nbytes] = sent[
            r.remote_offset : r.remote_offset + r.nbytes
        ]
    await pair.peer.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    assert content(local) == bytes(expected)


@pytest.mark.parametrize("place", PLACES)
async def test_a_write_sends_what_the_callers_stream_has_computed(
    make_pair: MakePair, place: str
) -> None:
    pair = await make_pair(place)
    nbytes = 3 * SLOT
    remote, local = pair.remote(bytes(nbytes)), pair.local(bytes(nbytes))
    compute = pair.gpu.compute()
    task = asyncio.create_task(
        pair.peer.write(remote.export("w"), whole(nbytes), source=local, deadline_s=soon())
    )
    await asyncio.sleep(0)
    device = next(r for r in (local, remote) if isinstance(r, DeviceRegion))
    assert isinstance(device.memory, FakeMemory)
    if device is local:
        device.memory.data[:] = some(nbytes)  # what the compute before the write leaves there
    compute.finish()
    await task
    assert content(remote) == content(local)


async def test_a_read_waits_for_compute_that_still_uses_its_destination(
    make_pair: MakePair,
) -> None:
    pair = await make_pair("peer")
    nbytes = 5 * SLOT
    remote, local = pair.remote(some(nbytes)), pair.local(bytes(nbytes))
    compute = pair.gpu.compute()
    task = asyncio.create_task(
        pair.peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    )
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    assert pair.gpu.num_copies == 0
    assert content(local) == bytes(nbytes)
    compute.finish()
    await task
    assert content(local) == some(nbytes)


async def test_a_read_returns_only_when_the_device_has_the_bytes(make_pair: MakePair) -> None:
    pair = await make_pair("peer")
    remote, local = pair.remote(some(SLOT)), pair.local(bytes(SLOT))
    pair.gpu.hold()
    task = asyncio.create_task(
        pair.peer.read(remote.export("r"), whole(SLOT), into=local, deadline_s=soon())
    )
    await until(lambda: pair.gpu.pending)
    assert not task.done()
    pair.gpu.release()
    await task
    assert content(local) == some(SLOT)


async def test_the_wire_moves_one_chunk_while_the_device_copies_another(
    make_pair: MakePair,
) -> None:
    pair = await make_pair("peer")
    remote, local = pair.remote(some(5 * SLOT)), pair.local(bytes(5 * SLOT))
    pair.gpu.hold()
    task = asyncio.create_task(
        pair.peer.read(remote.export("r"), whole(5 * SLOT), into=local, deadline_s=soon())
    )
    await until(lambda: pair.gpu.pending and pair.gpu.is_pinned(some(5 * SLOT)[SLOT : 2 * SLOT]))
    assert pair.gpu.num_copies == 0
    pair.gpu.release()
    await task
    assert content(local) == some(5 * SLOT)
    assert pair.gpu.torn == 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("place", PLACES)
async def test_an_operation_that_has_ended_leaves_nothing_to_the_device(
    make_pair: MakePair, place: str, how: str
) -> None:
    pair = await make_pair(place)
    nbytes = 20 * SLOT
    remote, local = pair.remote(some(nbytes)), pair.local(bytes(nbytes))
    pair.gpu.hold()
    deadline_s = deadline_after(0.2) if how == "deadline" else soon()
    task = asyncio.create_task(
        pair.peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=deadline_s)
    )
    await until(lambda: pair.gpu.pending or task.done())
    if how == "cancel":
        task.cancel()
    else:
        await until(lambda: asyncio.get_running_loop().time() > deadline_s)
    if place == "peer" and pair.gpu.pending:  # in our memory: the end has to wait for it
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
    pair.gpu.release()
    with pytest.raises(asyncio.CancelledError if how == "cancel" else DeadlineExceeded):
        await task
    before = content(local)
    await pair.peer.read(remote.export("r"), [Range(0, 0, 1)], into=local, deadline_s=soon())
    assert content(local)[1:] == before[1:]
    assert pair.gpu.torn == 0


async def test_revoke_waits_for_the_device_and_ends_the_operation(make_pair: MakePair) -> None:
    pair = await make_pair("peer")
    nbytes = 20 * SLOT
    remote, local = pair.remote(some(nbytes)), pair.local(bytes(nbytes))
    pair.gpu.hold()
    task = asyncio.create_task(
        pair.peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    )
    await until(lambda: pair.gpu.pending)
    revoking = asyncio.create_task(asyncio.to_thread(local.revoke))
    await until(lambda: isinstance(local, DeviceRegion) and local.revoked)
    assert not revoking.done()
    pair.gpu.release()
    await revoking
    after = content(local)
    with pytest.raises(RegionRevoked):
        await task
    assert content(local) == after
    assert pair.gpu.pending == []


@pytest.mark.parametrize("place", PLACES)
async def test_a_revoked_device_region_is_refused(make_pair: MakePair, place: str) -> None:
    pair = await make_pair(place)
    remote, local = pair.remote(some(64)), pair.local(bytes(64))
    token = remote.export("rw")
    (local if place == "peer" else remote).revoke()
    with pytest.raises(RegionRevoked):
        await pair.peer.read(token, whole(64), into=local, deadline_s=soon())
    assert pair.gpu.num_copies == 0
    assert content(local) == bytes(64)


@pytest.mark.parametrize("failing", ["start", "event"])
async def test_a_copy_that_fails_ends_its_operation_and_no_other(
    make_pair: MakePair, failing: str
) -> None:
    pair = await make_pair("peer")
    nbytes = 9 * SLOT
    remote, local = pair.remote(some(nbytes)), pair.local(bytes(nbytes))
    pair.gpu.failing = failing
    with pytest.raises(DeviceFailed):
        await pair.peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    pair.gpu.failing = ""
    await pair.peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    assert content(local) == some(nbytes)


async def test_no_pinned_memory_is_an_error_with_its_remedy(make_pair: MakePair) -> None:
    pair = await make_pair("peer")
    remote, local = pair.remote(some(64)), pair.local(bytes(64))
    pair.gpu.no_memory = True
    with pytest.raises(DeviceFailed, match="locked memory"):
        await pair.peer.read(remote.export("r"), whole(64), into=local, deadline_s=soon())
    pair.gpu.no_memory = False
    await pair.peer.read(remote.export("r"), whole(64), into=local, deadline_s=soon())
    assert content(local) == some(64)


async def test_closing_the_engine_leaves_nothing_to_the_device(make_pair: MakePair) -> None:
    pair = await make_pair("peer")
    nbytes = 20 * SLOT
    remote, local = pair.remote(some(nbytes)), pair.local(bytes(nbytes))
    compute = pair.gpu.compute()
    task = asyncio.create_task(
        pair.peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    )
    await asyncio.wait([task], timeout=0.05)
    await pair.peer.close()  # does not wait for compute
    with pytest.raises(PeerClosed):
        await task
    compute.finish()
    assert (pair.gpu.pending, pair.gpu.num_copies) == ([], 0)


async def test_a_device_region_has_no_view_and_says_why(make_pair: MakePair) -> None:
    pair = await make_pair("both")
    region = pair.remote(bytes(64))
    with pytest.raises(TypeError, match=r"fake:0.*read the region into host memory"):
        region.view  # noqa: B018
    with pytest.raises(Unauthorized):
        await pair.peer.write(
            region.export("r"), whole(64), source=pair.local(bytes(64)), deadline_s=soon()
        )


@pytest.mark.parametrize("place", PLACES)
async def test_32_tasks_move_random_ranges_and_every_byte_is_right(
    make_pair: MakePair, place: str
) -> None:
    pair = await make_pair(place)
    share, num_tasks = 3 * SLOT, 32
    remote = pair.remote(bytes(share * num_tasks))
    token = remote.export("rw")

    async def work(number: int) -> None:
        rng, base = random.Random(number), number * share
        model = bytearray(share)
        local = pair.local(bytes(share))
        for round_ in range(6):
            data = some(share, 100 * number + round_)
            cuts = sorted(rng.sample(range(share + 1), 8))
            spans = list(zip(cuts[::2], cuts[1::2], strict=True))
            ranges = [Range(base + a, a, b - a) for a, b in spans]
            source = pair.local(data)
            await pair.peer.write(token, ranges, source=source, deadline_s=soon())
            source.revoke()
            for a, b in spans:
                model[a:b] = data[a:b]
            everything = [Range(base, 0, share)]
            await pair.peer.read(token, everything, into=local, deadline_s=soon())
            assert content(local) == bytes(model)
        assert content(remote)[base : base + share] == bytes(model)

    async with asyncio.TaskGroup() as group:
        for number in range(num_tasks):
            group.create_task(work(number))
    assert (pair.gpu.pending, pair.gpu.torn) == ([], 0)
