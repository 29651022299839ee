"""A master that goes holds up nobody: with a library whose calls end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from kvstore.mooncake import MooncakeConfig, MooncakeStore
from kvstore.mooncake.binding import RPC_FAILED, Library, NativeStore
from kvstore.mooncake.watch import MasterWatch
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.kvstore.pages import SPEC, empty, filled, sequence
from transfer.engine import TransferEngine
from transfer.interface import deadline_after

NEVER_S = 3600.0
LIMIT_S = 60.0
POLL_S = 0.002
KEYS = [page.key for page in sequence(range(8))]


class FakeNative:
    """Everything is there. While a gate is closed, the calls behind it do not end."""

    def __init__(self) -> None:
        self.master, self.segment = threading.Event(), threading.Event()
        self.asked: list[list[str]] = []
        self.reserved: list[list[str]] = []
        self.open_all()

    def open_all(self) -> None:
        self.master.set()
        self.segment.set()

    def setup(self, *args: Any) -> int:
        return 0

    def close(self) -> int:
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.asked.append(keys)
        self.master.wait()
        return [1] * len(keys)

    def batch_get_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[int]:
        self.segment.wait()
        self.master.wait()
        return [RPC_FAILED] * len(keys)

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: Any) -> list[int]:
        self.reserved.append(keys)
        self.master.wait()
        return [RPC_FAILED] * len(keys)


class FakeLibrary:
    def __init__(self, native: FakeNative) -> None:
        self._native = native

    def new_store(self) -> NativeStore:
        return cast("NativeStore", self._native)

    def replicate_config(self, *, replicas: int, pin: bool, pin_s: float | None) -> None:
        return None


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Where somebody listens, as a master would."""

    def take(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
def native() -> FakeNative:
    return FakeNative()


def config_of(port: int, *, ask_s: float) -> MooncakeConfig:
    return MooncakeConfig(
        master=f"127.0.0.1:{port}", overdue_s=0.02, ask_s=ask_s, backoff_s=0.01, backoff_max_s=0.02
    )


@pytest.fixture
def ask_s() -> float:
    """For tests whose master is lost; a busy machine may lose it, too."""
    return 0.05


@pytest.fixture
async def store(native: FakeNative, port: int, ask_s: float) -> AsyncIterator[MooncakeStore]:
    config = config_of(port, ask_s=ask_s)
    store = MooncakeStore(config, spec=SPEC, library=cast("Library", FakeLibrary(native)))
    assert await store.connected(deadline_s=deadline_after(LIMIT_S))
    yield store
    native.open_all()
    await store.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - a bounded poll
            await asyncio.sleep(POLL_S)


async def everything(
    store: MooncakeStore, transfer: TransferEngine
) -> tuple[list[PageState], list[GetOutcome], list[PutOutcome]]:
    """One call of each kind, none of which may need its deadline."""
    into, gets = empty(transfer, sequence(range(8)))
    source, puts = filled(transfer, sequence(range(50, 58)))
    async with asyncio.timeout(LIMIT_S):
        matched, got, put = await asyncio.gather(
            store.match(KEYS, deadline_s=deadline_after(NEVER_S)),
            store.get(gets, into=into, deadline_s=deadline_after(NEVER_S), wait=True),
            store.put(puts, source=source, deadline_s=deadline_after(NEVER_S)),
        )
    return matched, got.outcomes, put.outcomes


READY = [PageState.READY] * 2
NOTHING = ([PageState.ABSENT] * 2, [GetOutcome.ABSENT] * 2, [PutOutcome.FAILED] * 2)


async def test_calls_that_hang_end_every_request_long_before_its_deadline(
    store: MooncakeStore, native: FakeNative, transfer: TransferEngine
) -> None:
    native.master.clear()
    assert await everything(store, transfer) == NOTHING
    assert store.is_lost


async def test_a_lost_master_is_asked_nothing_for_a_request(
    store: MooncakeStore, native: FakeNative, transfer: TransferEngine
) -> None:
    native.master.clear()
    await everything(store, transfer)
    asked, reserved = len(native.asked), len(native.reserved)
    for _ in range(20):
        assert await everything(store, transfer) == NOTHING
    assert len(native.reserved) == reserved
    assert len(native.asked) <= asked + 1, "one probe at a time"


async def test_loss_and_recovery_are_said_and_counted(
    store: MooncakeStore,
    native: FakeNative,
    transfer: TransferEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    native.master.clear()
    await everything(store, transfer)
    assert caplog.text.count("answers no more") == 1
    assert store.counters()["master_losses"] == 1
    native.master.set()
    await until(lambda: not store.is_lost)
    assert "answers again" in caplog.text
    async with asyncio.timeout(LIMIT_S):
        while True:
            if await store.match(KEYS, deadline_s=deadline_after(LIMIT_S)) == READY:
                break
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("ask_s", [NEVER_S])
async def test_a_segment_that_stands_still_is_no_loss_of_the_master(
    store: MooncakeStore, native: FakeNative, transfer: TransferEngine
) -> None:
    native.segment.clear()
    into, gets = empty(transfer, sequence(range(8)))
    getting = asyncio.ensure_future(store.get(gets, into=into, deadline_s=deadline_after(NEVER_S)))
    await until(lambda: bool(native.asked))  # it was suspect, and answered
    assert await store.match(KEYS, deadline_s=deadline_after(LIMIT_S)) == READY
    assert not store.is_lost
    assert not getting.done()
    native.segment.set()
    assert (await getting).outcomes == [GetOutcome.FAILED] * 2


class Questions:
    """Counts the questions of a watch; ``answer`` is given once ``gate`` is open."""

    def __init__(self) -> None:
        self.num, self.answer, self.gate = 0, False, asyncio.Event()

    async def __call__(self) -> bool:
        self.num += 1
        await self.gate.wait()
        return self.answer


async def test_many_failures_ask_one_question() -> None:
    questions = Questions()
    watch = MasterWatch(MooncakeConfig(master="m:1", ask_s=NEVER_S), Counter(), questions)
    loop = asyncio.get_running_loop()
    for _ in range(50):
        failed: asyncio.Future[list[int]] = loop.create_future()
        watch.follow(failed)
        failed.set_result([1, RPC_FAILED])
    await until(lambda: questions.num > 0)
    await asyncio.sleep(0)
    assert questions.num == 1
    assert not watch.is_lost
    await watch.close()


async def test_a_loss_frees_a_permit_that_was_waited_for() -> None:
    questions = Questions()
    questions.gate.set()
    config = MooncakeConfig(master="m:1", backoff_s=NEVER_S, backoff_max_s=NEVER_S)
    watch, permits = MasterWatch(config, Counter(), questions), asyncio.Semaphore(1)
    await permits.acquire()
    waiting = [
        asyncio.ensure_future(watch.within(permits.acquire(), deadline_after(NEVER_S)))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    watch.suspect()
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*waiting) == [None] * 3
    permits.release()
    assert not permits.locked()
    await watch.close()


class Failing(Questions):
    """Raises the first ``num_failing`` times, then answers."""

    def __init__(self, num_failing: int) -> None:
        super().__init__()
        self._num_failing = num_failing

    async def __call__(self) -> bool:
        self.num += 1
        if self.num <= self._num_failing:
            raise RuntimeError("the library threw")
        return True


QUICK = MooncakeConfig(master="m:1", ask_s=LIMIT_S, backoff_s=0.001, backoff_max_s=0.001)


async def test_a_question_that_raises_is_no_answer_and_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    questions, counters = Failing(3), Counter[str]()
    watch = MasterWatch(QUICK, counters, questions)
    watch.suspect()
    await until(lambda: watch.is_lost)
    await until(lambda: not watch.is_lost)
    assert questions.num == 4
    assert counters["master_losses"] == 1
    assert caplog.text.count("the library threw") == 3
    await watch.close()


async def test_a_probe_that_breaks_is_said_and_the_next_suspicion_asks_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    questions = Failing(1)
    watch = MasterWatch(QUICK, Counter(), questions)

    def broken(reason: str) -> None:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(watch, "lose", broken)
        watch.suspect()
        await until(lambda: "a bug of ours" in caplog.text)
    watch.suspect()
    await until(lambda: questions.num == 2)
    await watch.close()


class LateLibrary(FakeLibrary):
    """Accepts nobody the first time; raises the second time."""

    def __init__(self, native: FakeNative) -> None:
        super().__init__(native)
        self.num_made = 0

    def new_store(self) -> NativeStore:
        self.num_made += 1
        if self.num_made == 2:
            raise RuntimeError("the library threw")
        return super().new_store()


async def test_a_master_that_comes_late_was_not_lost(
    native: FakeNative, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes = iter([-1])
    monkeypatch.setattr(native, "setup", lambda *args: next(codes, 0))
    config = config_of(port, ask_s=LIMIT_S).model_copy(update={"retry_s": POLL_S})
    library = LateLibrary(native)
    store = MooncakeStore(config, spec=SPEC, library=cast("Library", library))
    await until(lambda: store.is_lost)
    assert await store.connected(deadline_s=deadline_after(LIMIT_S))
    assert library.num_made == 3, "also when it raises it is tried again"
    assert not store.is_lost
    assert store.counters().get("master_losses", 0) == 0
    assert "answers again" in caplog.text
    await store.close()
