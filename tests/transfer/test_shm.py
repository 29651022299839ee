"""What only shm has to fear: what stays mapped, what stays in the kernel, and falling back."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket

import numpy as np
import pytest

from tests.transfer.bulk_harness import (
    checked_engines,
    kvferry_sockets,
    open_files,
    pattern,
    shared_memory_files,
    soon,
    whole,
)
from transfer import shm_peer
from transfer.errors import FrameInvalid, RegionRevoked
from transfer.region import RegionTable
from transfer.shm_memory import Allocation, slot_of
from transfer.shm_wire import SHM_PROTOCOL_VERSION, HelloPacket, receive_packet, send_packet


def memfds() -> list[str]:
    return [name for name in open_files() if "memfd:kvferry" in name]


async def test_nothing_is_left_in_the_kernel_after_close() -> None:
    gc.collect()
    files, shm = memfds(), shared_memory_files()
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(1 << 20), peer.allocate(1 << 20)
        await peer.read(region.export("r"), whole(1 << 20), into=local, deadline_s=soon())
        names = {f"kvferry/{engine.address}" for engine in (owner, peer)}
        assert names <= set(kvferry_sockets())
        del region, local, owner, peer
    del engines
    gc.collect()
    assert memfds() == files
    assert not names & set(kvferry_sockets())
    assert shared_memory_files() == shm


async def test_a_peer_unmaps_revoked_memory_when_it_next_maps() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        local = peer.allocate(4096)
        for _ in range(5):
            region = owner.allocate(4096)
            await peer.read(region.export("r"), whole(4096), into=local, deadline_s=soon())
            region.revoke()
        assert peer._shm is not None
        (connection,) = peer._shm._peers.values()
        assert len(connection._files) == 1


async def test_registered_memory_is_served_by_tcp_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region = owner.register(pattern(100_000))
        local = peer.allocate(100_000)
        for _ in range(2):
            await peer.read(region.export("r"), whole(100_000), into=local, deadline_s=soon())
        assert local.view == region.view
        assert owner.counters().bytes_served == 200_000
        assert peer.counters().fallbacks == 1
        assert caplog.text.count("reached by tcp, not shm") == 1
        shared = owner.allocate(64)
        await peer.read(shared.export("r"), whole(64), into=local, deadline_s=soon())
        assert owner.counters().bytes_served == 200_000, "shared memory still goes by shm"


async def test_an_owner_that_cannot_share_is_reached_by_tcp() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(transport="auto"), await engines.make()
        region, local = owner.allocate(64), peer.allocate(64)
        region.view[:] = pattern(64).data
        assert owner._shm is not None
        assert owner._io is not None
        owner._io.call(owner._shm._owner.release)  # as if the socket were in another namespace
        await peer.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        assert local.view == region.view
        assert peer.counters().fallbacks == 1


async def test_two_capabilities_of_one_region_share_one_mapping() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(4096), peer.allocate(4096)
        await peer.read(region.export("r"), whole(8), into=local, deadline_s=soon())
        await peer.write(region.export("w"), whole(8), source=local, deadline_s=soon())
        assert peer._shm is not None
        (connection,) = peer._shm._peers.values()
        assert (len(connection._files), len(connection._grants)) == (1, 2)


async def test_a_reused_slot_does_not_revive_an_old_token() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        local = peer.allocate(64)
        old = owner.allocate(64)
        token = old.export("rw")
        await peer.read(token, whole(64), into=local, deadline_s=soon())
        old.revoke()
        new = owner.allocate(64)
        assert slot_of(new.region_id) == slot_of(old.region_id)
        with pytest.raises(RegionRevoked):
            await peer.write(token, whole(64), source=local, deadline_s=soon())


async def test_regions_allocated_before_start_can_be_used() -> None:
    async with checked_engines("shm") as engines:
        owner = engines.unstarted()
        region = owner.allocate(64)
        await owner.start()
        peer = await engines.make()
        local = peer.allocate(64)
        await peer.read(region.export("r"), whole(64), into=local, deadline_s=soon())


def test_allocations_are_zeroed_page_aligned_and_closed_with_their_last_region() -> None:
    allocation = Allocation(10_000, shared=True)
    allocation.hold()
    allocation.hold()
    assert allocation.address % 4096 == 0
    assert not np.frombuffer(allocation.view, np.uint8).any()
    allocation.release()
    assert allocation.fd is not None
    allocation.release()
    assert allocation.fd is None
    assert not allocation.in_use
    assert allocation.offset_of(allocation.address + 9_999, 2) is None


async def test_an_allocation_of_nothing_is_refused() -> None:
    async with checked_engines("shm") as engines:
        engine = await engines.make()
        with pytest.raises(ValueError, match="0 bytes"):
            engine.allocate(0)
        local, empty = engine.allocate(8), engine.register(bytearray())
        with pytest.raises(FrameInvalid):
            await engine.read(empty.export("r"), whole(1), into=local, deadline_s=soon())


def test_a_place_outlives_the_region_that_is_revoked_meanwhile() -> None:
    table = RegionTable(lambda region, rights, capability: b"")
    region = table.allocate(4096, shared=True)
    place = table.shared_place(region)
    assert place is not None
    region.revoke()
    with open(os.devnull, "rb"):  # takes the number of the region's own descriptor
        assert os.fstat(place.fd).st_size == 4096
    os.close(place.fd)
    assert not region.in_shared_memory


async def test_descriptors_that_a_peer_sends_are_closed() -> None:
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(f"\0kvferry/{owner.address}")
            read_end, write_end = os.pipe()
            send_packet(peer, HelloPacket(SHM_PROTOCOL_VERSION, "peer"), write_end)
            _, fds = await asyncio.to_thread(receive_packet, peer)
            for fd in (*fds, write_end):
                os.close(fd)
            assert os.read(read_end, 1) == b"", "nobody holds the other end any more"
            os.close(read_end)


async def test_memory_that_cannot_be_mapped_is_reached_by_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(fd: int) -> None:
        raise OSError(errno.ENOMEM, "no memory for a mapping")

    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(64), peer.allocate(64)
        region.view[:] = pattern(64).data
        monkeypatch.setattr(shm_peer, "ControlView", exhausted)
        await peer.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        assert local.view == region.view
        assert peer.counters().fallbacks == 1
