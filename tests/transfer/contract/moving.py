"""What an operation does when nothing goes wrong: every size, layout and kind of buffer."""

from __future__ import annotations

import asyncio
import mmap
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.transfer.bulk_harness import MIB, pattern, soon, whole
from tests.transfer.contract.world import (
    Pair,
    Trait,
    World,
    filled,
    make_pair,
    needs,
    small_read_works,
)
from transfer.errors import FrameInvalid, RegionRevoked, TransferError, Unauthorized
from transfer.interface import Priority, Range, Region, Transfer

FIRST_OPERATION_LIMIT_S = 1.0


async def test_engine_and_region_keep_the_interfaces(world: World) -> None:
    engine = await world.make()
    assert isinstance(engine, Transfer)
    assert isinstance(engine.allocate(16), Region)


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 4097, 300_000, 5 * MIB + 3])
async def test_read_and_write_move_every_byte(world: World, nbytes: int) -> None:
    owner, user = await make_pair(world)
    remote, local = filled(owner, nbytes), user.allocate(nbytes)
    await user.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    assert local.view == remote.view
    local.view[:] = pattern(nbytes, 2).data
    await user.write(remote.export("w"), whole(nbytes), source=local, deadline_s=soon())
    assert remote.view == pattern(nbytes, 2).data


async def test_empty_operations_complete_at_once(world: World) -> None:
    owner, user = await make_pair(world)
    token, local = owner.allocate(64).export("rw"), user.allocate(64)
    await user.read(token, [], into=local, deadline_s=soon())
    await user.write(token, [Range(3, 4, 0)], source=local, deadline_s=soon())
    counted = user.counters()
    assert (counted.bytes_read, counted.bytes_written, counted.ranges_sent) == (0, 0, 0)


async def test_odd_offsets_and_sizes_move_exactly_their_bytes(world: World) -> None:
    owner, user = await make_pair(world)
    remote, local = filled(owner, 20_000, 1), filled(user, 20_000, 2)
    ranges = [Range(1, 3, 1), Range(4095, 8191, 4099), Range(9001, 17, 7), Range(19_999, 0, 1)]
    model, source = bytearray(local.view), bytes(remote.view)
    await user.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    for there, here, nbytes in ranges:
        model[here : here + nbytes] = source[there : there + nbytes]
    assert local.view == model
    local.view[:], model = pattern(20_000, 3).data, bytearray(source)
    await user.write(remote.export("w"), ranges, source=local, deadline_s=soon())
    for there, here, nbytes in ranges:
        model[there : there + nbytes] = local.view[here : here + nbytes]
    assert remote.view == model


async def test_many_small_ranges_land_where_they_belong(world: World) -> None:
    owner, user = await make_pair(world)
    num, size = 5000, 48
    remote, local = filled(owner, num * size), user.allocate(num * size)
    order = random.Random(5).sample(range(num), num)
    ranges = [Range(i * size, place * size, size) for place, i in enumerate(order)]
    await user.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    expected = np.frombuffer(remote.view, np.uint8).reshape(num, size)[order]
    assert (np.frombuffer(local.view, np.uint8).reshape(num, size) == expected).all()


async def test_few_huge_ranges_land_where_they_belong(world: World) -> None:
    size, gap = 9 * MIB, 4097
    owner, user = await make_pair(world)
    remote, local = filled(owner, 2 * size + gap), user.allocate(2 * size + gap)
    swapped = [Range(0, size + gap, size), Range(size + gap, 0, size)]
    await user.read(remote.export("r"), swapped, into=local, deadline_s=soon())
    assert local.view[size + gap :] == remote.view[:size]
    assert local.view[:size] == remote.view[size + gap :]
    assert local.view[size : size + gap] == bytes(gap)


async def test_adjacent_ranges_are_merged_and_counted(world: World) -> None:
    owner, user = await make_pair(world)
    remote, local = filled(owner, 1000), user.allocate(1000)
    ranges = [Range(i * 100, i * 100, 100) for i in reversed(range(10))]
    await user.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    counted = user.counters()
    assert (counted.ranges_asked, counted.ranges_sent) == (10, 1)
    assert local.view == remote.view


@pytest.mark.parametrize("num_runs", [1, 3, 64])
async def test_descriptors_grow_with_contiguous_runs_and_not_with_pages(
    world: World, num_runs: int
) -> None:
    """A run is contiguous on both sides. The pages are asked for in any order."""
    page, num_pages = 256, 192
    owner, user = await make_pair(world)
    remote, local = filled(owner, num_pages * page), user.allocate((num_pages + num_runs) * page)
    run_pages = num_pages // num_runs
    ranges = [Range(i * page, (i + i // run_pages) * page, page) for i in range(num_pages)]
    random.Random(num_runs).shuffle(ranges)
    await user.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    counted = user.counters()
    assert (counted.ranges_asked, counted.ranges_sent) == (num_pages, num_runs)
    for there, here, nbytes in ranges:
        assert local.view[here : here + nbytes] == remote.view[there : there + nbytes]


async def test_numpy_torch_mmap_and_bytearray_buffers_can_be_registered(world: World) -> None:
    owner, user = await make_pair(world)
    data = pattern(4096).tobytes()
    anonymous = mmap.mmap(-1, 4096)
    tensor = torch.zeros(32, 64, dtype=torch.bfloat16)
    array = bytearray(4096)
    source = user.register(data)
    for buffer in (np.zeros((32, 64), np.float16), tensor, anonymous, array):
        region = owner.register(buffer)
        assert region.nbytes == 4096
        await user.write(region.export("w"), whole(4096), source=source, deadline_s=soon())
        assert region.view == data
        back = user.register(bytearray(4096))
        await user.read(region.export("r"), whole(4096), into=back, deadline_s=soon())
        assert back.view == data
    assert tensor.view(torch.uint8).numpy().tobytes() == data
    assert anonymous[:] == data
    assert array == data


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sides", ["owner", "user", "both"])
@needs(Trait.DEVICE_MEMORY)
async def test_cuda_tensors_are_read_and_written_in_place(world: World, sides: str) -> None:
    nbytes = 5 * MIB + 3
    owner, user = await make_pair(world)
    there = torch.from_numpy(pattern(nbytes, 1).copy())
    here = torch.zeros(nbytes, dtype=torch.uint8)
    there = there.cuda() if sides != "user" else there
    here = here.cuda() if sides != "owner" else here
    remote, local = owner.register(there), user.register(here)
    await user.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    assert torch.equal(here.cpu(), there.cpu())
    here.fill_(9)
    ranges = [Range(1, 4097, 300_001), Range(2 * MIB + 1, 5, 7)]
    await user.write(remote.export("w"), ranges, source=local, deadline_s=soon())
    expected = pattern(nbytes, 1).copy()
    for offset, _, count in ranges:
        expected[offset : offset + count] = 9
    assert (there.cpu().numpy() == expected).all()


async def test_buffers_that_are_not_flat_memory_are_refused(world: World) -> None:
    engine = await world.make()
    with pytest.raises(ValueError, match="contiguous"):
        engine.register(np.zeros((8, 8))[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        engine.register(torch.zeros(8, 8).t())
    with pytest.raises(TypeError, match="not a buffer"):
        engine.register("text")
    with pytest.raises(TypeError, match="meta"):
        engine.register(torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="0 bytes"):
        engine.allocate(0)


async def test_a_read_only_buffer_is_never_written(world: World) -> None:
    owner, user = await make_pair(world)
    constant = user.register(b"x" * 64)
    token = filled(owner, 64).export("r")
    with pytest.raises(Unauthorized):
        await user.read(token, whole(64), into=constant, deadline_s=soon())
    with pytest.raises(Unauthorized):
        constant.export("w")


async def test_a_slice_of_allocated_memory_is_a_region_of_its_own(world: World) -> None:
    owner, user = await make_pair(world)
    segment, local = filled(owner, 1 * MIB), user.allocate(64)
    part = owner.register(segment.view[4096:8192])
    await user.read(part.export("r"), [Range(8, 0, 64)], into=local, deadline_s=soon())
    assert local.view == segment.view[4104:4168]
    with pytest.raises(FrameInvalid):
        await user.read(part.export("r"), [Range(4090, 0, 64)], into=local, deadline_s=soon())
    token = part.export("r")
    part.revoke()
    with pytest.raises(RegionRevoked):
        await user.read(token, whole(64), into=local, deadline_s=soon())
    await user.read(segment.export("r"), whole(64), into=local, deadline_s=soon())


async def test_an_engine_reads_and_writes_its_own_region(world: World) -> None:
    engine = await world.make()
    region, local = filled(engine, 1 * MIB), engine.allocate(1 * MIB)
    await engine.read(region.export("r"), whole(1 * MIB), into=local, deadline_s=soon())
    assert local.view == region.view
    local.view[:] = pattern(1 * MIB, 2).data
    await engine.write(region.export("w"), whole(1 * MIB), source=local, deadline_s=soon())
    assert region.view == local.view


async def test_an_operation_sees_what_the_one_before_it_did(world: World) -> None:
    """A write that has returned is visible to every later operation, also of another user."""
    nbytes = 300_000
    owner, user = await make_pair(world)
    other = await world.make()
    remote, local, seen = owner.allocate(nbytes), user.allocate(nbytes), other.allocate(nbytes)
    token = remote.export("rw")
    for seed in range(5):
        local.view[:] = pattern(nbytes, seed).data
        await user.write(token, whole(nbytes), source=local, deadline_s=soon())
        assert remote.view == local.view
        await other.read(token, whole(nbytes), into=seen, deadline_s=soon())
        assert seen.view == local.view


@pytest.mark.parametrize("priority", list(Priority))
async def test_either_priority_moves_every_byte(world: World, priority: Priority) -> None:
    owner, user = await make_pair(world)
    remote, local = filled(owner, 100_000), user.allocate(100_000)
    token, deadline_s = remote.export("rw"), soon()
    every = whole(100_000)
    await user.read(token, every, into=local, deadline_s=deadline_s, priority=priority)
    assert local.view == remote.view
    local.view[:] = pattern(100_000, 2).data
    await user.write(token, every, source=local, deadline_s=deadline_s, priority=priority)
    assert local.view == remote.view


async def test_counters_tell_operations_bytes_ranges_and_errors(world: World) -> None:
    owner, user = await make_pair(world)
    region, local = filled(owner, 1000), user.allocate(1000)
    token = region.export("rw")
    before: dict[str, Any] = user.counters()._asdict()
    await user.read(token, [Range(0, 0, 600), Range(800, 800, 9)], into=local, deadline_s=soon())
    await user.write(token, [Range(0, 0, 50)], source=local, deadline_s=soon())
    with pytest.raises(TransferError):
        await user.read(token, [Range(0, 0, 1001)], into=local, deadline_s=soon())
    counted = {k: v - before[k] for k, v in user.counters()._asdict().items()}
    assert (counted["bytes_read"], counted["bytes_written"]) == (609, 50)
    assert (counted["operations"], counted["errors"]) == (3, 1)
    assert (counted["ranges_asked"], counted["ranges_sent"]) == (4, 3)


async def test_the_first_operation_costs_no_more_than_a_second(world: World) -> None:
    """After start, and after a peer has joined. The best of three: the machine may be busy."""
    user, took_s = await world.make(), []
    for _ in range(3):
        pair = Pair(await world.make(), user)
        start_s = asyncio.get_running_loop().time()
        await small_read_works(pair)
        took_s.append(asyncio.get_running_loop().time() - start_s)
    assert min(took_s) < FIRST_OPERATION_LIMIT_S, took_s
    assert took_s[0] < 3 * FIRST_OPERATION_LIMIT_S, "connecting ran into a timeout"
