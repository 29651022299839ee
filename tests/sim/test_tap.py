"""Handlers that are looked at answer as they would have, and what goes wrong in them is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.sim.tap import tap
from transfer.channel import Caller, Service
from transfer.errors import RemoteFailed
from transfer.identity import Identity, Incarnation, NodeId, Role

ASKER = Identity(node_id=NodeId("asker"), role=Role.OBSERVER, incarnation=Incarnation("life-1"))
CALLER = Caller(ASKER, 1e9)


class Ask(msgspec.Struct):
    """What the handlers of these tests are asked."""

    num_items: int = 3


class Item(msgspec.Struct):
    """What they answer."""

    number: int


class AskForItems(msgspec.Struct):
    """A third kind of message."""


class Notes:
    """A witness that writes everything down."""

    name = "node"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def asked(self, message: Any) -> None:
        self.seen.append("asked")

    def answered(self, message: Any, caller: Caller, reply: Any, started_s: float) -> None:
        self.seen.append(reply.number)

    def failed(self, message: Any, error: BaseException) -> None:
        self.seen.append(type(error))

    async def hold(self, name: str, message: Any) -> None:
        self.seen.append("held")


@pytest.fixture
def notes() -> Notes:
    return Notes()


def stream_of(notes: Notes, error: Exception | None = None) -> Any:
    """A stream that is looked at: ``error`` comes after its items."""

    async def handler(message: Ask, caller: Caller) -> AsyncIterator[Item]:
        try:
            for number in range(message.num_items):
                yield Item(number)
            if error is not None:
                raise error
        finally:
            notes.seen.append("ended")

    service = Service()
    service.on_stream(Ask, handler)
    tap(service, notes, {Ask: notes.hold})
    return service.streams[Ask]


async def test_the_items_of_a_stream_are_told_as_they_come(notes: Notes) -> None:
    items = [item.number async for item in stream_of(notes)(Ask(), CALLER)]
    assert items == [0, 1, 2]
    assert notes.seen == ["held", "asked", 0, 1, 2, "ended"]


@pytest.mark.parametrize("num_items", [0, 2])
async def test_an_error_of_a_stream_is_told_and_raised(notes: Notes, num_items: int) -> None:
    with pytest.raises(KeyError):
        async for _ in stream_of(notes, KeyError("no such thing"))(Ask(num_items), CALLER):
            pass
    assert notes.seen[-2:] == ["ended", KeyError]


async def test_a_stream_that_cannot_even_begin_is_told(notes: Notes) -> None:
    def handler(message: Ask, caller: Caller) -> AsyncIterator[Item]:
        raise KeyError(message)

    service = Service()
    service.on_stream(Ask, handler)
    tap(service, notes, {})
    with pytest.raises(KeyError):
        async for _ in service.streams[Ask](Ask(), CALLER):
            pass
    assert notes.seen == ["asked", KeyError]


async def test_what_a_stream_means_to_raise_is_no_error_of_its_own(notes: Notes) -> None:
    with pytest.raises(RemoteFailed):
        async for _ in stream_of(notes, RemoteFailed("busy", "later"))(Ask(0), CALLER):
            pass
    assert notes.seen == ["held", "asked", "ended"]


async def test_a_stream_that_is_closed_early_has_ended_by_then(notes: Notes) -> None:
    items = stream_of(notes)(Ask(), CALLER)
    assert (await anext(items)).number == 0
    await items.aclose()
    assert notes.seen == ["held", "asked", 0, "ended"]


async def test_a_service_is_looked_at_whole(notes: Notes) -> None:
    """Whatever kinds of handlers it has."""

    async def fails_later(message: Any, caller: Caller) -> Item:
        raise KeyError(message)

    def fails(message: Any, caller: Caller) -> Item:
        raise KeyError(message)

    async def fails_in_pieces(message: Any, caller: Caller) -> AsyncIterator[Item]:
        raise KeyError(message)
        yield Item(0)

    service = Service()
    service.on(Ask, fails_later)
    service.on_prompt(Item, fails)
    service.on_stream(AskForItems, fails_in_pieces)
    tables = [name for name, table in vars(service).items() if isinstance(table, dict)]
    assert sorted(tables) == ["_prompt", "_requests", "_streams"], "a new kind of handler?"
    tap(service, notes, {})
    with pytest.raises(KeyError):
        await service.requests[Ask](Ask(), CALLER)
    with pytest.raises(KeyError):
        service.prompt[Item](Item(0), CALLER)
    with pytest.raises(KeyError):
        await anext(aiter(service.streams[AskForItems](AskForItems(), CALLER)))
    assert notes.seen == ["asked", KeyError] * 3
