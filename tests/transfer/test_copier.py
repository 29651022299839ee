"""Copies off the event loop: every byte, in turn, and quiet once they are over."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.transfer.bulk_harness import engine_threads, pattern, soon, until
from transfer import copier as copier_module
from transfer.copier import Access, Copier, Copy
from transfer.copy_pieces import (
    HOLD_LOCK_NBYTES,
    LONG_COPY_NBYTES,
    LONG_PIECE,
    MAX_PIECE_RANGES,
    Mover,
    cut,
    piece_nbytes_of,
)
from transfer.errors import DeadlineExceeded, PeerClosed, PeerUnreachable, RegionRevoked
from transfer.interface import Priority, Range, deadline_after
from transfer.ranges import merge

PIECE = 4096


class Gatekeeper(Access):
    """Lets pieces in one by one, and remembers whose they were."""

    def __init__(self, log: list[str], name: str, *, is_open: bool = True) -> None:
        self._log = log
        self._name = name
        self.entered = threading.Event()
        self.may_enter = threading.Event()
        self.refusal: Exception | None = None
        if is_open:
            self.may_enter.set()

    def enter(self) -> None:
        self.entered.set()
        assert self.may_enter.wait(30), "nobody opened"
        if self.refusal is not None:
            raise self.refusal
        self._log.append(self._name)

    def leave(self) -> None:
        """Nothing to give back."""


class Job:
    """A copy of ``num_pieces`` pieces, its memory, and the key to it."""

    def __init__(self, log: list[str], name: str, num_pieces: int, **options: bool) -> None:
        nbytes = num_pieces * PIECE
        self.source, self.target = (
            memoryview(bytearray(pattern(nbytes))),
            memoryview(bytearray(nbytes)),
        )
        self.access = Gatekeeper(log, name, **options)

    def copy(self, priority: Priority = Priority.NOW) -> Copy:
        every = [Range(0, 0, self.source.nbytes)]
        return Copy(self.target, self.source, every, self.access, True, priority)

    @property
    def is_done(self) -> bool:
        return self.target == self.source


@pytest.fixture
async def copier() -> AsyncIterator[Copier]:
    made = Copier(threads=1, piece_nbytes=PIECE, inline_nbytes=0)
    yield made
    made.close()
    assert engine_threads() == []


def test_pieces_are_bounded_and_hold_every_byte_once() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        ranges, place = list[Range](), 0
        for _ in range(rng.randrange(1, 600)):
            nbytes = rng.choice((1, 10, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5))
            ranges.append(Range(place, place + 7, nbytes))
            place += nbytes + rng.choice((0, 1))
        pieces = list(cut(ranges, PIECE))
        assert all(0 < sum(r.nbytes for r in piece) <= PIECE for piece in pieces)
        assert all(len(piece) <= MAX_PIECE_RANGES for piece in pieces)
        assert merge([r for piece in pieces for r in piece]) == merge(ranges)


def test_long_copies_have_longer_pieces_up_to_a_limit() -> None:
    assert piece_nbytes_of(LONG_COPY_NBYTES - 1, PIECE) == PIECE
    assert piece_nbytes_of(LONG_COPY_NBYTES, PIECE) == LONG_PIECE * PIECE
    assert piece_nbytes_of(1 << 40, PIECE) == LONG_PIECE * PIECE


def test_a_range_that_fits_a_piece_is_not_cut() -> None:
    ranges = [Range(i * 3000, i * 5000, 3000) for i in range(4)]
    assert list(cut(ranges, PIECE)) == [[r] for r in ranges]


@pytest.mark.parametrize("nbytes", [1, HOLD_LOCK_NBYTES, HOLD_LOCK_NBYTES + 1, 100_003])
@pytest.mark.parametrize("to_local", [True, False])
def test_a_move_touches_its_ranges_and_nothing_else(nbytes: int, to_local: bool) -> None:
    local, remote = pattern(nbytes + 20, 1), pattern(nbytes + 20, 2)
    before_local, before_remote = local.copy(), remote.copy()
    Mover(local.data, remote.data, to_local=to_local).move([Range(5, 9, nbytes)])
    if to_local:
        before_local[9 : 9 + nbytes] = before_remote[5 : 5 + nbytes]
    else:
        before_remote[5 : 5 + nbytes] = before_local[9 : 9 + nbytes]
    assert np.array_equal(local, before_local)
    assert np.array_equal(remote, before_remote)


@pytest.mark.parametrize("wrong", [Range(1, 0, 50_000), Range(0, 1, 50_000), Range(-1, 0, 20_000)])
def test_a_move_out_of_bounds_is_our_bug_and_touches_nothing(wrong: Range) -> None:
    local, remote = memoryview(bytearray(50_000)), memoryview(b"x" * 50_000)
    with pytest.raises(AssertionError):
        Mover(local, remote, to_local=True).move([wrong])
    assert local == bytes(50_000)


async def test_an_urgent_copy_overtakes_background_ones_on_a_busy_thread(copier: Copier) -> None:
    log: list[str] = []
    running = Job(log, "r", 3, is_open=False)
    background, urgent = Job(log, "b", 3), Job(log, "n", 3)
    async with asyncio.TaskGroup() as group:
        group.create_task(copier.copy(running.copy(Priority.BACKGROUND), soon()))
        await until(running.access.entered.is_set)
        group.create_task(copier.copy(background.copy(Priority.BACKGROUND), soon()))
        await until(lambda: len(copier._queue) == 1)
        group.create_task(copier.copy(urgent.copy(Priority.NOW), soon()))
        await until(lambda: len(copier._queue) == 2)
        running.access.may_enter.set()
    assert "".join(log).startswith("rnnn")
    assert all(job.is_done for job in (running, background, urgent))


async def test_a_small_copy_does_not_wait_for_a_huge_one(copier: Copier) -> None:
    log: list[str] = []
    huge, small = Job(log, "h", 1000, is_open=False), Job(log, "s", 1)
    async with asyncio.TaskGroup() as group:
        group.create_task(copier.copy(huge.copy(), soon()))
        await until(huge.access.entered.is_set)
        group.create_task(copier.copy(small.copy(), soon()))
        await until(lambda: len(copier._queue) == 1)
        huge.access.may_enter.set()
    assert "".join(log[:3]) == "hsh"


async def test_a_held_copy_leaves_the_other_thread_to_others() -> None:
    copier, log = Copier(threads=2, piece_nbytes=PIECE, inline_nbytes=0), list[str]()
    held, other = Job(log, "h", 8, is_open=False), Job(log, "o", 8)
    task = asyncio.create_task(copier.copy(held.copy(), soon()))
    await until(held.access.entered.is_set)
    await copier.copy(other.copy(), soon())
    assert other.is_done
    held.access.may_enter.set()
    await task
    assert held.is_done
    copier.close()


async def test_a_huge_copy_is_shared_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "PARALLEL_NBYTES", PIECE)
    both_inside = threading.Barrier(2)

    class Meeting(Gatekeeper):
        def enter(self) -> None:
            both_inside.wait(30)

    copier, job = Copier(threads=2, piece_nbytes=PIECE, inline_nbytes=0), Job([], "a", 8)
    job.access = Meeting([], "a")
    await copier.copy(job.copy(), soon())
    assert job.is_done
    copier.close()


async def test_the_loop_runs_while_bytes_are_copied(copier: Copier) -> None:
    job = Job([], "a", 2, is_open=False)
    task = asyncio.create_task(copier.copy(job.copy(), soon()))
    await until(job.access.entered.is_set)
    await asyncio.sleep(0)  # the loop is free although the copy stands still
    assert not task.done()
    job.access.may_enter.set()
    await task


@pytest.mark.parametrize("how", ["cancel", "deadline", "refusal"])
async def test_a_copy_that_ends_early_is_quiet_and_lets_the_next_one_run(
    copier: Copier, how: str
) -> None:
    ending = Job([], "a", 4, is_open=False)
    task = asyncio.create_task(copier.copy(ending.copy(), soon()))
    await until(ending.access.entered.is_set)
    if how == "cancel":
        task.cancel()
    elif how == "refusal":
        ending.access.refusal = RegionRevoked("gone")
    else:
        copier._expire(*copier._active)  # what the timer of the deadline calls
    await asyncio.sleep(0)
    assert not task.done(), "a piece runs: the memory is not quiet"
    ending.access.may_enter.set()
    errors = {"deadline": DeadlineExceeded, "refusal": RegionRevoked}
    with pytest.raises(errors.get(how, asyncio.CancelledError)):
        await task
    assert ending.target[PIECE:] == bytes(3 * PIECE)
    later = Job([], "b", 4)
    await copier.copy(later.copy(), soon())
    assert later.is_done


async def test_what_is_queued_ends_at_once(copier: Copier) -> None:
    running = Job([], "r", 2, is_open=False)
    late, cancelled = Job([], "l", 2), Job([], "c", 2)
    task = asyncio.create_task(copier.copy(running.copy(), soon()))
    await until(running.access.entered.is_set)
    doomed = asyncio.create_task(copier.copy(cancelled.copy(), soon()))
    await until(lambda: len(copier._queue) == 1)
    with pytest.raises(DeadlineExceeded):
        await copier.copy(late.copy(), deadline_after(0.01))
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert not task.done()
    running.access.may_enter.set()
    await task
    assert not any(late.target)
    assert not any(cancelled.target)


async def test_close_ends_what_runs_and_what_waits(copier: Copier) -> None:
    running, waiting = Job([], "r", 4, is_open=False), Job([], "w", 4)
    tasks = [asyncio.create_task(copier.copy(job.copy(), soon())) for job in (running, waiting)]
    await until(running.access.entered.is_set)
    closing = asyncio.create_task(asyncio.to_thread(copier.close))
    await until(lambda: copier._closed)
    running.access.may_enter.set()
    await closing
    for task in tasks:
        with pytest.raises(PeerClosed):
            await task
    assert not any(waiting.target)
    with pytest.raises(PeerClosed):
        await copier.copy(waiting.copy(), soon())


async def test_the_queue_is_bounded_for_each_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier_module, "MAX_QUEUED_COPIES", 2)
    copier = Copier(threads=1, piece_nbytes=PIECE, inline_nbytes=0)
    held = [Job([], "h", 1, is_open=False) for _ in range(2)]
    tasks = [asyncio.create_task(copier.copy(job.copy(), soon())) for job in held]
    await until(lambda: len(copier._active) == 2)
    with pytest.raises(DeadlineExceeded, match="2 copies"):
        await copier.copy(Job([], "x", 1).copy(), deadline_after(0.01))
    pushed = Job([], "b", 1)
    tasks.append(asyncio.create_task(copier.copy(pushed.copy(Priority.BACKGROUND), soon())))
    await until(lambda: len(copier._active) == 3)
    for job in held:
        job.access.may_enter.set()
    await asyncio.gather(*tasks)
    assert pushed.is_done
    copier.close()


@pytest.fixture
def bugs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ended threads, in place of a warning."""
    caught: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(args.exc_type.__name__))
    return caught


async def test_a_bug_in_a_copy_thread_is_raised_and_others_go_on(
    copier: Copier, bugs: list[str]
) -> None:
    broken, fine = Job([], "a", 2), Job([], "b", 2)
    broken.access.refusal = ZeroDivisionError()
    with pytest.raises(AssertionError, match="a bug of ours"):
        await copier.copy(broken.copy(), soon())
    await copier.copy(fine.copy(), soon())
    assert fine.is_done
    await until(lambda: bugs == ["ZeroDivisionError"])


async def test_a_bug_in_the_only_thread_does_not_strand_what_waits(
    copier: Copier, bugs: list[str]
) -> None:
    broken, waiting = Job([], "a", 2, is_open=False), Job([], "b", 2)
    broken.access.refusal = ZeroDivisionError()
    task = asyncio.create_task(copier.copy(broken.copy(), soon()))
    await until(broken.access.entered.is_set)
    other = asyncio.create_task(copier.copy(waiting.copy(), soon()))
    await until(lambda: len(copier._queue) == 1)
    broken.access.may_enter.set()
    with pytest.raises(AssertionError):
        await task
    await other
    assert waiting.is_done
    await until(lambda: bugs == ["ZeroDivisionError"])


def exhausted(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_without_a_thread_nothing_is_copied_then_or_later(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, fine = Job([], "a", 2), Job([], "b", 2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        with pytest.raises(PeerUnreachable, match="no thread to copy with"):
            await copier.copy(refused.copy(), soon())
    await copier.copy(fine.copy(), soon())
    assert fine.is_done
    assert not any(refused.target), "touched after the operation was over"


async def test_the_only_thread_that_the_system_grants_does_all_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copier, log = Copier(threads=2, piece_nbytes=PIECE, inline_nbytes=0), list[str]()
    held, others = Job(log, "h", 2, is_open=False), [Job(log, "o", 2) for _ in range(3)]
    tasks = [asyncio.create_task(copier.copy(held.copy(), soon()))]
    await until(held.access.entered.is_set)
    monkeypatch.setattr(threading.Thread, "start", exhausted)
    tasks += [asyncio.create_task(copier.copy(job.copy(), soon())) for job in others]
    await until(lambda: len(copier._queue) == len(others))
    held.access.may_enter.set()
    await asyncio.gather(*tasks)
    assert all(job.is_done for job in (held, *others))
    copier.close()


async def test_small_copies_run_in_the_loop_and_start_no_thread() -> None:
    copier, job = Copier(threads=1, piece_nbytes=PIECE, inline_nbytes=4 * PIECE), Job([], "a", 4)
    copying = copier.copy(job.copy(), soon())
    with pytest.raises(StopIteration):
        copying.send(None)
    assert job.is_done
    assert engine_threads() == []
    copier.close()
