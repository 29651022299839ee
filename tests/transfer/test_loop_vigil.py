"""Claims about how long a loop is kept awake for an answer or for the next request.

Time is the test's own: a turn of the loop takes as long as the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.transfer.bulk_harness import until
from tests.transfer.channel_contract import Ask, Hang, TestService, Told, soon, talking
from transfer.errors import DeadlineExceeded
from transfer.loop_vigil import LOOP_OFTEN_S, LOOP_SPIN_S, Answers, LoopVigil
from transfer.rpc import RpcChannel
from transfer.vigil import GAP_S, MAX_IN_VAIN, REST_S
from transfer.zmq_network import ZmqNetwork

TURN_S = 0.000004


class Watch:
    """A clock that goes on by ``turn_s`` whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.turn_s = TURN_S
        self.works = False  # the thread, all the time; else next to never

    def __call__(self) -> float:
        self.now_s += self.turn_s
        return self.now_s

    def worked(self) -> float:
        return self.now_s if self.works else self.now_s / 1e6


@pytest.fixture
async def watch() -> Watch:
    return Watch()


@pytest.fixture
async def vigil(watch: Watch) -> AsyncIterator[LoopVigil]:
    vigil = LoopVigil(watch, watch.worked)
    yield vigil
    await until(lambda: not vigil.turning)


async def over(vigil: LoopVigil) -> int:
    """Wait for the loop to sleep; return the number of turns."""
    num_turns = 0
    while vigil.turning:
        await asyncio.sleep(0)
        num_turns += 1
    return num_turns


async def test_the_loop_turns_until_the_answer_is_there(vigil: LoopVigil) -> None:
    answers = Answers(vigil)
    answers.asked()
    for _ in range(5):
        await asyncio.sleep(0)
        assert vigil.turning
    answers.answered()
    assert await over(vigil) <= 1


async def test_nobody_waits_for_an_answer_longer_than_the_spin(
    vigil: LoopVigil, watch: Watch
) -> None:
    Answers(vigil).asked()
    asked_s = watch.now_s
    assert await over(vigil) > 10
    assert watch.now_s - asked_s <= LOOP_SPIN_S + 2 * TURN_S


async def test_a_peer_that_is_slow_to_answer_is_not_waited_for(
    vigil: LoopVigil, watch: Watch
) -> None:
    answers = Answers(vigil)
    answers.asked()
    watch.now_s += 2 * LOOP_OFTEN_S
    answers.answered()
    await over(vigil)
    answers.asked()
    assert not vigil.turning
    answers.answered()  # fast, this time
    answers.asked()
    assert vigil.turning
    answers.given_up()


async def test_in_vain_too_often_the_loop_sleeps_for_a_while(
    vigil: LoopVigil, watch: Watch
) -> None:
    answers = Answers(vigil)
    for _ in range(MAX_IN_VAIN):
        answers.asked()
        assert vigil.turning
        await over(vigil)
    answers.asked()
    assert not vigil.turning
    watch.now_s += REST_S
    answers.asked()
    assert vigil.turning


async def test_a_core_that_others_want_is_given_up_at_once(vigil: LoopVigil, watch: Watch) -> None:
    answers = Answers(vigil)
    answers.asked()
    await asyncio.sleep(0)
    watch.turn_s = 0.004
    assert await over(vigil) <= 2
    watch.turn_s = TURN_S
    answers.asked()
    assert not vigil.turning, "a whole slice was lost: rest"


async def test_work_of_the_loop_itself_is_no_reason_to_sleep(
    vigil: LoopVigil, watch: Watch
) -> None:
    watch.works = True
    answers = Answers(vigil)
    answers.asked()
    watch.turn_s = LOOP_SPIN_S / 5
    assert watch.turn_s > GAP_S
    assert await over(vigil) >= 4
    watch.turn_s = TURN_S
    for _ in range(MAX_IN_VAIN):
        answers.asked()
        assert vigil.turning
        answers.answered()


async def test_requests_in_series_keep_the_loop_awake_and_single_ones_do_not(
    vigil: LoopVigil, watch: Watch
) -> None:
    vigil.arrived()
    assert not vigil.turning
    watch.now_s += 2 * LOOP_OFTEN_S
    vigil.arrived()
    assert not vigil.turning
    watch.now_s += LOOP_OFTEN_S / 2
    vigil.arrived()
    assert vigil.turning
    assert await over(vigil) > 10


async def test_an_answer_does_not_end_the_wait_for_others(vigil: LoopVigil) -> None:
    first, second = Answers(vigil), Answers(vigil)
    first.asked()
    second.asked()
    first.answered()
    await asyncio.sleep(0)
    assert vigil.turning
    second.answered()
    assert await over(vigil) <= 1


async def test_other_work_of_the_loop_goes_on_meanwhile(vigil: LoopVigil, watch: Watch) -> None:
    watch.turn_s = 0.0
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, done.set)
    Answers(vigil).asked()
    await asyncio.wait_for(done.wait(), 5)
    assert vigil.turning
    watch.turn_s = TURN_S


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_request_that_ends_without_an_answer_lets_the_loop_sleep(how: str) -> None:
    server, client = ZmqNetwork(), ZmqNetwork()
    vigil = client.vigil()
    vigil.clock = lambda: 1.0  # a vigil would never end by itself
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        assert isinstance(channel, RpcChannel)
        deadline_s = soon() if how == "cancelled" else soon(0.05)
        request = asyncio.create_task(channel.request(Hang(), Told, deadline_s=deadline_s))
        await service.started.wait()
        assert vigil.turning
        if how == "cancelled":
            request.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            await request
        await until(lambda: not vigil.turning)
        answer = await channel.request(Ask("x"), Told, deadline_s=soon())
        assert answer.text == "x"
        await until(lambda: not vigil.turning)
    await client.close()
    await server.close()


async def test_a_channel_that_is_aborted_lets_the_loop_sleep() -> None:
    server, client = ZmqNetwork(), ZmqNetwork()
    vigil = client.vigil()
    vigil.clock = lambda: 1.0
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        request = asyncio.create_task(channel.request(Hang(), Told, deadline_s=soon()))
        await service.started.wait()
        channel.abort()
        await asyncio.wait({request})
        await until(lambda: not vigil.turning)
        assert request.exception() is not None
    await client.close()
    await server.close()
