"""One transport's session over loopback: every kind of wrong byte is noticed, nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from launch.doctor import grid
from launch.doctor.grid import BATCH_MAX, CASE_NBYTES_MAX, LATENCY, Case
from launch.doctor.measure import CHECKSUM, measure
from launch.doctor.memory import GONE, TransportUnavailable
from launch.doctor.messages import CheckMemory, Done, FillMemory, MemoryChecked, OpenMemory
from launch.doctor.options import DoctorOptions
from launch.doctor.pattern import SEED_MAX
from launch.doctor.peer import Link, in_this_process
from launch.doctor.rows import Row, Unavailable
from launch.doctor.server import DoctorService, hello
from launch.doctor.session import Session, open_session
from transfer.channel import Caller
from transfer.counters import TransferCounters
from transfer.errors import RemoteFailed
from transfer.interface import Range, deadline_after
from transfer.zmq_network import ZmqNetwork

pytestmark = pytest.mark.net

CASE = Case(4096, 8)
OPTIONS = DoctorOptions(rounds=1)


@asynccontextmanager
async def link() -> AsyncIterator[Link]:
    network = ZmqNetwork()
    try:
        async with in_this_process(network, OPTIONS, None) as opened:
            yield opened
    finally:
        await network.close()


@asynccontextmanager
async def loopback() -> AsyncIterator[Session]:
    async with link() as to, open_session(to, "loopback", CASE.nbytes, OPTIONS, None) as session:
        yield session


async def test_right_bytes_are_verified_on_both_ends() -> None:
    async with loopback() as session:
        assert await session.verify(CASE) == ("", "")
        await session.timed("read", CASE)
        await session.timed("write", CASE)
        assert await session.still_verified(CASE) == ""


def _swapped(ranges: Sequence[Range]) -> list[Range]:
    first, second, *rest = ranges
    return [first._replace(local_offset=second.local_offset), second, *rest]


def _shifted(ranges: Sequence[Range]) -> list[Range]:
    return [r._replace(nbytes=r.nbytes - 8, local_offset=r.local_offset + 8) for r in ranges]


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize(
    "tampered",
    [_swapped, _shifted, lambda ranges: ranges[:-1], lambda ranges: ranges[:1] * len(ranges)],
    ids=["swapped", "shifted", "one page missing", "one page again and again"],
)
async def test_a_transport_that_moves_wrong_bytes_is_noticed(
    op: str, tampered: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback() as session:
        move = getattr(session, op)

        async def wrong(ranges: Sequence[Range]) -> None:
            for one in tampered(ranges):  # type: ignore[operator]
                await move([one])

        monkeypatch.setattr(session, op, wrong)
        verified = await session.verify(CASE)
        assert getattr(verified, op)
        assert op == "read" or not verified.read


async def test_bytes_that_change_while_it_is_timed_are_noticed_on_either_side() -> None:
    async with loopback() as session:
        await session.verify(CASE)
        session.memory.view[17] ^= 1
        assert (await session.still_verified(CASE)).startswith("on this side byte 17 ")
        await session.timed("write", CASE)  # the peer has it too now
        session.memory.view[17] ^= 1
        assert "on the other side byte " in await session.still_verified(CASE)


async def test_a_digest_that_differs_is_noticed() -> None:
    async with loopback() as session:
        await session.verify(CASE)
        digests = [b""] * CASE.batch
        assert not (await session.timed_with_checksum(CASE, digests))[1]


async def test_a_transport_that_fell_back_to_another_is_not_reported_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loopback() as session:
        engine = session.memory.engine
        monkeypatch.setattr(engine, "counters", lambda: TransferCounters(fallbacks=1))
        with pytest.raises(TransportUnavailable, match="which tcp does"):
            await session.verify(CASE)


async def test_measuring_gives_each_case_its_rows_and_the_small_read_once() -> None:
    async with link() as to:
        rows = [found async for found in measure("loopback", to, [CASE], OPTIONS, None)]
    assert all(isinstance(row, Row) and row.verified and row.ratio for row in rows)
    assert [(r.op, r.checksum, r.limit) for r in rows if isinstance(r, Row)] == [
        ("read", None, "memcpy"),
        ("read", CHECKSUM, f"memcpy + {CHECKSUM}"),
        ("write", None, "memcpy"),
        ("read", None, "memcpy"),
    ]
    assert [isinstance(r, Row) and r.is_latency for r in rows] == [False, False, False, True]
    assert isinstance(rows[-1], Row)
    assert (rows[-1].page_nbytes, rows[-1].batch) == LATENCY


async def test_a_transport_that_does_not_start_is_a_finding_with_reason_and_remedy() -> None:
    options = OPTIONS.model_copy(update={"host": "192.0.2.1"})  # of nobody (TEST-NET-1)
    async with link() as to:
        found = [one async for one in measure("tcp", to, [CASE], options, "a-secret-of-nobody")]
    assert len(found) == 1
    assert isinstance(found[0], Unavailable)
    assert "192.0.2.1" in found[0].reason
    assert found[0].remedy


async def test_another_side_that_does_not_do_what_it_was_asked_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(service: DoctorService, message: FillMemory, caller: Caller) -> Done:
        await asyncio.Event().wait()
        return Done()

    monkeypatch.setattr(DoctorService, "_fill", never)
    monkeypatch.setattr(grid, "STEP_TIMEOUT_S", 0.05)
    async with link() as to:
        (found,) = [one async for one in measure("loopback", to, [CASE], OPTIONS, None)]
    assert isinstance(found, Unavailable)
    assert found.failed
    assert "DeadlineExceeded" in found.reason
    assert found.remedy != GONE  # it still answers other questions


async def test_one_doctor_at_a_time_and_the_next_when_it_has_left() -> None:
    network = ZmqNetwork()
    try:
        async with in_this_process(network, OPTIONS, None) as first:
            address = first.channel._address  # type: ignore[attr-defined]
            other = await network.connect(address, hello(), deadline_s=deadline_after(20))
            second = Link(other, is_remote=False)
            async with open_session(first, "loopback", CASE.nbytes, OPTIONS, None):
                with pytest.raises(TransportUnavailable, match="another doctor"):
                    async with open_session(second, "loopback", CASE.nbytes, OPTIONS, None):
                        pass
                with pytest.raises(RemoteFailed, match="open memory first"):
                    await other.request(
                        FillMemory(1, 8), MemoryChecked, deadline_s=deadline_after(20)
                    )
            async with open_session(first, "loopback", CASE.nbytes, OPTIONS, None) as again:
                assert await again.verify(CASE) == ("", "")
    finally:
        await network.close()


@pytest.mark.parametrize(
    "message",
    [
        FillMemory(1, CASE.nbytes + 8),
        FillMemory(1, 7),
        FillMemory(1, -8),
        CheckMemory(seed=1, page_nbytes=CASE.nbytes, batch=2, written=True),
        CheckMemory(seed=1, page_nbytes=-8, batch=-8, written=True),
        CheckMemory(seed=1, page_nbytes=12, batch=1, written=False),
        CheckMemory(seed=SEED_MAX + 1, page_nbytes=8, batch=1, written=True),
        FillMemory(SEED_MAX + 1, 8),
        FillMemory(-1, 8),
    ],
)
async def test_the_other_side_refuses_what_lies_outside_of_its_memory(
    message: FillMemory | CheckMemory,
) -> None:
    async with link() as to, open_session(to, "loopback", CASE.nbytes, OPTIONS, None):
        with pytest.raises(RemoteFailed, match="out_of_bounds"):
            await to.channel.request(message, MemoryChecked, deadline_s=deadline_after(20))


async def test_the_other_side_checks_no_more_pages_than_a_batch_has() -> None:
    nbytes = 8 * (BATCH_MAX + 1)
    message = CheckMemory(seed=1, page_nbytes=8, batch=BATCH_MAX + 1, written=True)
    async with link() as to, open_session(to, "loopback", nbytes, OPTIONS, None):
        with pytest.raises(RemoteFailed, match="out_of_bounds"):
            await to.channel.request(message, MemoryChecked, deadline_s=deadline_after(20))


async def test_the_other_side_gives_no_more_memory_than_its_cap() -> None:
    async with link() as to:
        items = to.channel.stream(
            OpenMemory("loopback", CASE_NBYTES_MAX + 1), object, deadline_s=deadline_after(20)
        )
        with pytest.raises(RemoteFailed, match="too_large"):
            await anext(items)
