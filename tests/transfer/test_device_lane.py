"""Jobs on a device: their order, and what a caller may rely on when it is told of the end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tests.transfer.bulk_harness import engine_threads, until
from transfer.device_lane import MAX_ON_DEVICE, DeviceLane
from transfer.errors import DeviceFailed, PeerClosed


class Work:
    """A job that is done when the test says so."""

    def __init__(self, begun: list[int], number: int) -> None:
        self._begun = begun
        self._number = number
        self._over = threading.Event()
        self.error: DeviceFailed | None = None

    def start(self) -> Work:
        self._begun.append(self._number)
        return self

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        assert self._over.wait(30)
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        self._over.set()


class Lane:
    """A lane and the jobs it was given."""

    def __init__(self) -> None:
        self.lane = DeviceLane("kvferry-lane-of-a-test")
        self.begun: list[int] = []
        self.works: list[Work] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def give(self, num: int, *, only_waits: bool = False) -> None:
        for number in range(num):
            work = Work(self.begun, number)
            self.works.append(work)
            run = self.lane.run(work.start, only_waits=only_waits)
            self.tasks.append(asyncio.create_task(run))
        await until(lambda: self.begun)

    def finish_all(self) -> None:
        for work in self.works:
            work.finish()


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    threads = engine_threads()
    made = Lane()
    yield made
    made.finish_all()
    made.lane.close()
    assert engine_threads() == threads


async def test_jobs_begin_in_order_and_few_are_on_the_device(lane: Lane) -> None:
    await lane.give(8)
    for number in range(8):
        assert lane.begun == list(range(len(lane.begun)))
        assert len(lane.begun) <= number + MAX_ON_DEVICE
        lane.works[number].finish()
        await lane.tasks[number]
    assert lane.begun == list(range(8))


async def test_a_cancelled_job_that_has_not_begun_never_does(lane: Lane) -> None:
    await lane.give(2 + MAX_ON_DEVICE)
    lane.tasks[-1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await lane.tasks[-1]
    lane.finish_all()
    await asyncio.gather(*lane.tasks[:-1])
    assert lane.begun == list(range(1 + MAX_ON_DEVICE))


async def test_a_cancelled_job_that_has_begun_ends_when_the_device_is_done(lane: Lane) -> None:
    await lane.give(1)
    (task,) = lane.tasks
    for _ in range(2):
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
        assert not task.done()
    lane.finish_all()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_job_that_only_waits_is_cancelled_at_once(lane: Lane) -> None:
    await lane.give(1, only_waits=True)
    lane.tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await lane.tasks[0]
    assert not lane.works[0].done


async def test_a_failed_job_fails_alone(lane: Lane) -> None:
    await lane.give(3)
    lane.works[1].error = DeviceFailed("bad luck")
    lane.finish_all()
    ends = await asyncio.gather(*lane.tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), DeviceFailed, type(None)]


async def test_a_job_that_cannot_start_is_told_why(lane: Lane) -> None:
    def start() -> None:
        raise DeviceFailed("refused")

    with pytest.raises(DeviceFailed, match="refused"):
        await lane.lane.run(start)
    await lane.lane.run(lambda: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_in_a_job_ends_the_lane_and_nobody_hangs(lane: Lane) -> None:
    await lane.give(1)

    def start() -> None:
        raise AssertionError("a bug")

    tasks = [asyncio.create_task(lane.lane.run(start)) for _ in range(3)]
    lane.finish_all()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [PeerClosed] * 3
    await until(lambda: not lane.lane.is_alive)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_in_a_job_tells_no_other_of_its_end_before_the_device_is_done(
    lane: Lane,
) -> None:
    def buggy() -> None:
        raise AssertionError("a bug")

    await lane.give(1)  # until it is done, the next two wait to begin together
    lane.works.append(work := Work(lane.begun, 1))
    task = asyncio.create_task(lane.lane.run(work.start))
    bug = asyncio.create_task(lane.lane.run(buggy))
    await asyncio.sleep(0)
    lane.works[0].finish()
    await until(lambda: 1 in lane.begun)
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    work.finish()
    await task
    with pytest.raises(PeerClosed):
        await bug


async def test_closing_waits_for_the_device_and_refuses_the_rest(lane: Lane) -> None:
    await lane.give(3 + MAX_ON_DEVICE)
    num_begun = len(lane.begun)
    closing = asyncio.create_task(asyncio.to_thread(lane.lane.close))
    with pytest.raises(PeerClosed):
        await lane.tasks[-1]
    assert not closing.done()
    lane.finish_all()
    await closing
    ends = await asyncio.gather(*lane.tasks, return_exceptions=True)
    assert [end is None for end in ends] == [i < num_begun for i in range(len(ends))]
    with pytest.raises(PeerClosed):
        await lane.lane.run(lambda: None)


async def test_closing_without_waiting_tells_everybody_at_once(lane: Lane) -> None:
    await lane.give(2, only_waits=True)
    lane.lane.close(wait=False)
    ends = await asyncio.gather(*lane.tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [PeerClosed, PeerClosed]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads are not kept off cores")
async def test_a_lane_does_not_stay_on_the_cores_of_who_happened_to_start_it() -> None:
    """The I/O thread, which is kept off a core for as long as bytes arrive (``tcp_cores``)."""
    usual = os.sched_getaffinity(os.getpid())
    if len(usual) < 2:
        pytest.skip("there is one core")
    cores: list[set[int]] = []
    lane = DeviceLane("kvferry-lane-of-a-test")

    def start() -> None:
        os.sched_setaffinity(0, {min(usual)})
        asyncio.run(lane.run(lambda: cores.append(os.sched_getaffinity(0))))

    await asyncio.to_thread(run_in_thread, start)
    lane.close()
    assert cores == [usual]


def run_in_thread(function: Callable[[], None]) -> None:
    """On one that ends with it: a thread of the pool would stay where it was put."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
