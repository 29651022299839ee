"""Claims about a ZeroMQ socket on a loop: what its parts are made of; that no edge is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq

from tests.transfer.bulk_harness import until
from tests.transfer.channel_contract import ANY
from transfer.zmq_socket import MAX_COPIED_NBYTES, MAX_FRAMES_PER_WAKEUP, LoopSocket


class Ends:
    """A socket under test and a plain one that is connected to it."""

    def __init__(self, *, views: bool) -> None:
        self.taken: list[list[Any]] = []
        self.answer: list[bytes] | None = None
        self.fail_once = False
        self._context = zmq.Context()
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.bind(ANY)
        self.far = self._context.socket(zmq.DEALER)
        self.far.setsockopt(zmq.LINGER, 0)
        self.far.connect(dealer.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        self.near = LoopSocket(dealer, self._take, lambda: None, views=views)

    def _take(self, parts: list[Any]) -> None:
        self.taken.append(parts)
        if self.fail_once:
            self.fail_once = False
            raise ZeroDivisionError("a bug of the owner")
        if self.answer is not None:
            self.near.send(self.answer)

    def far_parts(self) -> list[bytes] | None:
        try:
            return self.far.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.near.close(linger_ms=0)
        self.far.close(linger=0)
        self._context.term()


@pytest.fixture(params=[False, True], ids=["bytes", "views"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    made = Ends(views=request.param)
    yield made
    made.close()


async def test_parts_arrive_whole_whatever_they_are_made_of(ends: Ends) -> None:
    sent = [b"", b"x", b"y" * MAX_COPIED_NBYTES, b"z" * (MAX_COPIED_NBYTES + 1), b"end"]
    ends.far.send_multipart(sent)
    await until(lambda: bool(ends.taken))
    assert ends.taken == [sent]


@pytest.mark.parametrize("views", [False, True])
async def test_only_long_parts_are_views_and_only_where_they_are_wanted(views: bool) -> None:
    ends = Ends(views=views)
    ends.far.send_multipart([b"y" * MAX_COPIED_NBYTES, b"z" * (MAX_COPIED_NBYTES + 1)])
    await until(lambda: bool(ends.taken))
    assert [type(part) for part in ends.taken[0]] == [bytes, memoryview if views else bytes]
    ends.close()


async def test_a_view_outlives_its_socket() -> None:
    ends = Ends(views=True)
    ends.far.send(b"z" * 300_000)
    await until(lambda: bool(ends.taken))
    ends.close()
    assert ends.taken == [[b"z" * 300_000]]


async def test_every_message_of_a_burst_arrives_in_order(ends: Ends) -> None:
    count = 3 * MAX_FRAMES_PER_WAKEUP + 1
    for number in range(count):
        ends.far.send(b"%d" % number)
    await until(lambda: len(ends.taken) >= count)
    assert ends.taken == [[b"%d" % number] for number in range(count)]


async def test_answers_from_within_a_message_do_not_lose_the_next_one(ends: Ends) -> None:
    ends.answer = [b"head", b"body"]
    for number in range(200):
        ends.far.send(b"ask")
        await until(lambda number=number: len(ends.taken) > number)  # type: ignore[misc]
    got: list[list[bytes]] = []

    def drained() -> bool:
        while (parts := ends.far_parts()) is not None:
            got.append(parts)
        return len(got) == 200

    await until(drained)
    assert got == [[b"head", b"body"]] * 200


async def test_sends_that_swallow_an_edge_do_not_lose_the_message(ends: Ends) -> None:
    """A send looks at ZeroMQ's mailbox, after which the descriptor stays silent."""
    ends.far.send(b"we are connected")
    await until(lambda: bool(ends.taken))
    for number in range(200):
        ends.far.send(b"ask")
        for _ in range(3):
            ends.near.send([b"noise"])
        await until(lambda number=number: len(ends.taken) > number + 1)  # type: ignore[misc]
    assert len(ends.taken) == 201


async def test_a_bug_of_the_owner_is_reported_and_loses_no_other_message(ends: Ends) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    ends.fail_once = True
    for number in range(5):
        ends.far.send(b"%d" % number)
    await until(lambda: len(ends.taken) == 5)
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


async def test_nothing_is_handed_out_after_a_close_from_within_a_message() -> None:
    ends = Ends(views=True)
    taken = []

    def close(parts: list[Any]) -> None:
        taken.append(parts)
        ends.near.close(linger_ms=0)

    ends.near._on_message = close
    for _ in range(5):
        ends.far.send(b"x")
    await until(lambda: bool(taken))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(taken) == 1
    ends.near.send([b"ignored"])
    ends.close()
