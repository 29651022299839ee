"""Once ``revoke`` has returned, no peer reads or writes the memory: slow, stopped or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.transfer.bulk_harness import (
    ROOT,
    Engines,
    PeerProcess,
    checked_engines,
    pattern,
    soon,
    until,
    whole,
)
from tests.transfer.shm_holder import MARK
from transfer import shm_control
from transfer.copy_pieces import Mover
from transfer.engine import TransferEngine
from transfer.errors import PeerClosed, PeerLost, PeerUnreachable, RegionRevoked
from transfer.interface import Range
from transfer.shm_control import (
    ControlPage,
    EngineState,
)
from transfer.shm_presence import wait_until_empty

NBYTES = 300_000
FOREVER_S = 60.0  # a wait that is not expected to be used up


class Hold:
    """Stops a peer of this process in the middle of a piece, inside of the memory, once armed."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self._move = Mover.move
        self.is_armed = False

    def move(self, mover: Mover, piece: Sequence[Range]) -> None:
        if self.is_armed:
            self.is_armed = False
            self.reached.set()
            assert self.go.wait(FOREVER_S), "nobody let the peer go on"
        self._move(mover, piece)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    made = Hold()
    monkeypatch.setattr(Mover, "move", lambda mover, piece: made.move(mover, piece))
    yield made
    made.go.set()


def patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(shm_control, "REVOKE_PATIENCE_S", seconds)


async def pair(engines: Engines) -> tuple[TransferEngine, TransferEngine]:
    return await engines.make(), await engines.make(inline_copy_nbytes=0)


async def begin_write(peer: TransferEngine, token: bytes, hold: Hold) -> asyncio.Task[None]:
    local = peer.allocate(NBYTES)
    local.view[:] = bytes([MARK]) * NBYTES
    hold.is_armed = True
    writing = peer.write(token, whole(NBYTES), source=local, deadline_s=soon())
    task = asyncio.create_task(writing)
    await until(hold.reached.is_set)
    return task


async def test_revoke_waits_for_the_peer_that_is_inside(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, FOREVER_S)
    async with checked_engines("shm") as engines:
        owner, peer = await pair(engines)
        region = owner.allocate(NBYTES)
        task = await begin_write(peer, region.export("w"), hold)
        revoking = asyncio.create_task(asyncio.to_thread(region.revoke))
        await until(lambda: region.revoked)
        assert not revoking.done(), "the peer is still inside"
        hold.go.set()
        await revoking
        region.view[:] = bytes(NBYTES)  # ours again
        with pytest.raises(RegionRevoked):
            await task
        assert not np.frombuffer(region.view, np.uint8).any()


async def test_closing_waits_for_the_peer_that_is_inside(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, FOREVER_S)
    async with checked_engines("shm") as engines:
        owner, peer = await pair(engines)
        region = owner.allocate(NBYTES)
        task = await begin_write(peer, region.export("w"), hold)
        assert owner._shm is not None
        ending = asyncio.create_task(asyncio.to_thread(owner._shm.abort))
        await until(lambda: control_of(owner)._words[0] == EngineState.ABORTED)
        assert not ending.done(), "the peer is still inside"
        hold.go.set()
        await ending
        region.view[:] = bytes(NBYTES)
        with pytest.raises(PeerLost):
            await task
        assert not np.frombuffer(region.view, np.uint8).any()


async def test_closing_leaves_the_loop_free_while_a_peer_is_inside(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, FOREVER_S)
    async with checked_engines("shm") as engines:
        owner, peer = await pair(engines)
        task = await begin_write(peer, owner.allocate(NBYTES).export("w"), hold)
        control, closing = control_of(owner), asyncio.create_task(owner.close())
        await until(lambda: control._words[0] == EngineState.CLOSED)
        assert not closing.done(), "the peer is still inside"
        hold.go.set()
        await closing
        with pytest.raises(PeerClosed):
            await task


async def test_closing_waits_for_the_peer_that_is_inside_also_when_it_is_cancelled(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, FOREVER_S)

    def let_go_and_wait(fd: int, region_id: int, patience_s: float) -> bool:
        hold.go.set()
        return wait_until_empty(fd, region_id, patience_s)

    monkeypatch.setattr(shm_control, "wait_until_empty", let_go_and_wait)
    async with checked_engines("shm") as engines:
        owner, peer = await pair(engines)
        region = owner.allocate(NBYTES)
        task = await begin_write(peer, region.export("w"), hold)
        control, closing = control_of(owner), asyncio.create_task(owner.close())
        await until(lambda: control._words[0] == EngineState.CLOSED)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        region.view[:] = bytes(NBYTES)  # ours again
        with pytest.raises(PeerClosed):
            await task
        assert not np.frombuffer(region.view, np.uint8).any()


async def test_memory_is_left_behind_for_a_peer_that_does_not_come_out(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, 0.0)
    async with checked_engines("shm") as engines:
        owner, peer = await pair(engines)
        region = owner.allocate(NBYTES)
        region.view[:] = pattern(NBYTES).data
        task = await begin_write(peer, region.export("w"), hold)
        region.revoke()
        assert region.view == pattern(NBYTES).data, "the bytes stay the owner's"
        hold.go.set()
        with pytest.raises(RegionRevoked):
            await task
        assert region.view == pattern(NBYTES).data


async def test_what_else_lies_in_memory_that_was_left_behind_is_reached_by_tcp(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, 0.0)
    async with checked_engines("shm") as engines:
        owner, peer = await pair(engines)
        segment, local = owner.allocate(2 * NBYTES), peer.allocate(NBYTES)
        revoked, kept = (owner.register(segment.view[at:][:NBYTES]) for at in (0, NBYTES))
        token = kept.export("rw")
        await peer.read(token, whole(8), into=local, deadline_s=soon())  # by shared memory
        task = await begin_write(peer, revoked.export("w"), hold)
        revoked.revoke()
        hold.go.set()
        with pytest.raises(RegionRevoked):
            await task
        kept.view[:] = pattern(NBYTES, 1).data
        await peer.read(token, whole(NBYTES), into=local, deadline_s=soon())
        assert local.view == pattern(NBYTES, 1).data
        local.view[:] = pattern(NBYTES, 2).data
        await peer.write(token, whole(NBYTES), source=local, deadline_s=soon())
        assert kept.view == pattern(NBYTES, 2).data
        assert segment.view[:NBYTES] == bytes(NBYTES)
        assert peer.counters().fallbacks == 1
        assert not segment.in_shared_memory
        served = owner.counters().bytes_served
        other = owner.allocate(NBYTES)
        await peer.read(other.export("r"), whole(NBYTES), into=local, deadline_s=soon())
        assert owner.counters().bytes_served == served, "other memory is still reached by shm"


def control_of(engine: TransferEngine) -> ControlPage:
    assert engine._shm is not None
    return engine._shm._control


# ── real processes ──────────────────────────────────────────────────────────────────────────────


class Holder:
    """``tests.transfer.shm_holder`` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        await self._process.stdin.drain()

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def holder(token: bytes) -> AsyncIterator[Holder]:
    """Yield a peer that is inside of the memory, in the middle of a write."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.transfer.shm_holder", cwd=ROOT, stdin=pipe, stdout=pipe
    )
    peer = Holder(process)
    try:
        await peer.tell(token.hex())
        assert await peer.line() == "inside"
        yield peer
    finally:
        if process.returncode is None:
            await peer.kill()
        process._transport.close()  # type: ignore[attr-defined]


@pytest.mark.net
async def test_a_killed_peer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, FOREVER_S)
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        region = owner.allocate(NBYTES)
        async with holder(region.export("w")) as peer:
            await peer.kill()
            region.revoke()
            assert owner._shm is not None
            assert control_of(owner)._stalled is None
            await until(lambda: owner._shm and not owner._shm._owner.num_connections)


@pytest.mark.net
async def test_a_stopped_peer_never_touches_what_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience(monkeypatch, 0.05)
    async with checked_engines("shm") as engines:
        owner = await engines.make()
        region = owner.allocate(NBYTES)
        async with holder(region.export("w")) as peer:
            os.kill(peer.pid, signal.SIGSTOP)
            region.revoke()
            region.view[:] = pattern(NBYTES).data  # somebody else's bytes now
            again = owner.register(region.view)
            assert not again.in_shared_memory
            os.kill(peer.pid, signal.SIGCONT)
            await peer.tell("go")
            assert await peer.line() == "RegionRevoked"
            assert again.view == pattern(NBYTES).data


@pytest.mark.net
async def test_a_stopped_owner_is_read_and_written_all_the_same() -> None:
    async with checked_engines("shm") as engines, PeerProcess("shm", NBYTES) as process:
        peer = await engines.make()
        local = peer.allocate(NBYTES)
        await peer.read(process.token, whole(8), into=local, deadline_s=soon())
        await process.stop()
        await peer.read(process.token, whole(NBYTES), into=local, deadline_s=soon())
        assert local.view == pattern(NBYTES, seed=7).data
        await peer.write(process.token, whole(NBYTES), source=local, deadline_s=soon())
        process.signal(signal.SIGCONT)


@pytest.mark.net
async def test_a_killed_owner_is_noticed_without_an_operation_and_unmapped() -> None:
    async with checked_engines("shm") as engines, PeerProcess("shm", NBYTES) as process:
        peer = await engines.make()
        local = peer.allocate(NBYTES)
        await peer.read(process.token, whole(8), into=local, deadline_s=soon())
        assert peer._shm is not None
        (connection,) = peer._shm._peers.values()
        await process.kill()
        await until(lambda: not connection.alive)
        await until(lambda: connection.mappings.num_files == 0)
        with pytest.raises((PeerLost, PeerUnreachable)):
            await peer.read(process.token, whole(8), into=local, deadline_s=soon())
