"""What every bulk transport promises; one suite for all of them."""

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.transfer.bulk_harness import (
    MIB,
    Engines,
    checked_engines,
    ones,
    pattern,
    snapshot,
    soon,
    until,
    whole,
)
from transfer.engine import TransferEngine
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerClosed,
    PeerLost,
    PeerUnreachable,
    RegionRevoked,
    Stale,
    TransferError,
    Unauthorized,
)
from transfer.interface import Range, Region, Transfer, deadline_after
from transfer.region import HostRegion
from transfer.token import decode_token, encode_token

GONE = (PeerClosed, PeerLost, PeerUnreachable)


@pytest.fixture(params=["loopback", "shm", "tcp"])
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    async with checked_engines(request.param) as made:
        yield made


async def make_pair(engines: Engines) -> tuple[TransferEngine, TransferEngine]:
    return await engines.make(), await engines.make()


def filled(engine: TransferEngine, nbytes: int, seed: int = 1) -> HostRegion:
    region = engine.allocate(nbytes)
    region.view[:] = pattern(nbytes, seed).data
    return region


async def test_engine_and_region_keep_the_interfaces(engines: Engines) -> None:
    engine = await engines.make()
    assert isinstance(engine, Transfer)
    assert isinstance(engine.allocate(16), Region)


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 4097, 300_000, 5 * MIB + 3])
async def test_read_and_write_move_every_byte(engines: Engines, nbytes: int) -> None:
    owner, peer = await make_pair(engines)
    remote, local = filled(owner, nbytes), peer.allocate(nbytes)
    await peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    assert local.view == remote.view
    local.view[:] = pattern(nbytes, 2).data
    await peer.write(remote.export("w"), whole(nbytes), source=local, deadline_s=soon())
    assert remote.view == pattern(nbytes, 2).data


async def test_64_mib_move_in_both_directions_at_once(engines: Engines) -> None:
    nbytes = 64 * MIB
    one, two = await make_pair(engines)
    a, b = filled(one, nbytes, 1), filled(two, nbytes, 2)
    into_one, into_two = one.allocate(nbytes), two.allocate(nbytes)
    async with asyncio.TaskGroup() as group:
        group.create_task(one.read(b.export("r"), whole(nbytes), into=into_one, deadline_s=soon()))
        group.create_task(two.read(a.export("r"), whole(nbytes), into=into_two, deadline_s=soon()))
    assert into_one.view == b.view
    assert into_two.view == a.view


async def test_empty_operations_complete_at_once(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    token, local = owner.allocate(64).export("rw"), peer.allocate(64)
    await peer.read(token, [], into=local, deadline_s=soon())
    await peer.write(token, [Range(3, 4, 0)], source=local, deadline_s=soon())
    assert peer.counters().bytes_read == 0


async def test_many_small_ranges_land_where_they_belong(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    num, size = 5000, 48
    remote, local = filled(owner, num * size), peer.allocate(num * size)
    order = random.Random(5).sample(range(num), num)
    ranges = [Range(i * size, place * size, size) for place, i in enumerate(order)]
    await peer.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    expected = np.frombuffer(remote.view, np.uint8).reshape(num, size)[order]
    assert (np.frombuffer(local.view, np.uint8).reshape(num, size) == expected).all()


async def test_adjacent_ranges_are_merged_and_counted(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    remote, local = filled(owner, 1000), peer.allocate(1000)
    ranges = [Range(i * 100, i * 100, 100) for i in reversed(range(10))]
    await peer.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    counted = peer.counters()
    assert (counted.ranges_asked, counted.ranges_sent) == (10, 1)
    assert local.view == remote.view


async def test_numpy_torch_mmap_and_bytearray_buffers_can_be_registered(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    data = pattern(4096).tobytes()
    anonymous = mmap.mmap(-1, 4096)
    tensor = torch.zeros(32, 64, dtype=torch.bfloat16)
    array = bytearray(4096)
    buffers = [np.zeros((32, 64), np.float16), tensor, anonymous, array]
    source = peer.register(data)
    for buffer in buffers:
        region = owner.register(buffer)
        assert region.nbytes == 4096
        await peer.write(region.export("w"), whole(4096), source=source, deadline_s=soon())
        assert region.view == data
    assert tensor.view(torch.uint8).numpy().tobytes() == data
    assert anonymous[:] == data
    assert array == data


async def test_buffers_that_are_not_flat_host_memory_are_refused(engines: Engines) -> None:
    engine = await engines.make()
    with pytest.raises(ValueError, match="contiguous"):
        engine.register(np.zeros((8, 8))[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        engine.register(torch.zeros(8, 8).t())
    with pytest.raises(TypeError, match="not a buffer"):
        engine.register("text")
    with pytest.raises(TypeError, match="meta"):
        engine.register(torch.zeros(4, device="meta"))


async def test_a_read_only_buffer_is_never_written(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    constant = peer.register(b"x" * 64)
    token = filled(owner, 64).export("r")
    with pytest.raises(Unauthorized):
        await peer.read(token, whole(64), into=constant, deadline_s=soon())
    with pytest.raises(Unauthorized):
        constant.export("w")


async def test_a_slice_of_allocated_memory_is_a_region_of_its_own(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    segment, local = filled(owner, 1 * MIB), peer.allocate(64)
    part = owner.register(segment.view[4096:8192])
    await peer.read(part.export("r"), [Range(8, 0, 64)], into=local, deadline_s=soon())
    assert local.view == segment.view[4104:4168]
    with pytest.raises(FrameInvalid):
        await peer.read(part.export("r"), [Range(4090, 0, 64)], into=local, deadline_s=soon())
    token = part.export("r")
    part.revoke()
    with pytest.raises(RegionRevoked):
        await peer.read(token, whole(64), into=local, deadline_s=soon())
    await peer.read(segment.export("r"), whole(64), into=local, deadline_s=soon())


async def test_ranges_outside_negative_or_overlapping_are_refused(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    token, local = filled(owner, 100).export("rw"), peer.allocate(100)
    wrong = [
        [Range(50, 0, 51)],
        [Range(0, 50, 51)],
        [Range(-1, 0, 1)],
        [Range(0, -1, 1)],
        [Range(0, 0, -1)],
        [Range(0, 0, 10), Range(20, 9, 10)],
    ]
    for ranges in wrong:
        with pytest.raises(FrameInvalid):
            await peer.read(token, ranges, into=local, deadline_s=soon())
    with pytest.raises(FrameInvalid):
        await peer.write(
            token, [Range(0, 0, 10), Range(9, 20, 10)], source=local, deadline_s=soon()
        )
    assert local.view == bytes(100)


async def test_the_owner_checks_bounds_that_a_forged_token_denies(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    token = decode_token(filled(owner, 100).export("rw"))
    forged = encode_token(replace(token, nbytes=1000))
    local = peer.allocate(1000)
    for ranges in ([Range(0, 0, 101)], [Range(999, 0, 1)]):
        with pytest.raises(FrameInvalid):
            await peer.read(forged, ranges, into=local, deadline_s=soon())
        with pytest.raises(FrameInvalid):
            await peer.write(forged, ranges, source=local, deadline_s=soon())


@pytest.mark.parametrize("change", ["capability", "region_id", "rights"])
async def test_a_forged_token_is_refused_and_touches_nothing(engines: Engines, change: str) -> None:
    owner, peer = await make_pair(engines)
    region = filled(owner, 64)
    token = decode_token(region.export("r"))
    values = {"capability": bytes(16), "region_id": 1 << 40, "rights": "rw"}
    forged = encode_token(replace(token, **{change: values[change]}))
    local = peer.allocate(64)
    with pytest.raises(Unauthorized):
        await peer.write(forged, whole(64), source=local, deadline_s=soon())
    if change != "rights":
        with pytest.raises(Unauthorized):
            await peer.read(forged, whole(64), into=local, deadline_s=soon())
    assert region.view == pattern(64).data


async def test_rights_are_kept_apart(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    region, local = filled(owner, 64), peer.allocate(64)
    with pytest.raises(Unauthorized):
        await peer.write(region.export("r"), whole(64), source=local, deadline_s=soon())
    with pytest.raises(Unauthorized):
        await peer.read(region.export("w"), whole(64), into=local, deadline_s=soon())


async def test_bytes_that_are_no_token_are_refused(engines: Engines) -> None:
    peer = await engines.make()
    local = peer.allocate(8)
    for data in (b"", b"\x00", b"x" * 5000, peer.allocate(8).export("r")[:-3]):
        with pytest.raises(FrameInvalid):
            await peer.read(data, whole(8), into=local, deadline_s=soon())


async def test_a_revoked_region_is_refused_and_revoking_twice_is_fine(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    region, local = filled(owner, 64), peer.allocate(64)
    token = region.export("rw")
    await peer.read(token, whole(64), into=local, deadline_s=soon())
    region.revoke()
    region.revoke()
    later = owner.allocate(64)  # takes the slot of the old one
    later.export("rw")
    for _ in range(2):
        with pytest.raises(RegionRevoked):
            await peer.read(token, whole(64), into=local, deadline_s=soon())
        with pytest.raises(RegionRevoked):
            await peer.write(token, whole(64), source=local, deadline_s=soon())
    assert later.view == bytes(64)
    with pytest.raises(RegionRevoked):
        region.export("r")


async def test_a_local_region_that_is_revoked_or_foreign_is_refused(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    token, local = filled(owner, 64).export("r"), peer.allocate(64)
    local.revoke()
    with pytest.raises(RegionRevoked):
        await peer.read(token, whole(64), into=local, deadline_s=soon())
    with pytest.raises(FrameInvalid):
        await peer.read(token, whole(64), into=owner.allocate(64), deadline_s=soon())


async def test_revoking_during_a_write_leaves_the_memory_quiet(engines: Engines) -> None:
    nbytes = 32 * MIB
    owner, peer = await make_pair(engines)
    region, local = owner.allocate(nbytes), filled(peer, nbytes)
    task = asyncio.create_task(
        peer.write(region.export("w"), whole(nbytes), source=local, deadline_s=soon())
    )
    await until(lambda: region.view[1 * MIB])
    region.revoke()
    if engines.transport != "shm":  # an shm peer may finish the piece that it is copying
        before = bytes(region.view)
        assert region.view[nbytes - 64 :] == bytes(64)
    with pytest.raises(RegionRevoked):
        await task
    if engines.transport != "shm":
        assert region.view == before
    settled = bytes(region.view)
    assert settled[-64:] == bytes(64)


async def test_a_deadline_that_has_passed_moves_nothing(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    region, local = filled(owner, 64), peer.allocate(64)
    with pytest.raises(DeadlineExceeded):
        await peer.read(region.export("r"), whole(64), into=local, deadline_s=deadline_after(-1.0))
    assert local.view == bytes(64)


async def test_a_deadline_during_a_read_leaves_the_destination_quiet(engines: Engines) -> None:
    nbytes = 96 * MIB
    owner, peer = await make_pair(engines)
    remote, local = owner.allocate(nbytes), peer.allocate(nbytes)
    ones(remote)
    await peer.read(remote.export("r"), whole(64), into=local, deadline_s=soon())  # connects
    with pytest.raises(DeadlineExceeded):
        await peer.read(
            remote.export("r"), whole(nbytes), into=local, deadline_s=deadline_after(0.004)
        )
    before = snapshot(local)
    assert before[-1] == 0
    await drain(peer, remote)
    assert (np.frombuffer(local.view, np.uint8) == before).all()


async def drain(peer: TransferEngine, remote: HostRegion) -> None:
    """Move bytes behind everything that is still on its way."""
    other = peer.allocate(4 * MIB)
    await peer.read(remote.export("r"), whole(4 * MIB), into=other, deadline_s=soon())


async def test_cancelling_a_read_in_the_middle_leaves_the_destination_quiet(
    engines: Engines,
) -> None:
    nbytes = 32 * MIB
    owner, peer = await make_pair(engines)
    remote, local = owner.allocate(nbytes), peer.allocate(nbytes)
    ones(remote)
    task = asyncio.create_task(
        peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    )
    await until(lambda: local.view[0])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = snapshot(local)
    assert before[-1] == 0
    await drain(peer, remote)
    assert (np.frombuffer(local.view, np.uint8) == before).all()
    await peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    assert local.view == remote.view


async def test_cancelling_a_write_in_the_middle_lets_the_source_be_reused(
    engines: Engines,
) -> None:
    nbytes = 32 * MIB
    owner, peer = await make_pair(engines)
    remote, local = owner.allocate(nbytes), filled(peer, nbytes)
    task = asyncio.create_task(
        peer.write(remote.export("w"), whole(nbytes), source=local, deadline_s=soon())
    )
    await until(lambda: np.frombuffer(remote.view, np.uint8, 64).any())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    original = bytes(local.view)
    local.view[:] = b"\xee" * nbytes
    await peer.write(remote.export("w"), whole(16), source=local, deadline_s=soon())
    got = np.frombuffer(remote.view, np.uint8)[16:]
    wrong = (got != np.frombuffer(original, np.uint8)[16:]) & (got != 0)
    assert not wrong.any(), "bytes of the reused source reached the peer"


async def test_cancelling_before_the_first_step_and_after_the_end_is_harmless(
    engines: Engines,
) -> None:
    owner, peer = await make_pair(engines)
    region, local = filled(owner, 4 * MIB), peer.allocate(4 * MIB)
    task = asyncio.create_task(
        peer.read(region.export("r"), whole(4 * MIB), into=local, deadline_s=soon())
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert local.view == bytes(4 * MIB)
    task = asyncio.create_task(
        peer.read(region.export("r"), whole(4 * MIB), into=local, deadline_s=soon())
    )
    await task
    assert not task.cancel()
    assert local.view == region.view


async def test_cancelling_at_any_moment_never_touches_the_destination_later(
    engines: Engines,
) -> None:
    nbytes = 2 * MIB
    owner, peer = await make_pair(engines)
    remote = owner.allocate(nbytes)
    ones(remote)
    token, rng = remote.export("r"), random.Random(11)
    for _ in range(25):
        local = peer.allocate(nbytes)
        task = asyncio.create_task(peer.read(token, whole(nbytes), into=local, deadline_s=soon()))
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        before = bytes(local.view)
        if not task.cancelled():
            assert before == remote.view
        other = peer.allocate(300_000)
        await peer.read(token, whole(300_000), into=other, deadline_s=soon())
        assert local.view == before
        local.revoke()
        other.revoke()


async def test_one_engine_serves_and_uses_several(engines: Engines) -> None:
    hub, *others = [await engines.make() for _ in range(4)]
    nbytes = 3 * MIB
    regions = [filled(engine, nbytes, seed) for seed, engine in enumerate(others)]
    locals_ = [hub.allocate(nbytes) for _ in others]
    async with asyncio.TaskGroup() as group:
        for region, local in zip(regions, locals_, strict=True):
            group.create_task(
                hub.read(region.export("r"), whole(nbytes), into=local, deadline_s=soon())
            )
    for region, local in zip(regions, locals_, strict=True):
        assert region.view == local.view


async def test_an_engine_reads_its_own_region(engines: Engines) -> None:
    engine = await engines.make()
    region, local = filled(engine, 1 * MIB), engine.allocate(1 * MIB)
    await engine.read(region.export("r"), whole(1 * MIB), into=local, deadline_s=soon())
    assert local.view == region.view


async def test_32_tasks_with_random_ranges_keep_every_byte(engines: Engines) -> None:
    """Each task owns a slice of the remote region and a model of what must be in it."""
    share, num_tasks = 96 * 1024, 32
    owner, peer = await make_pair(engines)
    remote = owner.allocate(share * num_tasks)
    token = remote.export("rw")

    async def work(index: int) -> None:
        rng = random.Random(index)
        base, local, model = index * share, peer.allocate(share), bytearray(share)
        for step in range(12):
            cuts = sorted(rng.sample(range(share), 8))
            spans = list(zip(cuts[::2], cuts[1::2], strict=True))
            if rng.random() < 0.5:
                data = pattern(share, seed=index * 1000 + step)
                local.view[:] = data.data
                ranges = [Range(base + a, a, b - a) for a, b in spans]
                await peer.write(token, ranges, source=local, deadline_s=soon())
                for a, b in spans:
                    model[a:b] = data[a:b].tobytes()
            else:
                local.view[:] = b"\xaa" * share
                ranges = [Range(base + a, share - b, b - a) for a, b in spans]
                await peer.read(token, ranges, into=local, deadline_s=soon())
                for a, b in spans:
                    assert local.view[share - b : share - a] == model[a:b]
        assert remote.view[base : base + share] == model

    async with asyncio.TaskGroup() as group:
        for index in range(num_tasks):
            group.create_task(work(index))


async def test_a_closed_peer_is_gone(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    region, local = filled(owner, 64), peer.allocate(64)
    token = region.export("r")
    await peer.read(token, whole(64), into=local, deadline_s=soon())
    await owner.close()
    with pytest.raises(GONE):
        await peer.read(token, whole(64), into=local, deadline_s=soon())
    with pytest.raises(PeerClosed):
        owner.allocate(64)
    with pytest.raises(PeerClosed):
        await owner.read(token, whole(64), into=region, deadline_s=soon())


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("side", ["owner", "peer"])
async def test_closing_during_an_operation_ends_it(engines: Engines, how: str, side: str) -> None:
    nbytes = 32 * MIB
    owner, peer = await make_pair(engines)
    remote, local = owner.allocate(nbytes), peer.allocate(nbytes)
    ones(remote)
    task = asyncio.create_task(
        peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    )
    await until(lambda: local.view[0])
    chosen = owner if side == "owner" else peer
    if how == "close":
        await chosen.close()
    else:
        chosen.abort()
    with pytest.raises(PeerClosed if side == "peer" or how == "close" else PeerLost):
        await task
    before = snapshot(local)
    await chosen.close()
    chosen.abort()
    assert (np.frombuffer(local.view, np.uint8) == before).all()


async def test_a_restart_on_the_same_address_is_stale(engines: Engines) -> None:
    first = await engines.make()
    port = int(first.address.rpartition(":")[2]) if first.address else 1
    if not first.address:
        await first.close()
        first = await engines.make(port=port)
    peer = await engines.make()
    region, local = filled(first, 64), peer.allocate(64)
    token = region.export("rw")
    await peer.read(token, whole(64), into=local, deadline_s=soon())
    await first.close()
    second = await engines.make(port=port)
    region = second.allocate(64)
    fresh = region.export("rw")
    with pytest.raises(Stale):
        await peer.write(token, whole(64), source=local, deadline_s=soon())
    assert region.view == bytes(64)
    await peer.write(fresh, whole(64), source=local, deadline_s=soon())
    assert region.view == local.view


async def test_counters_tell_operations_bytes_and_errors(engines: Engines) -> None:
    owner, peer = await make_pair(engines)
    region, local = filled(owner, 1000), peer.allocate(1000)
    token = region.export("rw")
    await peer.read(token, [Range(0, 0, 600)], into=local, deadline_s=soon())
    await peer.write(token, [Range(0, 0, 50)], source=local, deadline_s=soon())
    with pytest.raises(TransferError):
        await peer.read(token, [Range(0, 0, 1001)], into=local, deadline_s=soon())
    counted = peer.counters()
    assert (counted.bytes_read, counted.bytes_written) == (600, 50)
    assert (counted.operations, counted.errors) == (3, 1)


async def test_close_and_abort_before_start_are_harmless(engines: Engines) -> None:
    engine = await engines.make()
    await engine.close()
    unstarted = TransferEngine()
    unstarted.abort()
    await unstarted.close()
    with pytest.raises(PeerClosed):
        unstarted.register(bytearray(8))
