"""Injected faults on real transports: each does what it says, and breaks no promise."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest

from tests.transfer.bulk_harness import (
    Engines,
    PeerProcess,
    checked_engines,
    pattern,
    soon,
    until,
    whole,
)
from tests.transfer.device_fakes import FakeDevice
from transfer.engine import TransferEngine
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost
from transfer.interface import Range, Rights, deadline_after
from transfer.region import HostRegion
from transfer.token import decode_token

NBYTES = 300_000
HEAD = 100_000
NO_UCX = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
TRANSPORTS = ["loopback", "shm", "tcp", pytest.param("ucx", marks=NO_UCX)]
RIGHTS: list[Rights] = ["r", "w"]


@pytest.fixture(params=TRANSPORTS)
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    async with checked_engines(request.param) as made:
        yield made


class Pair:
    """An engine with faults, an owner without, and one region of each; the source is filled."""

    def __init__(self, right: Rights, owner: TransferEngine, faulty: TransferEngine) -> None:
        self.right = right
        self.faulty = faulty
        self.remote = owner.allocate(NBYTES)
        self.local = faulty.allocate(NBYTES)
        self.source.view[:] = pattern(NBYTES).data

    @property
    def source(self) -> HostRegion:
        return self.remote if self.right == "r" else self.local

    @property
    def target(self) -> HostRegion:
        return self.local if self.right == "r" else self.remote

    async def move(self, deadline_s: float | None = None) -> None:
        token, ranges = self.remote.export("rw"), whole(NBYTES)
        deadline_s = soon() if deadline_s is None else deadline_s
        if self.right == "r":
            await self.faulty.read(token, ranges, into=self.local, deadline_s=deadline_s)
        else:
            await self.faulty.write(token, ranges, source=self.local, deadline_s=deadline_s)

    def wrong(self) -> list[int]:
        """Places at which the target differs from the pattern."""
        got = np.frombuffer(self.target.view, np.uint8)
        return list(map(int, np.flatnonzero(got != pattern(NBYTES))))


async def pair_of(engines: Engines, right: Rights, inject: str) -> Pair:
    return Pair(right, await engines.make(), await engines.make(inject=inject))


@pytest.mark.parametrize("right", RIGHTS)
async def test_truncation_moves_exactly_the_prefix_and_then_loses_the_peer(
    engines: Engines, right: Rights
) -> None:
    pair = await pair_of(engines, right, f"any count=1 truncate after={HEAD}")
    with pytest.raises(PeerLost):
        await pair.move()
    assert pair.target.view[:HEAD] == pattern(NBYTES).data[:HEAD]
    assert not any(pair.target.view[HEAD:])
    await pair.move()
    assert pair.wrong() == []


@pytest.mark.parametrize("right", RIGHTS)
async def test_a_reset_in_the_middle_loses_the_peer_and_the_next_operation_connects_anew(
    engines: Engines, right: Rights
) -> None:
    pair = await pair_of(engines, right, f"any count=3 reset after={HEAD}")
    for _ in range(3):
        with pytest.raises(PeerLost):
            await pair.move()
        assert pair.target.view[:HEAD] == pattern(NBYTES).data[:HEAD]
    await pair.move()
    assert pair.wrong() == []


@pytest.mark.parametrize("right", RIGHTS)
async def test_corruption_succeeds_and_flips_as_many_bytes_of_the_target_only(
    engines: Engines, right: Rights
) -> None:
    pair = await pair_of(engines, right, f"any count=1 corrupt=5 after={HEAD}")
    await pair.move()
    wrong = pair.wrong()
    assert len(wrong) == 5
    assert wrong[0] >= HEAD
    assert pair.source.view == pattern(NBYTES).data
    await pair.move()
    assert pair.wrong() == []


@pytest.mark.parametrize("right", RIGHTS)
async def test_corruption_finds_its_bytes_in_scattered_ranges(
    engines: Engines, right: Rights
) -> None:
    owner, faulty = await engines.make(), await engines.make(inject="any corrupt=4096")
    remote, local = owner.allocate(20_000), faulty.allocate(20_000)
    source, target = (remote, local) if right == "r" else (local, remote)
    source.view[:] = pattern(20_000).data
    ranges = [Range(100 * i, 19_900 - 100 * i, 10 + i % 3) for i in range(200)]
    if right == "r":
        await faulty.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    else:
        await faulty.write(remote.export("w"), ranges, source=local, deadline_s=soon())
    for remote_offset, local_offset, nbytes in ranges:
        start, end = (
            (remote_offset, local_offset) if right == "r" else (local_offset, remote_offset)
        )
        moved = np.frombuffer(target.view[end : end + nbytes], np.uint8)
        sent = np.frombuffer(source.view[start : start + nbytes], np.uint8)
        assert (moved != sent).all()  # fewer bytes than flips: each one is hit
        target.view[end : end + nbytes] = bytes(nbytes)
    assert not any(target.view), "a byte outside of the ranges was touched"


@pytest.mark.parametrize("right", RIGHTS)
async def test_a_dropped_operation_ends_at_its_deadline_and_moves_nothing(
    engines: Engines, right: Rights
) -> None:
    pair = await pair_of(engines, right, "any drop")
    deadline_s = deadline_after(0.05)
    with pytest.raises(DeadlineExceeded):
        await pair.move(deadline_s)
    assert asyncio.get_running_loop().time() >= deadline_s
    assert not any(pair.target.view)


async def test_a_delayed_operation_begins_after_the_delay(engines: Engines) -> None:
    pair = await pair_of(engines, "r", "any delay=40ms")
    start = asyncio.get_running_loop().time()
    await pair.move()
    assert asyncio.get_running_loop().time() - start >= 0.04
    assert pair.wrong() == []


@pytest.mark.parametrize("right", RIGHTS)
async def test_a_stalled_operation_stops_behind_the_prefix_and_then_goes_on(
    engines: Engines, right: Rights
) -> None:
    pair = await pair_of(engines, right, f"any count=1 stall=3600s after={HEAD}; any stall=1ms")
    task = asyncio.create_task(pair.move())
    await until(lambda: pair.target.view[:HEAD] == pattern(NBYTES).data[:HEAD])
    assert not any(pair.target.view[HEAD:])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pair.move()
    assert pair.wrong() == []


@pytest.mark.parametrize("fault", ["drop", "delay=1h", "stall=1h"])
async def test_what_is_held_up_ends_with_its_engine(engines: Engines, fault: str) -> None:
    pair = await pair_of(engines, "r", f"any {fault.replace('1h', '3600s')}")
    tasks = [asyncio.create_task(pair.move()) for _ in range(3)]
    await until(lambda: pair.faulty.counters().faults_injected == 3)
    await pair.faulty.close()
    for task in tasks:
        with pytest.raises(PeerClosed):
            await task
    with pytest.raises(PeerClosed):
        await pair.move()


@pytest.mark.parametrize("fault", ["drop", "delay=3600s", "stall=3600s after=1"])
async def test_a_deadline_or_a_cancel_ends_what_is_held_up(engines: Engines, fault: str) -> None:
    pair = await pair_of(engines, "r", f"any {fault}")
    with pytest.raises(DeadlineExceeded):
        await pair.move(deadline_after(0.03))
    task = asyncio.create_task(pair.move())
    await until(lambda: pair.faulty.counters().faults_injected == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.faulty.counters().errors == 2
    assert not any(pair.local.view[1:])


async def test_operations_that_no_rule_is_about_are_left_alone(engines: Engines) -> None:
    pair = await pair_of(engines, "r", "write drop; any peer=10.1.2.3 drop; any@sim drop")
    await pair.move()
    assert pair.wrong() == []
    assert pair.faulty.counters().faults_injected == 0


async def test_faults_are_announced_counted_and_logged_once_for_each_kind(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    rules = "read nth=2 corrupt; read nth=3 truncate; seed=4"
    with caplog.at_level(logging.WARNING, logger="transfer.fault_injection"):
        pair = await pair_of(engines, "r", rules)
        for number in range(1, 13):
            if number % 3 == 0 and number % 2:
                with pytest.raises(PeerLost):
                    await pair.move()
            else:
                await pair.move()
    announced, *injected = [record.getMessage() for record in caplog.records]
    assert "FAULTS ARE INJECTED" in announced
    assert rules in announced
    assert [message.split()[3] for message in injected] == ["corrupt:", "truncate:"]
    assert f"read of {NBYTES} bytes over {engines.transport}" in injected[0]
    assert pair.faulty.counters().faults_injected == 8


async def test_an_operation_right_behind_a_break_while_connecting_connects_anew() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        remote = owner.allocate(64)
        token, endpoint = remote.export("r"), decode_token(remote.export("r")).endpoint

        def read() -> asyncio.Task[None]:
            into = peer.allocate(64)
            return asyncio.create_task(peer.read(token, whole(64), into=into, deadline_s=soon()))

        assert peer._io is not None
        started, held = threading.Event(), threading.Event()
        first = read()
        await asyncio.sleep(0)
        peer._io.call(started.set)
        peer._io.call(held.wait)  # so that the break and the next read come in one turn of its loop
        await asyncio.to_thread(started.wait)
        peer._transports["tcp"].disrupt(endpoint)
        second = read()
        await asyncio.sleep(0)
        held.set()
        await second
        with suppress(PeerLost):  # it may have been done before the break
            await first


@pytest.mark.net
async def test_a_break_takes_down_all_that_is_on_the_same_connection() -> None:
    async with checked_engines("tcp") as engines, PeerProcess("tcp", NBYTES) as process:
        peer = await engines.make(inject="write truncate after=0")
        local, ranges = peer.allocate(NBYTES), whole(NBYTES)
        await peer.read(process.token, ranges, into=local, deadline_s=soon())
        await process.stop()  # so that the reads stay on their way
        reads = [
            asyncio.create_task(
                peer.read(process.token, ranges, into=peer.allocate(NBYTES), deadline_s=soon())
            )
            for _ in range(4)
        ]
        await asyncio.sleep(0)
        with pytest.raises(PeerLost):
            await peer.write(process.token, ranges, source=local, deadline_s=soon())
        for read in reads:
            with pytest.raises(PeerLost):
                await read


@pytest.mark.parametrize("right", RIGHTS)
async def test_corruption_reaches_the_memory_of_a_device(engines: Engines, right: Rights) -> None:
    device = FakeDevice()
    owner, faulty = await engines.make(), await engines.make(inject="any corrupt=5")
    memory = device.memory(bytes(pattern(NBYTES)) if right == "w" else bytes(NBYTES))
    local, remote = faulty.register(memory), owner.allocate(NBYTES)
    if right == "r":
        remote.view[:] = pattern(NBYTES).data
        await faulty.read(remote.export("r"), whole(NBYTES), into=local, deadline_s=soon())
    else:
        await faulty.write(remote.export("w"), whole(NBYTES), source=local, deadline_s=soon())
    moved = memory.data if right == "r" else remote.view
    assert (np.frombuffer(moved, np.uint8) != pattern(NBYTES)).sum() == 5
    source = remote.view if right == "r" else memory.data
    assert source == pattern(NBYTES).tobytes()
    assert device.torn == 0
