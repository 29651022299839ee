"""Claims about the I/O thread of the transfer engine."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.transfer.bulk_harness import until
from transfer.errors import PeerClosed
from transfer.io_thread import Events, IoThread, _Selector
from transfer.vigil import GAP_S, SPIN_S, Vigil

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


async def test_who_waits_for_a_thread_that_dies_hears_of_it_also_who_came_last() -> None:
    thread = IoThread("test")
    thread.start()
    dying, die = threading.Event(), threading.Event()

    def work() -> None:
        dying.set()
        die.wait(JOIN_TIMEOUT_S)
        thread.loop.stop()

    waiting = [asyncio.create_task(thread.run(asyncio.Event().wait()))]
    await asyncio.sleep(0)
    thread.call(work)
    assert await asyncio.to_thread(dying.wait, JOIN_TIMEOUT_S)
    waiting.append(asyncio.create_task(thread.run(asyncio.Event().wait())))
    await asyncio.sleep(0)
    die.set()
    for task in waiting:
        with pytest.raises(PeerClosed):
            await asyncio.wait_for(task, JOIN_TIMEOUT_S)
    thread.stop()


@pytest.fixture
def running() -> Iterator[IoThread]:
    thread = IoThread("test")
    thread.start()
    yield thread
    thread.stop()


async def lend(thread: IoThread, function: Callable[[], bool]) -> None:
    """Ask until the loop sleeps; it does soon, since nothing keeps it busy."""
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        while not thread.try_now(function):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_sleeping_loop_is_lent_to_the_calling_thread(running: IoThread) -> None:
    ran_on: list[int] = []

    def function() -> bool:
        ran_on.append(threading.get_ident())
        return True

    await lend(running, function)
    assert ran_on == [threading.get_ident()]


async def test_a_loop_that_works_is_not_lent_and_nothing_runs_beside_it(running: IoThread) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        go_on.wait(JOIN_TIMEOUT_S)

    running.call(work)
    assert await asyncio.to_thread(inside.wait, JOIN_TIMEOUT_S)
    assert not running.try_now(lambda: pytest.fail("ran beside the loop"))
    go_on.set()


async def test_what_a_borrower_schedules_is_done_though_the_loop_was_asleep(
    running: IoThread,
) -> None:
    done = threading.Semaphore(0)

    def function() -> bool:
        running.loop.call_soon(done.release)
        running.loop.call_later(0.001, done.release)
        return True

    await lend(running, function)
    for _ in range(2):
        assert await asyncio.to_thread(done.acquire, timeout=JOIN_TIMEOUT_S)


async def test_a_borrower_that_fails_gives_the_loop_back(running: IoThread) -> None:
    def function() -> bool:
        raise ValueError("of the borrower")

    with pytest.raises(ValueError, match="of the borrower"):
        await lend(running, function)
    await lend(running, lambda: True)
    assert await running.run(asyncio.sleep(0, "alive")) == "alive"


async def test_nothing_is_lent_by_a_thread_that_was_stopped() -> None:
    thread = IoThread("test")
    thread.start()
    thread.stop()
    with pytest.raises(PeerClosed):
        thread.try_now(lambda: True)


async def test_a_lent_loop_does_nothing_before_what_it_was_given_earlier(running: IoThread) -> None:
    """Else an operation would be sent on a connection that was just told to break."""
    for _ in range(200):
        await lend(running, lambda: True)  # asleep
        order: list[str] = []
        running.call(order.append, "called")
        lent = running.try_now(lambda: order.append("lent") is None)  # noqa: B023
        assert not lent or order == ["called", "lent"]


class NotedLock:
    """A lock that says when somebody is about to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waited_for = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if blocking and self._lock.locked():
            self.waited_for.set()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


async def test_a_socket_that_a_borrower_closes_as_the_loop_wakes_for_it_harms_nothing() -> None:
    """A peer resets: the borrower's send fails just when the loop is told of the reset."""
    thread = IoThread("test")
    turn = NotedLock()
    thread._selector.turn = turn  # type: ignore[assignment]
    thread.start()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def watch() -> None:
        thread.loop.add_reader(ours, pytest.fail, "called for a socket that was closed")

    await thread.run(watch())

    def function() -> bool:
        turn.waited_for.clear()
        theirs.send(b"x")
        assert turn.waited_for.wait(JOIN_TIMEOUT_S), "the loop did not wake"
        thread.loop.remove_reader(ours)
        ours.close()
        return True

    await lend(thread, function)
    assert await thread.run(asyncio.sleep(0, "alive")) == "alive"
    thread.stop()
    theirs.close()


class HeldClock:
    """Time passes by ``step_s`` with each look at the clock."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 1000.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The timeouts that the I/O thread has slept, or looked, with."""
    found: list[float | None] = []
    select = selectors.DefaultSelector.select

    def noted(self: selectors.DefaultSelector, timeout: float | None = None) -> Events:
        if isinstance(self, _Selector):
            found.append(timeout)
        return select(self, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", noted)
    return found


async def after(thread: IoThread, events: int, waits: list[float | None]) -> list[float | None]:
    """Return how the thread waited from ``events`` events on until it slept."""
    begun = threading.Event()

    def happen() -> None:
        for _ in range(events):
            thread.expect_more()
        waits.clear()
        begun.set()

    thread.call(happen)
    assert await asyncio.to_thread(begun.wait, JOIN_TIMEOUT_S)
    await until(lambda: None in waits)
    return waits[: waits.index(None)]


async def test_a_thread_of_which_nothing_is_expected_sleeps_at_once(
    running: IoThread, waits: list[float | None]
) -> None:
    assert await after(running, 0, waits) == []
    assert await after(running, 1, waits) == [], "once is no series"
    assert waits == [None], "it sleeps on"


async def test_a_thread_stays_awake_after_a_series_and_then_sleeps(
    waits: list[float | None],
) -> None:
    clock = HeldClock(GAP_S / 10)
    thread = IoThread("test", clock)
    thread.start()
    looks = await after(thread, 2, waits)
    assert looks == [0] * len(looks)
    assert 1 < len(looks) <= SPIN_S / clock.step_s + 2, "awake for SPIN_S by its clock, no longer"
    thread.stop()


async def test_a_thread_sleeps_if_a_timer_is_due_before_its_own_vigil_ends(
    waits: list[float | None],
) -> None:
    clock, fired, found = HeldClock(0.0), threading.Event(), list[float | None]()
    thread = IoThread("test", clock, vigil=Vigil(spin_s=1000.0))
    thread.start()

    def fire() -> None:
        found.extend(waits)
        clock.now_s += 1000.0  # the vigil is over
        fired.set()

    def happen() -> None:
        for _ in range(2):
            thread.expect_more()
        waits.clear()
        thread.loop.call_later(100 * SPIN_S, fire)

    thread.call(happen)
    assert await asyncio.to_thread(fired.wait, JOIN_TIMEOUT_S)
    assert found, "it has waited for the timer"
    assert 0 not in found, "and asleep"
    thread.stop()


@pytest.fixture
def awake() -> Iterator[IoThread]:
    """A thread that looks without end: its time stands still."""
    clock = HeldClock(0.0)
    thread = IoThread("test", clock)
    thread.start()
    for _ in range(2):
        thread.call(thread.expect_more)
    yield thread
    clock.now_s += SPIN_S
    thread.stop()


async def test_a_thread_that_is_awake_does_its_work(awake: IoThread) -> None:
    assert await awake.run(asyncio.sleep(0, "called")) == "called"


async def test_a_thread_that_is_awake_lends_its_loop(awake: IoThread) -> None:
    done = threading.Semaphore(0)
    await lend(awake, lambda: awake.loop.call_soon(done.release) is not None)
    assert await asyncio.to_thread(done.acquire, timeout=JOIN_TIMEOUT_S)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def lends(function: Callable[[int], object], fd: int) -> Callable[[], bool]:
    return lambda: function(fd) is None


async def watched(thread: IoThread, sock: socket.socket, heard: threading.Event) -> None:
    def on_readable() -> None:
        thread.loop.remove_reader(sock)
        heard.set()

    async def watch() -> None:
        thread.loop.add_reader(sock, on_readable)

    await thread.run(watch())


async def test_what_arrives_at_a_muted_socket_waits_until_it_is_unmuted(
    running: IoThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    (ours, theirs), heard = pair, threading.Event()
    await watched(running, ours, heard)
    await lend(running, lends(running.mute, ours.fileno()))
    theirs.send(b"x")
    for _ in range(10):  # turns of its loop, each of which would have heard
        await running.run(asyncio.sleep(0))
    assert not heard.is_set()
    await lend(running, lends(running.unmute, ours.fileno()))
    assert await asyncio.to_thread(heard.wait, JOIN_TIMEOUT_S)


async def test_unmuting_brings_back_what_is_registered_now_and_nothing_else(
    running: IoThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    """The link may have paused, or begun to wait for room, while it was muted."""
    (ours, theirs), writable = pair, threading.Event()
    await watched(running, ours, threading.Event())
    await lend(running, lends(running.mute, ours.fileno()))

    async def change() -> None:
        running.loop.remove_reader(ours)
        running.unmute(ours.fileno())
        running.loop.add_writer(ours, on_writable)
        running.mute(ours.fileno())
        running.unmute(ours.fileno())

    def on_writable() -> None:
        running.loop.remove_writer(ours)
        writable.set()

    await running.run(change())
    theirs.send(b"x")
    assert await asyncio.to_thread(writable.wait, JOIN_TIMEOUT_S)
    assert await running.run(asyncio.sleep(0, "alive")) == "alive"
