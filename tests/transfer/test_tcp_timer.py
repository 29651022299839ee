"""A timer that is set while its loop sleeps goes off without the loop being woken for it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from tests.transfer.bulk_harness import LIMIT_S, until
from transfer import tcp_timer
from transfer.io_thread import IoThread
from transfer.tcp_timer import KernelTimer

pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="needs Linux")


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread("timer")
    thread.start()
    yield thread
    thread.stop()


async def test_it_goes_off_on_its_loop_and_setting_it_wakes_nobody(io: IoThread) -> None:
    fired_on: list[int] = []
    fired = threading.Event()

    def fire() -> None:
        fired_on.append(threading.get_ident())
        fired.set()

    async def make() -> KernelTimer:
        return KernelTimer(io.loop, fire)

    timer = await io.run(make())
    set_from: list[bool] = []

    def set_it() -> bool:
        timer.set(0.001)
        set_from.append(io._loop.put_to_work)
        return True

    await until(lambda: io.try_now(set_it))
    assert set_from == [False]
    assert await asyncio.to_thread(fired.wait, LIMIT_S)
    assert fired_on == [io._thread.ident]
    io.call(timer.close)


async def test_it_goes_off_once_at_the_first_time_and_can_be_set_again() -> None:
    num_fired = 0
    fired = asyncio.Event()

    def fire() -> None:
        nonlocal num_fired
        num_fired += 1
        fired.set()

    timer = KernelTimer(asyncio.get_running_loop(), fire)
    for _ in range(3):
        timer.set(0.001)
        timer.set(3600.0)
        async with asyncio.timeout(LIMIT_S):
            await fired.wait()
        fired.clear()
    assert num_fired == 3
    timer.close()


async def test_a_time_that_has_passed_goes_off_at_once() -> None:
    fired = asyncio.Event()
    timer = KernelTimer(asyncio.get_running_loop(), fired.set)
    timer.set(-1.0)
    async with asyncio.timeout(LIMIT_S):
        await fired.wait()
    timer.close()


async def test_where_there_is_no_such_timer_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_timer.sys, "platform", "darwin")
    with pytest.raises(OSError, match="Linux"):
        KernelTimer(asyncio.get_running_loop(), lambda: None)
