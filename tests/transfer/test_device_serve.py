"""Device memory as its owner serves it over tcp; the device is a fake one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.transfer.bulk_harness import Engines, checked_engines, pattern, soon, until, whole
from tests.transfer.device_fakes import FakeDevice
from transfer.device_serve import FETCHED_AHEAD, SERVED_SLOTS_PER_LINK
from transfer.engine import TransferEngine
from transfer.errors import DeviceFailed, PeerLost, RegionRevoked
from transfer.interface import Range, Region
from transfer.token import decode_token

PIECE = 4096  # of the owner: one slot, and its longest frame
LONG_PIECE = 64 * 1024  # of the peer: frames of many slots


class Served:
    """An owner with a device, and a peer without."""

    def __init__(self, owner: TransferEngine, peer: TransferEngine) -> None:
        self.owner = owner
        self.peer = peer
        self.gpu = FakeDevice()

    def remote(self, data: bytes) -> tuple[Region, bytearray]:
        memory = self.gpu.memory(data)
        return self.owner.register(memory), memory.data

    async def move(self, right: str, token: bytes, local: Region) -> None:
        """Read or write the whole of ``local``."""
        if right == "r":
            await self.peer.read(token, whole(local.nbytes), into=local, deadline_s=soon())
        else:
            await self.peer.write(token, whole(local.nbytes), source=local, deadline_s=soon())


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with checked_engines("tcp") as engines:
        made = await make_served(engines)
        yield made
        made.gpu.let_go()


async def make_served(engines: Engines) -> Served:
    return Served(
        await engines.make(piece_nbytes=PIECE), await engines.make(piece_nbytes=LONG_PIECE)
    )


def some(nbytes: int, seed: int = 1) -> bytes:
    return pattern(nbytes, seed).tobytes()


async def test_a_write_is_done_when_the_device_has_it(served: Served) -> None:
    remote, data = served.remote(bytes(5 * PIECE))
    source = served.peer.register(some(5 * PIECE))
    served.gpu.hold()
    task = asyncio.create_task(
        served.peer.write(remote.export("w"), whole(5 * PIECE), source=source, deadline_s=soon())
    )
    await until(lambda: served.gpu.pending)
    assert not task.done()
    served.gpu.release()
    await task
    assert data == some(5 * PIECE)
    assert served.gpu.torn == 0


async def test_more_writes_at_once_than_a_link_has_slots_all_end(served: Served) -> None:
    num, share = 6 * SERVED_SLOTS_PER_LINK, 3 * PIECE + 5
    remote, data = served.remote(bytes(num * share))
    token = remote.export("w")
    source = served.peer.register(some(num * share))
    async with asyncio.TaskGroup() as group:
        for i in range(num):
            ranges = [Range(i * share, i * share, share)]
            group.create_task(served.peer.write(token, ranges, source=source, deadline_s=soon()))
    assert data == some(num * share)


async def test_reads_fetch_a_little_ahead_and_no_more(served: Served) -> None:
    nbytes = 100 * PIECE
    remote, _ = served.remote(some(nbytes))
    local = served.peer.register(bytearray(nbytes))
    served.gpu.hold()
    task = asyncio.create_task(
        served.peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    )
    await until(lambda: served.gpu.pending)
    assert len(served.gpu.pending) <= FETCHED_AHEAD
    served.gpu.release()
    await task
    assert local.view == some(nbytes)


async def test_host_memory_is_served_while_the_device_is_slow(served: Served) -> None:
    slow, _ = served.remote(some(8 * PIECE))
    quick = served.owner.register(bytearray(some(LONG_PIECE)))
    into = served.peer.register(bytearray(8 * PIECE))
    local = served.peer.register(bytearray(LONG_PIECE))
    served.gpu.hold()
    task = asyncio.create_task(
        served.peer.read(slow.export("r"), whole(8 * PIECE), into=into, deadline_s=soon())
    )
    await until(lambda: served.gpu.pending)
    await served.peer.read(quick.export("r"), whole(LONG_PIECE), into=local, deadline_s=soon())
    assert local.view == some(LONG_PIECE)
    assert not task.done()
    served.gpu.release()
    await task


@pytest.mark.parametrize("failing", ["start", "event"])
@pytest.mark.parametrize("right", ["r", "w"])
async def test_a_copy_that_fails_is_told_to_the_peer(
    served: Served, failing: str, right: str
) -> None:
    nbytes = 30 * PIECE
    remote, data = served.remote(some(nbytes))
    local = served.peer.register(bytearray(nbytes))
    token = remote.export("rw")
    served.gpu.failing = failing
    with pytest.raises(DeviceFailed, match="fake device"):
        await served.move(right, token, local)
    served.gpu.failing = ""
    again = served.peer.register(bytearray(some(nbytes, 2)))
    await served.move("w", token, again)
    assert data == some(nbytes, 2)


@pytest.mark.parametrize("right", ["r", "w"])
async def test_revoke_quiets_the_device_and_the_peer_is_told(served: Served, right: str) -> None:
    nbytes = 40 * PIECE
    remote, data = served.remote(bytes(nbytes))
    local = served.peer.register(bytearray(some(nbytes)))
    token = remote.export("rw")
    served.gpu.hold()
    task = asyncio.create_task(served.move(right, token, local))
    await until(lambda: served.gpu.pending)
    revoking = asyncio.create_task(asyncio.to_thread(remote.revoke))
    await asyncio.wait([revoking], timeout=0.02)
    assert not revoking.done()
    served.gpu.release()
    await revoking
    after, num_copies = bytes(data), served.gpu.num_copies
    with pytest.raises(RegionRevoked):
        await task
    assert (bytes(data), served.gpu.num_copies) == (after, num_copies)


@pytest.mark.parametrize("right", ["r", "w"])
async def test_a_cancelled_request_gives_its_slots_back(served: Served, right: str) -> None:
    nbytes = 40 * PIECE
    remote, data = served.remote(some(nbytes))
    local = served.peer.register(bytearray(nbytes))
    token = remote.export("rw")
    for _ in range(2 * SERVED_SLOTS_PER_LINK):
        served.gpu.hold()
        task = asyncio.create_task(served.move(right, token, local))
        await until(lambda: served.gpu.pending)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        served.gpu.release()
        await until(lambda: not served.gpu.pending)
    again = served.peer.register(bytearray(some(nbytes, 2)))
    await served.move("w", token, again)
    assert data == some(nbytes, 2)
    await served.move("r", token, local)
    assert local.view == data
    assert served.gpu.torn == 0


@pytest.mark.parametrize("right", ["r", "w"])
async def test_a_broken_connection_gives_its_slots_back(served: Served, right: str) -> None:
    nbytes = 40 * PIECE
    remote, data = served.remote(some(nbytes))
    local = served.peer.register(bytearray(nbytes))
    token = remote.export("rw")
    served.gpu.hold()
    task = asyncio.create_task(served.move(right, token, local))
    await until(lambda: served.gpu.pending)
    served.peer._transports["tcp"].disrupt(decode_token(token).endpoint)
    with pytest.raises(PeerLost):
        await task
    served.gpu.release()
    again = served.peer.register(bytearray(some(nbytes, 2)))
    await served.move("w", token, again)
    assert data == some(nbytes, 2)


async def test_device_memory_is_reached_by_tcp_where_shm_was_asked_for_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with checked_engines("shm") as engines:
        served = await make_served(engines)
        remote, _ = served.remote(some(64))
        local = served.peer.register(bytearray(64))
        for _ in range(2):
            await served.move("r", remote.export("r"), local)
        assert local.view == some(64)
        assert served.peer.counters().fallbacks == 1
    assert len([line for line in caplog.messages if "by tcp, not shm" in line]) == 1
