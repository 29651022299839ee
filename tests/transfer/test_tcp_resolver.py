"""Name look-ups that hang, fail, or come too many at a time."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from transfer import tcp_resolver
from transfer.errors import PeerUnreachable
from transfer.tcp_resolver import Address, Resolver

HERE = Address(socket.AF_INET, "127.0.0.1", 80)
LIMIT_S = 20.0


class Lookups:
    """A name server that answers when told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = threading.Event()
        self.problem: Exception | None = None
        self._begun = threading.Semaphore(0)

    def __call__(self, host: str, port: int) -> list[Address]:
        self.asked.append(host)
        self._begun.release()
        assert self.answer.wait(LIMIT_S), "nobody let the name server answer"
        if self.problem is not None:
            raise self.problem
        return [HERE] * 100

    async def begun(self) -> None:
        """Wait until one more look-up is under way."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=LIMIT_S)


@pytest.fixture
def lookups() -> Iterator[Lookups]:
    server = Lookups()
    yield server
    server.answer.set()


async def test_literal_addresses_are_not_looked_up(lookups: Lookups) -> None:
    resolver = Resolver(lookups)
    assert await resolver.resolve("127.0.0.1", 80) == [HERE]
    assert await resolver.resolve("::1", 80) == [Address(socket.AF_INET6, "::1", 80)]
    assert lookups.asked == []


async def test_those_who_ask_for_the_same_name_share_a_look_up(lookups: Lookups) -> None:
    resolver = Resolver(lookups)
    asking = [asyncio.create_task(resolver.resolve("store.example", 80)) for _ in range(5)]
    await lookups.begun()
    lookups.answer.set()
    found = await asyncio.gather(*asking)
    assert lookups.asked == ["store.example"]
    assert all(each == [HERE] * tcp_resolver.MAX_ADDRESSES for each in found)


async def test_cancelling_one_asker_leaves_the_others_their_answer(lookups: Lookups) -> None:
    resolver = Resolver(lookups)
    one = asyncio.create_task(resolver.resolve("store.example", 80))
    other = asyncio.create_task(resolver.resolve("store.example", 80))
    await lookups.begun()
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    lookups.answer.set()
    assert HERE in await other


async def test_look_ups_that_hang_are_bounded_and_their_end_makes_room(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_resolver, "MAX_LOOKUPS", 2)
    resolver = Resolver(lookups)
    hung = [asyncio.create_task(resolver.resolve(name, 80)) for name in ("a", "b")]
    await lookups.begun()
    await lookups.begun()
    with pytest.raises(PeerUnreachable, match="2 look-ups hang"):
        await resolver.resolve("c", 80)
    lookups.answer.set()
    await asyncio.gather(*hung)
    assert HERE in await resolver.resolve("c", 80)


@pytest.mark.parametrize("kind", [socket.gaierror, UnicodeError, ValueError])
async def test_a_name_that_does_not_resolve_is_unreachable(
    lookups: Lookups, kind: type[Exception]
) -> None:
    lookups.problem = kind("no such name")
    lookups.answer.set()
    with pytest.raises(PeerUnreachable, match="no such name"):
        await asyncio.wait_for(Resolver(lookups).resolve("nowhere.example", 80), LIMIT_S)


async def test_a_look_up_without_a_thread_is_refused_and_takes_no_room(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = Resolver(lookups)
    lookups.answer.set()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        with pytest.raises(PeerUnreachable, match="no thread"):
            await resolver.resolve("store.example", 80)
    assert HERE in await resolver.resolve("store.example", 80)


async def test_the_system_knows_its_own_name() -> None:
    found = await Resolver().resolve("localhost", 80)
    assert {address.host for address in found} <= {"127.0.0.1", "::1"}


def test_a_look_up_that_outlives_its_loop_ends_quietly(lookups: Lookups) -> None:
    async def ask_and_leave() -> None:
        asking = asyncio.create_task(Resolver(lookups).resolve("store.example", 80))
        await lookups.begun()
        asking.cancel()

    asyncio.run(ask_and_leave())
    (thread,) = [t for t in threading.enumerate() if t.name == "kvferry-lookup"]
    lookups.answer.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
