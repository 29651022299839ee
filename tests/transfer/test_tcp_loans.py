"""What tcp sends by reference: no peer finds in its socket what a later owner has stored."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.transfer.bulk_harness import (
    LIMIT_S,
    Engines,
    checked_engines,
    pattern,
    soon,
    until,
    whole,
)
from tests.transfer.raw_tcp import RawClient, request_frame
from transfer import loans as loans_module
from transfer import tcp_server
from transfer.cursor import MIN_FILE_NBYTES, Cursor, FileRun
from transfer.engine import TransferEngine
from transfer.gate import Gate
from transfer.loans import Loans
from transfer.region import FilePlace, HostRegion
from transfer.shm_memory import Allocation, shared_memory_available
from transfer.tcp_codec import COPIED_NBYTES, Op, control_frame, done_frame
from transfer.tcp_writer import FrameWriter, Source

NBYTES = 4 * COPIED_NBYTES  # fits the socket's buffers: all of it is sent before anybody receives
FOREVER_S = 2 * LIMIT_S  # a wait that is not expected to be used up
AGAIN = b"\xee" * NBYTES

pytestmark = pytest.mark.skipif(not shared_memory_available(), reason="needs memfd")


async def lender(engines: Engines) -> tuple[TransferEngine, HostRegion]:
    engine = await engines.make()
    region = engine.allocate(NBYTES)
    region.view[:] = pattern(NBYTES)
    return engine, region


async def ask(client: RawClient, region: HostRegion) -> None:
    """Have the region sent, and receive none of it."""
    await client.hello()
    await client.send(request_frame(Op.READ, region.export("r"), [(0, NBYTES)]))
    await until(lambda: region.loans.num_out == 1)


async def receive(client: RawClient) -> bytes:
    """Return the payload of an answer that succeeded."""
    data = b""
    while True:
        header, body = await client.frame()
        if header.op is Op.DONE:
            assert header.status == 0, body
            return data
        data += body


async def test_a_peer_that_does_not_receive_gets_the_bytes_of_before_the_revocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loans_module, "LOAN_PATIENCE_S", 0.01)
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        async with RawClient(engine, receive_nbytes=4 * NBYTES) as client:
            await ask(client, region)
            await asyncio.to_thread(region.revoke)
            region.view[:] = AGAIN  # ours again
            assert await receive(client) == bytes(pattern(NBYTES))
            assert bytes(region.view) == AGAIN


async def test_a_revocation_waits_for_the_word_that_the_bytes_were_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loans_module, "LOAN_PATIENCE_S", FOREVER_S)
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        part = engine.register(region.view[: NBYTES // 2])  # keeps the memory shared
        assert isinstance(part, HostRegion)
        async with RawClient(engine, receive_nbytes=4 * NBYTES) as client:
            await ask(client, region)
            revoking = asyncio.create_task(asyncio.to_thread(region.revoke))
            await until(lambda: region.revoked)
            assert not revoking.done(), "the peer has not taken them"
            assert await receive(client) == bytes(pattern(NBYTES))
            await client.send(control_frame(Op.TAKEN, 1))
            await revoking
        assert part.in_shared_memory, "nothing had to be left behind"


@pytest.mark.parametrize("nbytes", [MIN_FILE_NBYTES, NBYTES])  # the fewest that are lent, and more
async def test_a_reader_says_by_itself_what_it_has_taken(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[Loans] = []
    take = Loans.take
    monkeypatch.setattr(Loans, "take", lambda loans: (lent.append(loans), take(loans)))
    async with checked_engines("tcp") as engines:
        _, region = await lender(engines)
        reader = await engines.make()
        into = reader.allocate(nbytes)
        for _ in range(3):
            await reader.read(region.export("r"), whole(nbytes), into=into, deadline_s=soon())
        await until(lambda: region.loans.num_out == 0)
        assert lent == [region.loans] * 3, "each went out by reference"
        assert region.loans.wait_until_returned(0.0)
        assert into.view == region.view[:nbytes]


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_peer_that_is_gone_holds_nothing(how: str) -> None:
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        client = RawClient(engine, receive_nbytes=4 * NBYTES)
        async with client:
            await ask(client, region)
            if how == "reset":
                client.reset()
        await until(lambda: region.loans.num_out == 0)
        assert region.loans.wait_until_returned(0.0)


async def test_memory_is_left_behind_at_once_for_a_peer_that_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loans_module, "LOAN_PATIENCE_S", FOREVER_S)
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        async with RawClient(engine, receive_nbytes=4 * NBYTES) as client:
            await ask(client, region)
            await client.send(b"x" * 64)  # breaks the protocol
            await until(lambda: region.loans.num_out == 0)
            await asyncio.to_thread(region.revoke)
            region.view[:] = AGAIN
            assert await receive(client) == bytes(pattern(NBYTES))


async def test_who_never_says_what_was_taken_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_LENT_READS", 2)
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        async with RawClient(engine) as client:
            await client.hello()
            for request_id in (1, 2, 3):
                frame = request_frame(Op.READ, region.export("r"), [(0, NBYTES)], request_id)
                await client.send(frame)
                if request_id < 3:
                    assert await receive(client) == bytes(pattern(NBYTES))
            await client.until_cut_off()


async def test_a_word_about_what_was_not_lent_is_ignored() -> None:
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        async with RawClient(engine) as client:
            await client.hello()
            await client.send(control_frame(Op.TAKEN, 7))
            frame = request_frame(Op.READ, region.export("r"), [(0, NBYTES)], 8)
            await client.send(frame)
            assert await receive(client) == bytes(pattern(NBYTES))


def test_loans_are_waited_for_and_lost_ones_are_not() -> None:
    loans = Loans()
    assert loans.wait_until_returned(0.0)
    loans.take()
    assert not loans.wait_until_returned(0.0)
    loans.give_back()
    assert loans.wait_until_returned(0.0)
    loans.take()
    loans.lose()
    assert not loans.wait_until_returned(FOREVER_S)


class InFile:
    """``FileSource`` over an allocation, until it ``ends``."""

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self.ended = False
        self.num_inside = 0

    def enter(self) -> tuple[int, int] | None:
        if self.ended:
            return None
        assert self._allocation.fd is not None
        self.num_inside += 1
        return self._allocation.fd, 0

    def leave(self) -> None:
        self.num_inside -= 1


@contextmanager
def held(nbytes: int) -> Iterator[Allocation]:
    """Shared memory that goes when the body ends, however it does."""
    allocation = Allocation(nbytes, shared=True)
    allocation.hold()
    try:
        yield allocation
    finally:
        if allocation.in_use:
            allocation.release()


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_out_by_reference_is_what_would_have_been_copied(seed: int) -> None:
    rng = random.Random(seed)
    with held(8 * MIN_FILE_NBYTES) as allocation:
        check_that_both_ways_send_the_same(rng, allocation)


def check_that_both_ways_send_the_same(rng: random.Random, allocation: Allocation) -> None:
    nbytes = allocation.nbytes
    allocation.view[:] = rng.randbytes(nbytes)
    lengths = [rng.choice([1, 100, MIN_FILE_NBYTES, 2 * MIN_FILE_NBYTES + 3]) for _ in range(5)]
    lengths.insert(rng.randrange(6), 6 * MIN_FILE_NBYTES)
    spans = [(rng.randrange(nbytes - length), length) for length in lengths]
    sent, files = {}, 0

    def send(buffers: Sequence[memoryview | bytes]) -> int:
        data = b"".join(buffers)
        taken = data[: rng.randrange(1, len(data) + 1)]
        stream.extend(taken)
        return len(taken)

    def send_file(head: memoryview, run: FileRun) -> int:
        nonlocal files
        files += 1
        assert file.num_inside == 1
        data = bytes(head) + os.pread(run.fd, run.nbytes, run.offset)
        taken = data[: rng.randrange(1, len(data) + 1)]
        stream.extend(taken)
        if rng.random() < 0.1:
            file.ended = True
        return len(taken)

    for by_reference in (False, True):
        stream = bytearray()
        file = InFile(allocation)
        writer = FrameWriter(3 * MIN_FILE_NBYTES, send_file if by_reference else None)
        cursor = Cursor(allocation.view, spans, file)
        source = Source(1, cursor, Gate(), lambda complete: None, tail=done_frame(1, None))
        writer.add(source)
        while writer.pump(send):
            pass
        assert file.num_inside == 0
        sent[by_reference] = bytes(stream)
    assert sent[True] == sent[False]
    assert files > 0


async def test_an_allocation_keeps_its_file_while_it_is_sent_from() -> None:
    with held(NBYTES) as allocation:
        assert allocation.sending.enter()
        releasing = asyncio.create_task(asyncio.to_thread(allocation.release))
        try:
            await until(lambda: not allocation.sending.is_open)
            assert allocation.fd is not None
            os.fstat(allocation.fd)
        finally:
            allocation.sending.leave()  # else its thread waits for ever
            await releasing
        assert allocation.fd is None
        assert not allocation.sending.enter(), "there is nothing to send from any more"


def test_nobody_sends_from_a_file_whose_memory_was_left_behind() -> None:
    with held(NBYTES) as allocation:
        mapping = allocation._map_privately
        inside: list[bool] = []

        def map_privately(fd: int) -> bool:
            inside.append(allocation.sending.enter())
            return mapping(fd)

        allocation._map_privately = map_privately  # type: ignore[method-assign]
        assert allocation.leave_behind()
        assert inside == [False], "what is stored from here on is not in the file"


async def test_an_id_is_not_used_again_before_its_bytes_were_taken() -> None:
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        async with RawClient(engine) as client:
            await client.hello()
            frame = request_frame(Op.READ, region.export("r"), [(0, NBYTES)])
            await client.send(frame)
            assert await receive(client) == bytes(pattern(NBYTES))
            await client.send(frame)
            assert await client.until_cut_off() == b""
        await until(lambda: region.loans.num_out == 0)


async def test_an_answer_that_waits_for_its_turn_has_lent_nothing() -> None:
    async with checked_engines("tcp") as engines:
        engine = await engines.make()
        big, region = engine.allocate(64 * NBYTES), engine.allocate(NBYTES)
        async with RawClient(engine, receive_nbytes=NBYTES) as client:
            await client.hello()
            frame = request_frame(Op.READ, big.export("r"), [(0, 64 * NBYTES)], 1)
            await client.send(frame)
            await until(lambda: big.loans.num_out == 1)
            turns = [request_frame(Op.READ, big.export("r"), [(0, 64 * NBYTES)], 2)]
            turns.append(request_frame(Op.READ, region.export("r"), [(0, NBYTES)], 3))
            await client.send(b"".join(turns))
            await until(lambda: num_served(engine) == 3)
            assert region.loans.wait_until_returned(0.0)


def num_served(engine: TransferEngine) -> int:
    """Reads that the engine has begun to answer."""
    assert engine._tcp is not None
    return sum(len(link._sources) for link in engine._tcp._server._links)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_an_engine_that_ends_copies_nothing_and_gives_nobody_what_its_owner_stores_then(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Allocation, "keep_bytes")  # it takes two seconds for a gigabyte
    async with checked_engines("tcp") as engines:
        engine, region = await lender(engines)
        async with RawClient(engine, receive_nbytes=4 * NBYTES) as client:
            await ask(client, region)
            await engine.close() if how == "close" else engine.abort()
            assert bytes(region.view) == bytes(pattern(NBYTES)), "its owner may still read it"
            region.view[:] = AGAIN
            assert await receive(client) == bytes(pattern(NBYTES))
            assert bytes(region.view) == AGAIN


async def test_a_file_that_is_left_behind_as_an_answer_begins_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with checked_engines("tcp") as engines:
        _, region = await lender(engines)
        reader = await engines.make()
        into = reader.allocate(NBYTES)
        file = HostRegion.file.fget
        assert file is not None

        def last(self: HostRegion) -> FilePlace | None:
            found: FilePlace | None = file(self)
            region.allocation.leave_behind()  # as a revocation on another thread does
            return found

        assert region.allocation is not None
        monkeypatch.setattr(HostRegion, "file", property(last))
        await reader.read(region.export("r"), whole(NBYTES), into=into, deadline_s=soon())
        assert into.view == region.view
