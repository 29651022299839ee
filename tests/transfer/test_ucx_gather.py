"""Many pages cost few messages, and a small read few wake-ups: through UCX itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.transfer.bulk_harness import (
    LIMIT_S,
    MIB,
    Engines,
    checked_engines,
    pattern,
    soon,
    until,
    whole,
)
from tests.transfer.ucx_support import NEEDS_UCX
from transfer.engine import TransferEngine
from transfer.errors import PeerLost
from transfer.interface import Range
from transfer.ucx_operation import UcxOperation

pytest.importorskip("ucxx")
from transfer.ucx_binding import Flight, Runs, Worker, open_context
from transfer.ucx_calls import IN_PROGRESS, NO_RESOURCE, STATUS, TRUNCATED, Refused
from transfer.ucx_ucxx import UcxxFlight, UcxxWorker, _translated

pytestmark = NEEDS_UCX
CANCELED, RESET, TIMED_OUT = -16, -25, -80  # of a request; as UCX's header numbers them
PAGE, NUM_PAGES = 368_640, 32
TRANSPORTS = pytest.mark.parametrize("tls", ["tcp", "posix,self"])


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs of each message that is sent by any worker; 1 where it is one buffer."""
    sent: list[int] = []
    send = UcxxWorker.send

    def counted(worker: UcxxWorker, buffer: object, tag: int) -> object:
        sent.append(len(buffer.runs) if isinstance(buffer, Runs) else 1)
        return send(worker, buffer, tag)

    monkeypatch.setattr(UcxxWorker, "send", counted)
    return sent


@TRANSPORTS
async def test_scattered_pages_share_messages_and_land_where_they_belong(
    tls: str, messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    nbytes = NUM_PAGES * PAGE
    order = [(index * 13) % NUM_PAGES for index in range(NUM_PAGES)]
    ranges = [Range(there * PAGE, here * PAGE, PAGE) for here, there in enumerate(order)]
    async with checked_engines("ucx") as engines:
        owner, user = await engines.make(), await engines.make()
        remote, local = owner.allocate(nbytes), user.allocate(nbytes)
        remote.view[:] = pattern(nbytes).data
        token = remote.export("rw")
        await user.read(token, ranges, into=local, deadline_s=soon())
        for there, here, _ in ranges:
            assert local.view[here : here + PAGE] == remote.view[there : there + PAGE]
        assert max(messages) > 1
        assert len(messages) < NUM_PAGES / 2, "a message for each page"
        remote.view[:] = bytes(nbytes)
        await user.write(token, ranges, source=local, deadline_s=soon())
        for there, here, _ in ranges:
            assert local.view[here : here + PAGE] == remote.view[there : there + PAGE]
        assert user.counters().fallbacks == 0


@TRANSPORTS
async def test_pages_longer_than_a_piece_land_where_they_belong(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    page, pages = 5 * MIB, [3, 1, 4, 0, 2]
    ranges = [Range(there * page, here * page, page) for here, there in enumerate(pages)]
    async with checked_engines("ucx") as engines:
        owner, user = await engines.make(), await engines.make()
        remote, local = owner.allocate(5 * page), user.allocate(5 * page)
        remote.view[:] = pattern(5 * page).data
        await user.read(remote.export("r"), ranges, into=local, deadline_s=soon())
        for there, here, _ in ranges:
            assert local.view[here : here + page] == remote.view[there : there + page]


async def small_read(owner: TransferEngine, user: TransferEngine, nbytes: int = 4096) -> None:
    remote, local = owner.allocate(nbytes), user.allocate(nbytes)
    remote.view[:] = pattern(nbytes).data
    await user.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
    assert local.view == remote.view
    remote.revoke()
    local.revoke()


async def test_a_small_read_on_a_quiet_connection_is_asked_from_the_callers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with checked_engines("ucx") as engines:
        owner, user = await engines.make(), await engines.make()
        await small_read(owner, user)  # connects, by way of the ucx thread
        assert user._ucx is not None
        handed_over: list[object] = []
        submit = user._ucx._submit

        def count(operation: object) -> None:
            handed_over.append(operation)
            submit(operation)  # type: ignore[arg-type]

        monkeypatch.setattr(user._ucx, "_submit", count)
        await until(lambda: user._ucx is not None and user._ucx._io.try_now(lambda: True))
        await small_read(owner, user)
        assert not handed_over, "the ucx thread slept: its loop could be lent"


class Lent:
    """Whether a read is being asked from the caller's thread; asyncio must not be asked then."""

    def __init__(self, user: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        assert user._ucx is not None
        self.num_times = 0
        self._now = False
        self._submit = user._ucx._submit_now
        running = asyncio.get_running_loop

        def watched() -> asyncio.AbstractEventLoop:
            assert not self._now, "the running loop is not the lent one"
            return running()

        monkeypatch.setattr(user._ucx, "_submit_now", self.submit)
        monkeypatch.setattr(asyncio, "get_running_loop", watched)

    def submit(self, operation: UcxOperation) -> bool:
        self._now = True
        try:
            lent = self._submit(operation)
        finally:
            self._now = False
        self.num_times += lent
        return lent


async def quiet_pair(engines: Engines) -> tuple[TransferEngine, TransferEngine]:
    """Return an owner and who has read from it; the ucx thread of that sleeps."""
    owner, user = await engines.make(), await engines.make()
    await small_read(owner, user)
    await until(lambda: user._ucx is not None and user._ucx._io.try_now(lambda: True))
    return owner, user


async def test_a_read_for_which_ucx_is_out_of_resources_is_asked_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with checked_engines("ucx") as engines:
        owner, user = await quiet_pair(engines)
        lent, send, refusals = Lent(user, monkeypatch), UcxxWorker.send, iter(range(3))

        def scarce(worker: UcxxWorker, buffer: object, tag: int) -> Flight:
            if next(refusals, None) is not None:
                raise BlockingIOError("status -2")
            return send(worker, buffer, tag)

        monkeypatch.setattr(UcxxWorker, "send", scarce)
        await small_read(owner, user)
        assert lent.num_times == 1
        assert next(refusals, None) is None


async def test_a_connection_that_a_borrower_finds_full_ends_on_its_own_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with checked_engines("ucx") as engines:
        owner, user = await quiet_pair(engines)
        lent = Lent(user, monkeypatch)
        with monkeypatch.context() as full:
            full.setattr("transfer.ucx_outbox.MAX_CONTROL_FLIGHTS", 0)
            with pytest.raises(PeerLost, match="does not take"):
                await small_read(owner, user)
        assert lent.num_times == 1
        await small_read(owner, user)


def test_what_ucx_says_is_translated() -> None:
    assert isinstance(_translated(Refused(NO_RESOURCE)), BlockingIOError)
    assert isinstance(_translated(Refused(RESET)), PeerLost)


class _Calls:
    """One request that ends with ``ends``, which a byte of UCX must be able to say."""

    def __init__(self, ends: int) -> None:
        self._ends = ends
        self.freed: list[int] = []

    def status(self, _request: int) -> int:
        return STATUS(self._ends).value

    def free(self, request: int) -> None:
        self.freed.append(request)


@pytest.mark.parametrize("ends", [0, TRUNCATED, CANCELED, RESET, TIMED_OUT])
def test_a_flight_keeps_its_buffer_until_it_has_completed_and_frees_its_request_once(
    ends: int,
) -> None:
    calls, buffer = _Calls(IN_PROGRESS), bytearray(8)
    flight = UcxxFlight(calls, 7, buffer)  # type: ignore[arg-type]
    assert not flight.completed
    assert flight._keeps is buffer
    calls._ends = ends
    assert flight.completed
    assert flight.completed
    assert calls.freed == [7]
    assert flight._keeps is None
    assert isinstance(flight.error(), PeerLost) == (ends < 0)


@contextmanager
def two_workers() -> Iterator[tuple[Worker, Worker]]:
    """That know each other."""
    context = open_context(only_this_host=True)
    one, other = context.open_worker(), context.open_worker()
    try:
        one.connect(other.address)
        other.connect(one.address)
        yield one, other
    finally:
        for worker in (one, other):
            worker.break_off()
            worker.close()
        context.close()


@pytest.mark.parametrize("nbytes", [1, 100, 4 * MIB])
def test_a_message_is_dropped_whatever_its_length(nbytes: int) -> None:
    limit_s = time.monotonic() + LIMIT_S
    with two_workers() as (one, other):
        flight, dropped = one.send(bytearray(nbytes), 5), None
        while dropped is None or not (dropped.completed and flight.completed):
            assert time.monotonic() < limit_s, f"not dropped within {LIMIT_S} s"
            one.progress()
            other.progress()
            if dropped is None and (message := other.probe()) is not None:
                assert (message.tag, message.nbytes) == (5, nbytes)
                dropped = other.drop(message)
        assert dropped.error() is None
