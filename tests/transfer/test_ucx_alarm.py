"""A connection that pauses is woken by its descriptor, by the end of the pause, and not for nothing
again and again. No UCX."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from transfer.ucx_alarm import Alarm

FOR_EVER_S = 1000.0


class Bed:
    """An alarm on a descriptor; each turn ends in a pause, as long as ``pause_s`` is one."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.num_turns = 0
        self.pause_s: float | None = FOR_EVER_S
        self.turned = asyncio.Event()
        self.alarm = Alarm(self.ours.fileno(), self.turn)

    def turn(self) -> None:
        self.num_turns += 1
        self.turned.set()
        if self.pause_s is not None:
            self.alarm.pause(self.pause_s)

    async def look(self) -> int:
        """Let the loop look at the descriptor a few times; return how many turns there were."""
        before = self.num_turns
        for _ in range(10):
            await asyncio.sleep(0)
        return self.num_turns - before


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    bed = Bed()
    yield bed
    bed.alarm.stop()
    bed.ours.close()
    bed.theirs.close()


async def test_a_descriptor_that_is_readable_for_nothing_does_not_wake_a_pause(bed: Bed) -> None:
    bed.theirs.send(b"x")
    assert await bed.look() == 1
    assert await bed.look() == 0


async def test_after_a_pause_the_descriptor_is_listened_to_again(bed: Bed) -> None:
    bed.turn()
    bed.theirs.send(b"x")
    await bed.look()
    bed.pause_s = None
    bed.alarm.end_pause()
    assert await bed.look() > 1


async def test_the_end_of_a_pause_is_a_turn(bed: Bed) -> None:
    bed.alarm.pause(0.001)
    async with asyncio.timeout(10):
        await bed.turned.wait()


async def test_one_that_was_stopped_takes_no_turns(bed: Bed) -> None:
    bed.alarm.pause(0.0)
    bed.theirs.send(b"x")
    bed.alarm.stop()
    bed.alarm.end_pause()
    assert await bed.look() == 0
