"""Claims about the I/O thread of the transfer engine."""

from __future__ import annotations

import asyncio

import pytest

from transfer.errors import PeerClosed
from transfer.io_thread import IoThread

JOIN_TIMEOUT_S = 5.0


async def test_work_for_a_thread_that_has_died_is_refused_and_nothing_is_left_unawaited() -> None:
    thread = IoThread("test")
    thread.start()
    thread.loop.call_soon_threadsafe(thread.loop.stop)
    await asyncio.to_thread(thread._thread.join, JOIN_TIMEOUT_S)
    assert not thread.is_alive

    async def work() -> None:
        raise AssertionError("ran on a dead thread")

    with pytest.raises(PeerClosed):
        await thread.run(work())
    with pytest.raises(PeerClosed):
        thread.call(print)
    thread.stop()
