"""Claims about small reads whose answer the application's thread watches for by itself.

The owner's I/O thread is held, so that a watch lasts for as long as the test wants; whether a watch
may last is decided by a vigil of the test's, not by the clock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from tests.transfer.bulk_harness import (
    LIMIT_S,
    checked_engines,
    ones,
    pattern,
    soon,
    until,
    whole,
)
from transfer import tcp_answer
from transfer.engine import TransferEngine
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost
from transfer.interface import deadline_after
from transfer.region import HostRegion
from transfer.tcp_answer import AnswerWatch
from transfer.tcp_client import ClientLink
from transfer.tcp_codec import COPIED_NBYTES, Header
from transfer.tcp_operation import SMALL_NBYTES
from transfer.token import decode_token
from transfer.vigil import GAP_S, SPIN_S, Vigil

NBYTES = 4096
FAR_S = 3600.0


class Tireless(Vigil):
    """Lasts until it is told otherwise."""

    over = False

    def begin(self, now_s: float) -> bool:
        return True

    def look_from(self, now_s: float) -> bool:
        return not self.over

    def lasts(self, now_s: float) -> bool:
        return not self.over


class Unwatched(Exception):
    """A read was started, and nobody watches for its answer."""


class Scene:
    """An owner, and a reader that is connected to it and watches tirelessly."""

    def __init__(self, owner: TransferEngine, reader: TransferEngine, nbytes: int) -> None:
        self.owner, self.reader = owner, reader
        self.source, self.local = owner.allocate(nbytes), reader.allocate(nbytes)
        self.source.view[:] = pattern(nbytes).data
        self.token = self.source.export("r")
        self.vigil = Tireless()
        self.watch._vigil = self.vigil

    @property
    def watch(self) -> AnswerWatch:
        assert self.reader._tcp is not None
        return self.reader._tcp._watch

    async def read(self, into: HostRegion | None = None, deadline_s: float | None = None) -> None:
        into = into or self.local
        deadline_s = deadline_s or soon()
        await self.reader.read(self.token, whole(into.nbytes), into=into, deadline_s=deadline_s)

    async def begun(self, limit_s: float = LIMIT_S) -> asyncio.Task[None]:
        """Start a read; return when its answer is watched for. The owner is held meanwhile."""
        io = self.reader._io
        assert io is not None
        async with asyncio.timeout(LIMIT_S):
            while not io.try_now(lambda: True):  # noqa: ASYNC110 - asleep, and left alone
                await asyncio.sleep(0.001)
        task = asyncio.create_task(self.read(deadline_s=deadline_after(limit_s)))
        await asyncio.sleep(0)
        if self.watch._link is None:
            task.cancel()
            await asyncio.wait({task})
            raise Unwatched
        return task


@contextmanager
def held(engine: TransferEngine) -> Iterator[None]:
    """Keep the engine's I/O thread from serving anybody."""
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go_on.wait(LIMIT_S)

    assert engine._io is not None
    engine._io.call(hold)
    assert inside.wait(LIMIT_S)
    try:
        yield
    finally:
        go_on.set()


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    async with a_scene(monkeypatch, NBYTES) as made:
        yield made


@asynccontextmanager
async def a_scene(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> AsyncIterator[Scene]:
    async with checked_engines("tcp") as engines:
        monkeypatch.setattr(tcp_answer, "OFTEN_S", FAR_S)  # however slow this machine is
        made = Scene(await engines.make(), await engines.make(), nbytes)
        await made.read()
        made.local.view[:] = bytes(nbytes)
        yield made


@pytest.fixture
def answered_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads on which answers were taken."""
    threads: list[int] = []
    on_done = ClientLink._on_done

    def noted(self: ClientLink, header: Header, body: bytes) -> None:
        threads.append(threading.get_ident())
        on_done(self, header, body)

    monkeypatch.setattr(ClientLink, "_on_done", noted)
    return threads


async def test_a_small_answer_is_taken_by_the_thread_that_waits_for_it(
    scene: Scene, answered_on: list[int]
) -> None:
    answered_on.clear()
    with held(scene.owner):
        task = await scene.begun()
        answered_on.clear()
    await task
    assert scene.local.view == scene.source.view
    assert answered_on == [threading.get_ident()]
    assert scene.watch._link is None
    await scene.read()


async def test_the_application_goes_on_while_an_answer_is_watched_for(scene: Scene) -> None:
    with held(scene.owner):
        task = await scene.begun()
        for _ in range(100):
            await asyncio.sleep(0)
        assert scene.watch._link is not None
        assert not task.done()
    await task


async def test_when_the_vigil_is_over_the_answer_is_the_io_threads(
    scene: Scene, answered_on: list[int]
) -> None:
    with held(scene.owner):
        task = await scene.begun()
        scene.vigil.over = True
        await until(lambda: scene.watch._link is None)
        answered_on.clear()
    await task
    assert scene.local.view == scene.source.view
    assert threading.get_ident() not in answered_on


async def test_another_operation_with_the_peer_ends_the_watch_and_both_are_answered(
    scene: Scene,
) -> None:
    """It may be large: its bytes are not for the application's thread."""
    other = scene.reader.allocate(NBYTES)
    with held(scene.owner):
        task = await scene.begun()
        second = asyncio.create_task(scene.read(other))
        await until(lambda: scene.watch._link is None)
    await asyncio.gather(task, second)
    assert scene.local.view == scene.source.view == other.view


async def test_a_read_that_is_cancelled_while_it_is_watched_leaves_its_memory_alone(
    scene: Scene,
) -> None:
    with held(scene.owner):
        task = await scene.begun()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ones(scene.local)
    await scene.read(scene.reader.allocate(NBYTES))  # behind the answer that nobody wants
    assert bytes(scene.local.view) == b"\x01" * NBYTES


async def test_a_deadline_ends_a_watch_that_would_go_on(scene: Scene) -> None:
    with held(scene.owner):
        task = await scene.begun(0.05)
        with pytest.raises(DeadlineExceeded):
            await task
    await scene.read()
    assert scene.local.view == scene.source.view


async def test_a_connection_that_breaks_ends_the_watch_and_the_next_read_connects_anew(
    scene: Scene,
) -> None:
    assert scene.reader._tcp is not None
    with held(scene.owner):
        task = await scene.begun()
        scene.reader._tcp.disrupt(decode_token(scene.token).endpoint)
        with pytest.raises(PeerLost):
            await task
    await scene.read()
    assert scene.local.view == scene.source.view


async def test_a_read_that_is_cancelled_as_its_connection_breaks_leaves_no_error_behind(
    scene: Scene,
) -> None:
    """Nobody asks any more how it ended: the event loop has nothing to report (``conftest``)."""
    assert scene.reader._tcp is not None
    with held(scene.owner):
        task = await scene.begun()
        scene.reader._tcp.disrupt(decode_token(scene.token).endpoint)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await scene.read()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_an_engine_that_ends_while_it_watches_ends_the_read(scene: Scene, how: str) -> None:
    with held(scene.owner):
        task = await scene.begun()
        if how == "close":
            await scene.reader.close()
        else:
            scene.reader.abort()
        with pytest.raises(PeerClosed):
            await task


async def test_an_application_that_computes_keeps_no_answer_that_is_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner waits for the word that it was taken, when it revokes."""
    answered = threading.Event()
    async with a_scene(monkeypatch, 2 * COPIED_NBYTES) as scene:
        on_done = ClientLink._on_done

        def noted(self: ClientLink, header: Header, body: bytes) -> None:
            on_done(self, header, body)
            answered.set()

        monkeypatch.setattr(ClientLink, "_on_done", noted)
        with held(scene.owner):
            task = await scene.begun()
        assert answered.wait(LIMIT_S), "this thread computes, and its loop stands still"
        await task
        assert scene.local.view == scene.source.view
        await asyncio.to_thread(scene.source.revoke)


async def test_a_large_read_is_never_watched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_scene(monkeypatch, SMALL_NBYTES + 1) as scene:
        with held(scene.owner), pytest.raises(Unwatched):  # its bytes come on the I/O thread
            await scene.begun()
        await scene.read()


async def test_a_peer_whose_answers_take_long_is_not_watched_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_answer, "OFTEN_S", 0.0)
    monkeypatch.setattr(tcp_answer, "MOVED_PER_S", float("inf"))
    with held(scene.owner), pytest.raises(Unwatched):  # else a core would be burnt for each of them
        await scene.begun()
    await scene.read()


async def test_bytes_that_come_are_a_reason_to_go_on_watching() -> None:
    now_s = 0.0
    async with checked_engines("tcp") as engines:
        reader = await engines.make()
        assert reader._io is not None
        watch = AnswerWatch(reader._io, lambda: now_s)
        watch._vigil.begin(now_s)
        watch._progressed = True
        for _ in range(5):
            now_s += 0.9 * SPIN_S
            assert watch._goes_on()
        watch._progressed = False
        now_s += 0.1 * GAP_S
        assert watch._goes_on()
        now_s += 1.1 * SPIN_S
        assert not watch._goes_on()
