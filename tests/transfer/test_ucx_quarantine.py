"""Once an operation has ended, UCX writes into its memory no more, even if it holds a flight still.

Over tcp and shared memory bytes move only when the worker is progressed: one that is given up is
never progressed again. Where devices move bytes, the region is taken out of use instead.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.transfer.bulk_harness import LIMIT_S, POLL_S
from tests.transfer.ucx_endings import NBYTES, engine
from tests.transfer.ucx_support import NEEDS_UCX
from transfer import ucx_orphans
from transfer.engine import TransferEngine
from transfer.errors import PeerLost, RegionRevoked, TransferError
from transfer.interface import Range, deadline_after
from transfer.region import HostRegion
from transfer.ucx_binding import (
    CMA_SWITCH,
    Context,
    Worker,
    moves_only_in_progress,
    open_context,
    without_idle_cma,
)

pytest.importorskip("ucxx")
from transfer.ucx_ucxx import UcxxFlight, UcxxWorker

pytestmark = NEEDS_UCX

NUM_TIMES = 8  # the owner's memory is read so often by one operation: it lasts for a while
MESSAGE_NBYTES = 8 << 20
NUM_ROUNDS = 2000


class Pair:
    """Two workers of this process, connected."""

    def __init__(self) -> None:
        self.contexts: list[Context] = [open_context(only_this_host=True) for _ in range(2)]
        self.workers: list[Worker] = [context.open_worker() for context in self.contexts]
        for worker, other in zip(self.workers, self.workers[::-1], strict=True):
            worker.connect(other.address)

    def close(self) -> None:
        for worker in self.workers:
            assert worker.break_off()
        for worker, context in zip(self.workers, self.contexts, strict=True):
            worker.close()
            context.close()


@pytest.mark.parametrize("paths", ["tcp,posix", "tcp"])
def test_no_byte_of_a_flight_moves_while_its_worker_is_not_progressed(
    paths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", paths)
    pair = Pair()
    sender, receiver = pair.workers
    assert receiver.moves_only_in_progress
    target = bytearray(MESSAGE_NBYTES)
    sender.send(b"\x55" * MESSAGE_NBYTES, tag=1)
    while (message := receiver.probe()) is None:
        sender.progress()
        receiver.progress()
    flight = receiver.receive(message, target)
    while not any(target):  # from here on bytes wait to be taken
        sender.progress()
        receiver.progress()
    assert not flight.completed, "one round does not take all"
    before = bytes(target)
    for _ in range(NUM_ROUNDS):
        sender.progress()
    assert bytes(target) == before
    while bytes(target) == before:  # they were there all the time
        receiver.progress()
        sender.progress()
    pair.close()


@asynccontextmanager
async def owner_process() -> AsyncIterator[Process]:
    """Start an owner with the environment of now; what is left of it is killed."""
    command = (sys.executable, "-m", "tests.transfer.ucx_endings", "own")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Held:
    """A binding whose UCX does not complete what is under way, and goes on with it if progressed.

    Its endpoint stays open when it is cut off: the worst that UCX could do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_rounds = 0
        self.under_way: list[UcxxFlight] = []  # receives, at the last look
        self._for_ever: list[UcxxFlight] = []
        progress, completed = UcxxWorker.progress, UcxxFlight.completed
        assert isinstance(completed, property)
        assert completed.fget is not None
        getter = completed.fget

        def progressed(worker: UcxxWorker) -> None:
            self.num_rounds += 1
            progress(worker)
            self.under_way = [flight for flight in worker._receives if not getter(flight)]

        def is_completed(flight: UcxxFlight) -> bool:
            held = any(each is flight for each in self._for_ever)
            return not held and bool(getter(flight))

        monkeypatch.setattr(UcxxWorker, "break_off", lambda worker: worker.quiet)
        monkeypatch.setattr(UcxxWorker, "progress", progressed)
        monkeypatch.setattr(UcxxFlight, "completed", property(is_completed))
        monkeypatch.setattr(ucx_orphans, "kept_for_good", [])
        monkeypatch.setattr("transfer.ucx_stragglers.STRAGGLER_LIMIT_S", 0.05)

    def hold(self) -> bool:
        """Hold what is under way; False if nothing is. The peer stands still meanwhile."""
        self._for_ever = list(self.under_way)
        return bool(self._for_ever)


async def kill_in_the_middle(peer: TransferEngine, held: Held) -> tuple[bytes, HostRegion]:
    """Read until UCX has pieces under way and their owner is killed; return token and target."""
    async with owner_process() as owner, asyncio.timeout(LIMIT_S):
        assert owner.stdout is not None
        token = bytes.fromhex((await owner.stdout.readline()).decode().strip())
        local = peer.allocate(NUM_TIMES * NBYTES)
        ranges = [Range(0, number * NBYTES, NBYTES) for number in range(NUM_TIMES)]
        while True:
            deadline_s = deadline_after(LIMIT_S)
            read = asyncio.create_task(peer.read(token, ranges, into=local, deadline_s=deadline_s))
            await asyncio.sleep(POLL_S)
            owner.send_signal(signal.SIGSTOP)
            await asyncio.sleep(POLL_S)
            if held.hold():
                break
            owner.send_signal(signal.SIGCONT)
            await read
        owner.kill()
        await owner.wait()
        with pytest.raises(PeerLost):
            await read
    return token, local


@pytest.mark.net
@pytest.mark.parametrize("paths", ["tcp,posix", "tcp"])
async def test_no_byte_changes_after_the_end_of_a_read_whose_owner_was_killed(
    paths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", paths)
    held = Held(monkeypatch)
    peer = await engine()
    _token, local = await kill_in_the_middle(peer, held)
    before, num_rounds = bytes(local.view), held.num_rounds
    assert len(ucx_orphans.kept_for_good) == 1, "UCX held a flight when the read had ended"
    await asyncio.sleep(10 * POLL_S)
    assert held.num_rounds == num_rounds, "the worker is never progressed again"
    assert bytes(local.view) == before
    await peer.close()
    assert held.num_rounds == num_rounds
    assert bytes(local.view) == before


@pytest.mark.net
async def test_memory_that_a_device_may_still_touch_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,posix")
    monkeypatch.setattr("transfer.ucx_ucxx.moves_only_in_progress", lambda _resources: False)
    peer = await engine()
    token, local = await kill_in_the_middle(peer, Held(monkeypatch))
    ranges, deadline_s = [Range(0, 0, 4096)], deadline_after(LIMIT_S)
    with pytest.raises(RegionRevoked):
        await peer.read(token, ranges, into=local, deadline_s=deadline_s)
    assert "do not reuse" in caplog.text
    with pytest.raises(TransferError) as gone:
        await peer.read(token, ranges, into=peer.allocate(4096), deadline_s=deadline_s)
    assert not isinstance(gone.value, RegionRevoked), "only that region is in quarantine"
    await peer.close()


def test_cma_is_named_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ("tcp/lo", "posix/memory", "cma/memory")
    monkeypatch.delenv(CMA_SWITCH, raising=False)
    assert without_idle_cma(found) == found[:2]
    assert moves_only_in_progress(without_idle_cma(found))
    monkeypatch.setenv(CMA_SWITCH, "y")
    assert without_idle_cma(found) == found
    assert not moves_only_in_progress(without_idle_cma(found))


@pytest.mark.parametrize(
    "resources", [(), ("rc_mlx5/mlx5_0:1",), ("tcp/lo", "cuda_copy/cuda"), ("UCX_TLS=all",)]
)
def test_what_is_not_known_to_stand_still_is_taken_for_a_device(resources: tuple[str, ...]) -> None:
    assert not moves_only_in_progress(resources)
