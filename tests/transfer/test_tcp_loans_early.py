"""Answers by reference that end early: what was sent of them is lent until it was taken, too."""

from __future__ import annotations

import asyncio

import pytest

from tests.transfer.bulk_harness import LIMIT_S, checked_engines, soon, until, whole
from tests.transfer.raw_tcp import RawClient, RawServer, lend, request_frame
from transfer import loans as loans_module
from transfer.errors import DeadlineExceeded, PeerLost, RegionRevoked, TransferError, Unauthorized
from transfer.interface import Priority
from transfer.region import HostRegion
from transfer.shm_memory import shared_memory_available
from transfer.tcp_codec import COPIED_NBYTES, Header, Op, control_frame, done_frame, encode_header
from transfer.tcp_operation import TcpOperation
from transfer.token import decode_token

NBYTES = 4 * COPIED_NBYTES
MANY_NBYTES = 256 * NBYTES  # more than fits the socket's buffers
FOREVER_S = 2 * LIMIT_S  # a wait that is not expected to be used up
ONCE, AGAIN = 0x11, 0xEE

pytestmark = pytest.mark.skipif(not shared_memory_available(), reason="needs memfd")


async def ask(client: RawClient, region: HostRegion) -> None:
    """Have more sent than the sockets take, and receive none of it."""
    await client.hello()
    await client.send(request_frame(Op.READ, region.export("r"), [(0, MANY_NBYTES)]))
    await until(lambda: region.loans.num_out == 1)


async def receive_failed(client: RawClient) -> bytes:
    """Return the payload of an answer that failed."""
    data = bytearray()
    while True:
        header, body = await client.frame()
        if header.op is Op.DONE:
            assert header.status != 0
            return bytes(data)
        data += body


@pytest.mark.parametrize("how", ["revoked", "cancelled"])
async def test_a_revocation_waits_until_a_read_that_ended_early_was_taken(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loans_module, "LOAN_PATIENCE_S", FOREVER_S)
    async with checked_engines("tcp") as engines:
        engine = await engines.make()
        region = lend(engine, MANY_NBYTES, ONCE)
        part = engine.register(region.view[:NBYTES])  # keeps the memory shared
        async with RawClient(engine, receive_nbytes=NBYTES) as client:
            await ask(client, region)
            if how == "cancelled":
                await client.send(control_frame(Op.CANCEL, 1))
            else:
                revoking = asyncio.create_task(asyncio.to_thread(region.revoke))
                await until(lambda: region.revoked)
            assert len(await receive_failed(client)) < MANY_NBYTES
            if how == "cancelled":
                revoking = asyncio.create_task(asyncio.to_thread(region.revoke))
                await until(lambda: region.revoked)
            assert region.loans.num_out == 1
            assert not revoking.done(), "the peer has not said that it has emptied its socket"
            await client.send(control_frame(Op.TAKEN, 1))
            await revoking
            assert region.loans.num_out == 0
        assert part.in_shared_memory, "nothing had to be left behind"


async def test_what_was_sent_before_a_revocation_in_the_middle_stays_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loans_module, "LOAN_PATIENCE_S", 0.01)
    async with checked_engines("tcp") as engines:
        engine = await engines.make()
        region = lend(engine, MANY_NBYTES, ONCE)
        async with RawClient(engine, receive_nbytes=NBYTES) as client:
            await ask(client, region)
            await asyncio.to_thread(region.revoke)
            region.view[:] = bytes([AGAIN]) * MANY_NBYTES
            assert AGAIN not in await receive_failed(client)


async def test_what_was_sent_to_a_peer_that_was_dropped_in_the_middle_stays_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loans_module, "LOAN_PATIENCE_S", FOREVER_S)
    async with checked_engines("tcp") as engines:
        engine = await engines.make()
        region = lend(engine, MANY_NBYTES, ONCE)
        async with RawClient(engine, receive_nbytes=NBYTES) as client:
            await ask(client, region)
            await client.send(b"x" * 64)  # breaks the protocol
            await until(lambda: region.loans.num_out == 0)
            await asyncio.to_thread(region.revoke)
            region.view[:] = bytes([AGAIN]) * MANY_NBYTES
            heard = await client.until_cut_off()
            assert heard
            assert AGAIN not in heard


async def test_a_peer_that_is_gone_in_the_middle_of_its_answer_holds_nothing() -> None:
    async with checked_engines("tcp") as engines:
        engine = await engines.make()
        region = lend(engine, MANY_NBYTES, ONCE)
        async with RawClient(engine, receive_nbytes=NBYTES) as client:
            await ask(client, region)
            client.reset()
        await until(lambda: region.loans.num_out == 0)
        assert region.loans.wait_until_returned(0.0)


async def test_a_revocation_in_the_middle_of_a_read_needs_no_patience_with_a_living_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loans_module, "LOAN_PATIENCE_S", FOREVER_S)
    async with checked_engines("tcp") as engines:
        owner, reader = await engines.make(), await engines.make()
        region, into = lend(owner, MANY_NBYTES, ONCE), reader.allocate(MANY_NBYTES)
        part = owner.register(region.view[:NBYTES])
        ranges = whole(MANY_NBYTES)
        reads = [
            asyncio.create_task(
                reader.read(region.export("r"), ranges, into=into, deadline_s=soon())
            )
            for _ in range(3)
        ]
        await until(lambda: region.loans.num_out > 0)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(region.revoke)
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert outcome is None or isinstance(outcome, RegionRevoked)
        assert region.loans.wait_until_returned(0.0)
        assert part.in_shared_memory


@pytest.mark.parametrize("error", [Unauthorized("no"), RegionRevoked("in the middle"), None])
async def test_a_reader_says_that_its_socket_is_empty_however_its_read_ended(
    error: TransferError | None,
) -> None:
    """With an error, at once or behind some bytes, and for a read that was cancelled (None)."""
    said: list[Op] = []
    taken, begun = asyncio.Event(), asyncio.Event()

    async def reply(_: RawServer, writer: asyncio.StreamWriter, header: Header, b: bytes) -> None:
        said.append(header.op)
        if header.op is Op.READ and not isinstance(error, Unauthorized):
            writer.write(encode_header(Op.DATA, header.request_id, NBYTES) + bytes(NBYTES))
        if header.op is Op.READ and error is not None:
            writer.write(done_frame(header.request_id, error))
        elif header.op is Op.CANCEL and error is None:
            writer.write(done_frame(header.request_id, DeadlineExceeded("cancelled")))
        elif header.op is Op.TAKEN:
            taken.set()
        begun.set()

    async with checked_engines("tcp") as engines, RawServer(reply) as server:
        user = await engines.make()
        into, token = user.allocate(2 * NBYTES), server.token(2 * NBYTES)
        read = user.read(token, whole(2 * NBYTES), into=into, deadline_s=soon())
        reading = asyncio.create_task(read)
        async with asyncio.timeout(LIMIT_S):
            await begun.wait()
            if error is None:
                reading.cancel()
            await asyncio.wait([reading])
            await taken.wait()
        assert reading.cancelled() if error is None else type(reading.exception()) is type(error)
        assert said.count(Op.TAKEN) == 1
        assert said[-1] is Op.TAKEN
        await user.close()


async def test_a_reader_speaks_of_all_that_may_be_lent_and_of_nothing_else() -> None:
    """One byte more than is copied, as few as are copied, and a last one that says both."""
    sizes = (COPIED_NBYTES + 1, COPIED_NBYTES, COPIED_NBYTES + 1)
    said: list[tuple[Op, int]] = []
    taken = asyncio.Event()

    async def reply(_: RawServer, writer: asyncio.StreamWriter, header: Header, b: bytes) -> None:
        said.append((header.op, header.request_id))
        if header.op is Op.READ:
            nbytes = sizes[header.request_id - 1]
            writer.write(encode_header(Op.DATA, header.request_id, nbytes) + bytes(nbytes))
            writer.write(done_frame(header.request_id, None))
        elif said[-1] == (Op.TAKEN, 3):
            taken.set()

    async with checked_engines("tcp") as engines, RawServer(reply) as server:
        user = await engines.make(connections_per_peer=1)
        into, token = user.allocate(max(sizes)), server.token(max(sizes))
        for nbytes in sizes:
            await user.read(token, whole(nbytes), into=into, deadline_s=soon())
        async with asyncio.timeout(LIMIT_S):
            await taken.wait()
        due = [(Op.READ, 1), (Op.TAKEN, 1), (Op.READ, 2), (Op.READ, 3), (Op.TAKEN, 3)]
        assert said == due
        await user.close()


async def test_nothing_that_still_arrives_for_a_failed_operation_gets_into_its_memory() -> None:
    async with checked_engines("tcp") as engines, RawServer(never) as server:
        user = await engines.make()
        move = user._check(
            "r", decode_token(server.token(8)), whole(8), user.allocate(8), soon(), Priority.NOW
        )
        operation = TcpOperation(move, max_ranges=1, max_nbytes=8)
        operation.finish(PeerLost("it is gone"))
        assert not operation.gate.is_open, "before whoever waits for it has heard of it"
        with pytest.raises(PeerLost):
            await operation.wait(at_once)


async def never(_: RawServer, writer: asyncio.StreamWriter, header: Header, body: bytes) -> None:
    raise AssertionError("nothing is asked")


async def at_once(operation: TcpOperation) -> None: ...
