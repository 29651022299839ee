"""The contract of ``transfer.channel`` as checks that every ``Network`` has to pass.

Each ``check_*`` takes a network that serves and one that calls (they may be the same one). Run by
``test_zmq_network.py`` over real sockets and by ``test_rpc_channel.py`` in the simulator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from transfer.channel import Caller, Channel, Hello, Listener, Network, Service
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    HelloRefused,
    PeerClosed,
    PeerUnreachable,
    RemoteFailed,
)
from transfer.identity import Role, new_identity
from transfer.rpc_frames import MAX_FRAME_NBYTES, STREAM_WINDOW

ANY = "tcp://127.0.0.1:0"


class Ask(msgspec.Struct, tag="contract.ask"):
    text: str


class Told(msgspec.Struct, tag="contract.told"):
    text: str
    peer: str = ""


class Count(msgspec.Struct, tag="contract.count"):
    num_items: int


class Fail(msgspec.Struct):  # untagged: travels under its class name
    how: str


class Hang(msgspec.Struct, tag="contract.hang"):
    pass


class HangStream(msgspec.Struct, tag="contract.hang_stream"):
    pass


class Unheard(msgspec.Struct, tag="contract.unheard"):
    pass


class TestService(Service):
    """Handlers that answer, stream, fail and hang, and that notice when they are cancelled."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.num_yielded = 0
        self.on(Ask, self.tell)
        self.on(Fail, self.fail)
        self.on(Hang, self.hang)
        self.on_stream(Count, self.count)
        self.on_stream(HangStream, self.hang_stream)

    async def tell(self, message: Ask, caller: Caller) -> Told:
        await asyncio.sleep(0)
        return Told(message.text, caller.peer.node_id)

    async def fail(self, message: Fail, caller: Caller) -> Told:
        if message.how == "named":
            raise RemoteFailed("full", "no page is free; try again later")
        if message.how == "huge":
            return Told("x" * MAX_FRAME_NBYTES)
        raise ValueError("a bug in the handler")

    async def hang(self, message: Hang, caller: Caller) -> Told:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError("unreachable")

    async def count(self, message: Count, caller: Caller) -> AsyncIterator[Told]:
        for number in range(message.num_items):
            self.num_yielded += 1
            yield Told(str(number))

    async def hang_stream(self, message: HangStream, caller: Caller) -> AsyncIterator[Told]:
        yield Told("first")
        await self.hang(Hang(), caller)


def hello(role: Role, **contract: str) -> Hello:
    return Hello(identity=new_identity(role), contract=contract)


def soon(timeout_s: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + timeout_s


@asynccontextmanager
async def talking(
    server: Network, client: Network, service: Service
) -> AsyncIterator[tuple[Listener, Channel]]:
    listener = await server.listen(service, hello(Role.STORE), ANY)
    channel = await client.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
    try:
        yield listener, channel
    finally:
        await channel.close()
        await listener.close()


async def check_a_request_is_answered(server: Network, client: Network) -> None:
    async with talking(server, client, TestService()) as (_, channel):
        told = await channel.request(Ask("hello"), Told, deadline_s=soon())
        assert told.text == "hello"
        assert told.peer.startswith("decode-")
        assert channel.peer.role is Role.STORE


async def check_a_stream_arrives_whole_and_in_order(server: Network, client: Network) -> None:
    async with talking(server, client, TestService()) as (_, channel):
        for num_items in (0, 1, STREAM_WINDOW, 10 * STREAM_WINDOW + 1):
            items = channel.stream(Count(num_items), Told, deadline_s=soon())
            assert [told.text async for told in items] == [str(n) for n in range(num_items)]


async def check_requests_at_once_get_their_own_answers(server: Network, client: Network) -> None:
    async with talking(server, client, TestService()) as (_, channel):
        texts = [f"marker-{n}" for n in range(256)]
        asked = (channel.request(Ask(text), Told, deadline_s=soon(20)) for text in texts)
        assert [told.text for told in await asyncio.gather(*asked)] == texts


async def check_a_handler_error_keeps_its_code(server: Network, client: Network) -> None:
    async with talking(server, client, TestService()) as (_, channel):
        with pytest.raises(RemoteFailed) as named:
            await channel.request(Fail("named"), Told, deadline_s=soon())
        assert (named.value.code, named.value.message[:7]) == ("full", "no page")
        with pytest.raises(RemoteFailed, match="ValueError: a bug") as internal:
            await channel.request(Fail("bug"), Told, deadline_s=soon())
        assert internal.value.code == "internal"
        assert not channel.closed


async def check_an_unknown_message_is_refused(server: Network, client: Network) -> None:
    async with talking(server, client, TestService()) as (_, channel):
        with pytest.raises(RemoteFailed, match=r"contract\.unheard"):
            await channel.request(Unheard(), Told, deadline_s=soon())
        with pytest.raises(RemoteFailed, match="unknown_message"):  # a stream, asked as a request
            await channel.request(Count(1), Told, deadline_s=soon())


async def check_messages_beyond_the_frame_limit_are_errors(
    server: Network, client: Network
) -> None:
    async with talking(server, client, TestService()) as (_, channel):
        with pytest.raises(FrameInvalid, match="frame limit"):
            await channel.request(Ask("x" * MAX_FRAME_NBYTES), Told, deadline_s=soon())
        with pytest.raises(RemoteFailed, match="frame limit"):
            await channel.request(Fail("huge"), Told, deadline_s=soon())
        with pytest.raises(FrameInvalid, match="does not decode"):
            await channel.request(Ask("x"), Count, deadline_s=soon())
        assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"


async def check_a_deadline_ends_a_request_and_its_handler(server: Network, client: Network) -> None:
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        with pytest.raises(DeadlineExceeded):
            await channel.request(Hang(), Told, deadline_s=soon(0.1))
        await asyncio.wait_for(service.cancelled.wait(), 2)
        with pytest.raises(DeadlineExceeded):
            await channel.request(Ask("late"), Told, deadline_s=soon(-1))
        with pytest.raises(DeadlineExceeded):
            async for _ in channel.stream(HangStream(), Told, deadline_s=soon(0.1)):
                pass


async def check_cancelling_a_request_cancels_its_handler(server: Network, client: Network) -> None:
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        task = asyncio.ensure_future(channel.request(Hang(), Told, deadline_s=soon(60)))
        await asyncio.wait_for(service.started.wait(), 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(service.cancelled.wait(), 2)


async def check_leaving_a_stream_early_cancels_its_handler(
    server: Network, client: Network
) -> None:
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        async with aclosing(channel.stream(HangStream(), Told, deadline_s=soon(60))) as items:
            async for told in items:
                assert told.text == "first"
                await asyncio.wait_for(service.started.wait(), 2)
                break
        await asyncio.wait_for(service.cancelled.wait(), 2)


async def check_a_slow_reader_stalls_only_its_own_handler(server: Network, client: Network) -> None:
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        stream = channel.stream(Count(10 * STREAM_WINDOW), Told, deadline_s=soon(30))
        async with aclosing(stream) as slow:
            assert (await anext(slow)).text == "0"
            for _ in range(20):  # others get their answers meanwhile
                await channel.request(Ask("x"), Told, deadline_s=soon())
            assert service.num_yielded <= STREAM_WINDOW + 2
            assert len([told async for told in slow]) == 10 * STREAM_WINDOW - 1


async def check_a_contract_mismatch_prints_both_sides(server: Network, client: Network) -> None:
    listener = await server.listen(TestService(), hello(Role.STORE, page_size="16", kind="a"), ANY)
    theirs = hello(Role.DECODE, page_size="32", model="m")
    with pytest.raises(HelloRefused) as refused:
        await client.connect(listener.address, theirs, deadline_s=soon())
    assert "page_size=16" in str(refused.value)
    assert "page_size=32" in str(refused.value)
    fits = hello(Role.DECODE, page_size="16", model="only one side states it")
    channel = await client.connect(listener.address, fits, deadline_s=soon())
    await channel.close()
    await listener.close()


async def check_another_protocol_version_is_refused(server: Network, client: Network) -> None:
    listener = await server.listen(TestService(), hello(Role.STORE), ANY)
    other = msgspec.structs.replace(hello(Role.DECODE), protocol=99)
    with pytest.raises(HelloRefused, match="protocol=99"):
        await client.connect(listener.address, other, deadline_s=soon())
    await listener.close()


async def check_nobody_there_is_unreachable_by_the_deadline(
    server: Network, client: Network
) -> None:
    listener = await server.listen(TestService(), hello(Role.STORE), ANY)
    address = listener.address
    await listener.close()
    start_s = soon(0)
    with pytest.raises(PeerUnreachable, match=address.rsplit(":", 1)[1]):
        await client.connect(address, hello(Role.DECODE), deadline_s=soon(0.3))
    assert 0.25 < soon(0) - start_s < 1.5
    with pytest.raises(PeerUnreachable, match="nonsense"):
        await client.connect("nonsense", hello(Role.DECODE), deadline_s=soon(0.3))


async def check_an_address_in_use_is_named(server: Network, client: Network) -> None:
    listener = await server.listen(TestService(), hello(Role.STORE), ANY)
    port = listener.address.rsplit(":", 1)[1]
    with pytest.raises(PeerUnreachable, match=f"{port}.*another"):
        await server.listen(TestService(), hello(Role.STORE), f"tcp://127.0.0.1:{port}")
    await listener.close()


async def check_closing_the_listener_ends_channels_in_order(
    server: Network, client: Network
) -> None:
    service = TestService()
    async with talking(server, client, service) as (listener, channel):
        task = asyncio.ensure_future(channel.request(Hang(), Told, deadline_s=soon(60)))
        await asyncio.wait_for(service.started.wait(), 2)
        await listener.close()
        assert service.cancelled.is_set()
        with pytest.raises(PeerClosed):
            await task
        assert channel.closed
        with pytest.raises(PeerClosed):
            await channel.request(Ask("x"), Told, deadline_s=soon())


async def check_closing_a_channel_ends_what_is_outstanding(
    server: Network, client: Network
) -> None:
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        task = asyncio.ensure_future(channel.request(Hang(), Told, deadline_s=soon(60)))
        await asyncio.wait_for(service.started.wait(), 2)
        await channel.close()
        await channel.close()
        with pytest.raises(PeerClosed):
            await task
        await asyncio.wait_for(service.cancelled.wait(), 2)


Check = Callable[[Network, Network], Awaitable[None]]

CHECKS: list[Check] = [value for name, value in globals().items() if name.startswith("check_")]
