"""What only shm has to fear: what stays mapped, what stays in the kernel, and falling back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import mmap
import os
import socket
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.transfer.bulk_harness import (
    checked_engines,
    kvferry_sockets,
    open_files,
    pattern,
    shared_memory_files,
    soon,
    until,
    whole,
)
from transfer import shm_control, shm_mappings, shm_peer
from transfer.engine import TransferEngine
from transfer.errors import FrameInvalid, PeerUnreachable, RegionRevoked
from transfer.interface import Rights
from transfer.region import RegionTable
from transfer.shm_control import slot_of
from transfer.shm_memory import Allocation
from transfer.shm_peer import ShmPeer
from transfer.shm_wire import (
    SHM_PROTOCOL_VERSION,
    HelloPacket,
    MapPacket,
    receive_packet,
    send_packet,
)
from transfer.token import decode_token


def num_mapped(name: str) -> int:
    """Mappings of files of this name in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(f"/memfd:{name} " in line for line in lines)


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


def only_connection(peer: TransferEngine) -> ShmPeer:
    assert peer._shm is not None
    (connection,) = peer._shm._peers.values()
    return connection


async def test_a_peer_unmaps_what_is_revoked_without_being_asked_for_more() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        local, kept = peer.allocate(4096), owner.allocate(4096)
        await peer.read(kept.export("r"), whole(4096), into=local, deadline_s=soon())
        mappings, before = only_connection(peer).mappings, num_mapped("kvferry")
        for _ in range(1000):
            region = owner.allocate(4096)
            await peer.read(region.export("r"), whole(4096), into=local, deadline_s=soon())
            region.revoke()
            del region
        await until(lambda: mappings.num_files == 1)
        await until(lambda: num_mapped("kvferry") == before)
        assert owner._shm is not None
        assert owner._shm._owner.is_mapped(kept.region_id)
        assert len(owner._shm._owner._mappers) == 1


async def test_a_peer_unmaps_when_its_owner_is_gone() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        local, region = peer.allocate(4096), owner.allocate(4096)
        await peer.read(region.export("r"), whole(4096), into=local, deadline_s=soon())
        mappings = only_connection(peer).mappings
        await owner.close()
        await until(lambda: mappings.num_files == 0)


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
        assert peer.counters().fallbacks == 1
        assert caplog.text.count("reached by tcp, not shm") == 1
        shared = owner.allocate(64)
        await peer.read(shared.export("r"), whole(64), into=local, deadline_s=soon())
        await owner.close()  # what its I/O thread has sent is counted by now
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


async def test_a_file_is_mapped_once_for_reading_and_once_for_writing() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(8192), peer.allocate(4096)
        parts = [owner.register(region.view[at : at + 4096]) for at in (0, 4096)]
        for part in parts:
            await peer.read(part.export("r"), whole(8), into=local, deadline_s=soon())
        mappings = only_connection(peer).mappings
        assert mappings.num_files == 1
        for part in parts:
            await peer.write(part.export("w"), whole(8), source=local, deadline_s=soon())
            await peer.read(part.export("rw"), whole(8), into=local, deadline_s=soon())
        assert mappings.num_files == 2


async def test_a_token_for_reading_maps_memory_that_cannot_be_written() -> None:
    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(4096), peer.allocate(4096)
        token = region.export("r")
        await peer.read(token, whole(8), into=local, deadline_s=soon())
        known = decode_token(token)
        grant = only_connection(peer).mappings.get(known.region_id, known.capability)
        assert grant is not None
        assert grant.view.readonly


@pytest.mark.parametrize("rights", ["r", "w", "rw"])
async def test_what_a_peer_is_handed_allows_what_its_token_does(rights: Rights) -> None:
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        region = owner.allocate(4096)
        control, memory = await asyncio.to_thread(handed, region.export(rights))
        for fd, may_write in ((control, False), (memory, "w" in rights)):
            refused = contextlib.nullcontext() if may_write else pytest.raises(OSError)
            with refused:
                os.pwrite(fd, b"y", 0)
            with refused:
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)[0:1] = b"y"
            mmap.mmap(fd, 4096, prot=mmap.PROT_READ).close()
            os.close(fd)
        assert bytes(region.view[:1]) == (b"y" if "w" in rights else b"\0")


def handed(token: bytes) -> tuple[int, int]:
    """Ask for a region as a peer does; return the two descriptors."""
    known = decode_token(token)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect("\0" + known.endpoint.shm)
        send_packet(sock, HelloPacket(SHM_PROTOCOL_VERSION, "peer"))
        _, (control,) = receive_packet(sock)
        send_packet(sock, MapPacket(1, known.region_id, known.capability))
        _, (memory,) = receive_packet(sock)
    return control, memory


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
    place = table.shared_place(region, writable=False)
    assert place is not None
    region.revoke()
    with open(os.devnull, "rb"):  # takes the number of the region's own descriptor
        assert os.fstat(place.fd).st_size == 4096
    os.close(place.fd)
    assert not region.in_shared_memory
    assert table.shared_place(region, writable=False) is None


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


@pytest.mark.parametrize(("module", "name"), [(shm_peer, "ControlView"), (shm_mappings, "_map")])
async def test_memory_that_cannot_be_mapped_is_reached_by_tcp(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "no memory for a mapping")

    async with checked_engines("shm") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(64), peer.allocate(64)
        region.view[:] = pattern(64).data
        monkeypatch.setattr(module, name, exhausted)
        await peer.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        assert local.view == region.view
        assert peer.counters().fallbacks == 1


async def test_an_engine_without_descriptors_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*args: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    async with checked_engines("shm") as engines:
        engine = engines.unstarted()
        with monkeypatch.context() as patched:
            patched.setattr(shm_control, "create_sealed", exhausted)
            with pytest.raises(PeerUnreachable, match="raise the limit on open files"):
                await engine.start()
