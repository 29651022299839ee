"""Flow over tcp: what a client can pile up, who goes first, and that nobody waits for others."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from tests.transfer.bulk_harness import (
    LIMIT_S,
    MIB,
    Engines,
    PeerProcess,
    checked_engines,
    pattern,
    soon,
    until,
    whole,
)
from tests.transfer.raw_tcp import RawClient, RawServer, request_frame
from transfer import tcp_backoff, tcp_link, tcp_server
from transfer.engine import TransferEngine
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost, PeerUnreachable
from transfer.interface import Priority, Range, deadline_after
from transfer.tcp_client import ClientLink
from transfer.tcp_codec import Header, Op, control_frame, done_frame, encode_header
from transfer.tcp_operation import Request
from transfer.tcp_reader import AHEAD_NBYTES
from transfer.tcp_resolver import Address, Resolver
from transfer.tcp_server import ServedLink
from transfer.tcp_sockets import tune
from transfer.token import decode_token, encode_token


async def small_read_works(owner: TransferEngine, user: TransferEngine) -> None:
    region, local = owner.allocate(1000), user.allocate(1000)
    region.view[:] = pattern(1000).data
    await user.read(region.export("r"), whole(1000), into=local, deadline_s=soon())
    assert local.view == region.view


async def served_link(owner: TransferEngine) -> ServedLink:
    """Return the only connection that ``owner`` has accepted."""
    assert owner._tcp is not None
    links = owner._tcp._server._links
    await until(lambda: len(links) == 1)
    return next(iter(links))


def elsewhere(token: bytes, address: str) -> bytes:
    """Return the token with another address."""
    known = decode_token(token)
    endpoint = msgspec.structs.replace(known.endpoint, tcp=address)
    return encode_token(msgspec.structs.replace(known, endpoint=endpoint))


async def test_a_client_that_reads_no_answers_is_not_listened_to_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_SERVED_READS", 8)
    num, nbytes = 600, 64 * 1024
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        region = owner.allocate(nbytes)
        async with RawClient(owner, receive_nbytes=64 * 1024) as greedy:
            await greedy.hello()
            served = await served_link(owner)
            token = region.export("r")
            frames = [request_frame(Op.READ, token, [(0, nbytes)], i) for i in range(1, num + 1)]
            asking = asyncio.create_task(greedy.send(b"".join(frames)))
            await until(lambda: not served.link._reading)
            ahead = AHEAD_NBYTES // len(frames[0]) + 1
            assert len(served._sources) <= 8 + ahead
            await small_read_works(owner, user)
            answered = set[int]()
            while len(answered) < num:
                header, _ = await greedy.frame()
                if header.op is Op.DONE:
                    assert header.status == 0
                    answered.add(header.request_id)
            await asking
        await small_read_works(owner, user)


async def test_refusals_that_nobody_reads_are_bounded_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_UNREAD_ANSWERS_NBYTES", 4096)
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        token = owner.allocate(8).export("r")
        async with RawClient(owner, receive_nbytes=4096) as greedy:
            await greedy.hello()
            served = await served_link(owner)
            refused = request_frame(Op.READ, token, [(0, 9)])
            asking = asyncio.create_task(greedy.send(refused * 100_000))
            await until(lambda: not served.link._reading)
            assert served.link.control_nbytes < 4096 + 200 * AHEAD_NBYTES // len(refused)
            await small_read_works(owner, user)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def test_half_a_hello_is_cut_off_at_the_limit() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(connect_timeout_s=0.05)
        async with RawClient(owner) as raw:
            await raw.send(control_frame(Op.HELLO, body=b"x" * 100)[:60])
            await raw.until_cut_off()


async def test_a_stranger_cannot_announce_more_than_a_hello() -> None:
    """A megabyte of buffers for anyone who connects would be a gift."""
    async with checked_engines("tcp") as engines:
        owner = await engines.make(connect_timeout_s=600.0)
        async with RawClient(owner) as raw:
            await raw.send(encode_header(Op.HELLO, 0, 100_000))
            await raw.until_cut_off()


async def test_a_client_that_is_gone_when_it_is_accepted_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(sock: socket.socket) -> None:
        monkeypatch.setattr(tcp_server, "tune", tune)
        raise OSError(errno.ENOTCONN, "reset before it was looked at")

    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        monkeypatch.setattr(tcp_server, "tune", gone)
        async with RawClient(owner) as raw:
            await raw.until_cut_off()
        await small_read_works(owner, user)


async def test_a_connection_that_is_lost_as_soon_as_it_is_made_ends_all_that_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first got as far as asking; the others must not wait for nothing."""
    may_open = asyncio.Event()
    open_, start = ClientLink.open, ClientLink.start

    async def open_when_told(link: ClientLink, *args: Any) -> None:
        await open_(link, *args)
        await may_open.wait()

    def start_and_lose(link: ClientLink, request: Request) -> None:
        start(link, request)
        link.link.close(PeerLost("reset at the first byte"))

    monkeypatch.setattr(ClientLink, "open", open_when_told)
    monkeypatch.setattr(ClientLink, "start", start_and_lose)
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        token, local = owner.allocate(8).export("r"), user.allocate(8)
        reads = [
            asyncio.create_task(
                user.read(token, whole(8), into=local, deadline_s=deadline_after(600.0))
            )
            for _ in range(3)
        ]
        assert user._tcp is not None
        assert user._io is not None
        await until(lambda: user._tcp and user._tcp._peers)
        (peer,) = user._tcp._peers.values()
        await until(lambda: len(peer._operations) == len(reads))
        user._io.call(may_open.set)
        async with asyncio.timeout(LIMIT_S):
            for read in reads:
                with pytest.raises(PeerLost):
                    await read


async def test_closing_says_goodbye_on_all_connections_to_a_peer_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other, a peer that does not listen would hold up the close for each of them."""
    monkeypatch.setattr(tcp_link, "GOODBYE_LIMIT_S", 600.0)
    asked, all_said = asyncio.Semaphore(0), asyncio.Barrier(3)

    async def reply(
        _: RawServer, writer: asyncio.StreamWriter, header: Header, body: bytes
    ) -> None:
        if header.op is Op.READ:
            asked.release()
        elif header.op is Op.GOODBYE:
            await all_said.wait()
            writer.close()

    async with checked_engines("tcp") as engines, RawServer(reply) as server:
        user = await engines.make(connections_per_peer=3)
        local = user.allocate(8)
        reads = [
            asyncio.create_task(
                user.read(server.token(8), whole(8), into=local, deadline_s=deadline_after(600.0))
            )
            for _ in range(3)
        ]
        assert user._tcp is not None
        for _ in reads:
            await asked.acquire()
        (peer,) = user._tcp._peers.values()
        await until(lambda: len(peer._links) == 3)
        async with asyncio.timeout(LIMIT_S):
            await user.close()
        for read in reads:
            with pytest.raises(PeerClosed):
                await read


class HungNames:
    """A name server that says nothing until it is let go."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun = threading.Event()
        self.over = threading.Event()

    def __call__(self, host: str, port: int) -> list[Address]:
        self.asked.append(host)
        self.begun.set()
        self.over.wait(20.0)
        raise OSError("the name server is gone")


async def test_name_resolution_that_hangs_holds_up_nobody_else() -> None:
    names = HungNames()
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        assert user._tcp is not None
        user._tcp._resolver = Resolver(names)
        token, local = owner.allocate(8).export("r"), user.allocate(8)
        lost = elsewhere(token, "store.example:1")
        waiting = asyncio.create_task(
            user.read(lost, whole(8), into=local, deadline_s=deadline_after(600.0))
        )
        assert await asyncio.to_thread(names.begun.wait, 20.0)
        await small_read_works(owner, user)
        with pytest.raises(DeadlineExceeded):
            await user.read(lost, whole(8), into=local, deadline_s=deadline_after(0.02))
        assert not waiting.done()
        names.over.set()
        with pytest.raises(PeerUnreachable, match="the name server is gone"):
            await waiting
        assert names.asked == ["store.example"]


async def test_a_hello_that_hangs_holds_up_nobody_else() -> None:
    async def silence(*_: object) -> None: ...

    async with (
        checked_engines("tcp") as engines,
        RawServer(silence, greeting=b"") as mute,
    ):
        owner, user = await engines.make(), await engines.make(connect_timeout_s=600.0)
        local = user.allocate(8)
        waiting = asyncio.create_task(
            user.read(mute.token(8), whole(8), into=local, deadline_s=deadline_after(600.0))
        )
        await small_read_works(owner, user)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await user.close()


async def test_while_backing_off_operations_fail_at_once_without_a_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_backoff, "BACKOFF_FIRST_S", 600.0)
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        token, local = owner.allocate(8).export("r"), user.allocate(8)
        await owner.close()
        with pytest.raises(PeerUnreachable, match="nothing answers"):
            await user.read(token, whole(8), into=local, deadline_s=soon())
        with pytest.raises(PeerUnreachable, match="next try in"):
            await user.read(token, whole(8), into=local, deadline_s=soon())


async def test_a_connection_that_ends_in_the_middle_of_a_long_frame_is_lost_at_once() -> None:
    """The kernel was told to wake us for a megabyte; an end of the stream wakes us all the same."""
    nbytes = 4 * MIB

    async def half(_: RawServer, writer: asyncio.StreamWriter, header: Header, body: bytes) -> None:
        writer.write(encode_header(Op.DATA, header.request_id, nbytes) + bytes(nbytes // 2 - 1))
        await writer.drain()
        writer.close()

    async with checked_engines("tcp") as engines, RawServer(half) as server:
        user = await engines.make()
        local = user.allocate(nbytes)
        with pytest.raises(PeerLost):
            await user.read(
                server.token(nbytes), whole(nbytes), into=local, deadline_s=deadline_after(600.0)
            )


async def test_an_urgent_read_is_asked_for_before_the_pushes_that_came_first() -> None:
    """The server answers nothing, so the window fills; the reserve lets the read through."""
    asked: asyncio.Queue[Op] = asyncio.Queue()

    async def note(_: RawServer, writer: asyncio.StreamWriter, header: Header, body: bytes) -> None:
        if header.op is Op.READ:
            frame = encode_header(Op.DATA, header.request_id, 8) + b"\x07" * 8
            writer.write(frame + done_frame(header.request_id, None))
        asked.put_nowait(header.op)

    async with checked_engines("tcp") as engines, RawServer(note) as server:
        user = await engines.make(request_nbytes=8192, window_nbytes=32 * 1024)
        source, local = user.allocate(MIB), user.allocate(8)
        pushing = asyncio.create_task(
            user.write(
                server.token(MIB), whole(MIB), source=source, deadline_s=deadline_after(600.0)
            )
        )
        for _ in range(3):
            while await asked.get() is not Op.WRITE:
                pass
        await user.read(server.token(MIB), whole(8), into=local, deadline_s=soon())
        assert local.view == b"\x07" * 8
        assert not pushing.done()
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)


async def test_requests_carry_their_priority_to_the_owner() -> None:
    seen: list[object] = []

    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        await small_read_works(owner, user)
        link = (await served_link(owner)).link
        add = link.add

        def noting_add(source: object) -> None:
            seen.append(source)
            add(source)  # type: ignore[arg-type]

        link.add = noting_add  # type: ignore[method-assign, assignment]
        token, local = owner.allocate(8).export("r"), user.allocate(8)
        for priority in Priority:
            await user.read(token, whole(8), into=local, deadline_s=soon(), priority=priority)
        assert [source.priority for source in seen] == list(Priority)  # type: ignore[attr-defined]


async def break_often(engines: Engines, nbytes: int, ranges: list[Range]) -> None:
    owner, user = await engines.make(), await engines.make(connections_per_peer=2)
    remote, local = owner.allocate(nbytes), user.allocate(nbytes)
    token = remote.export("rw")
    assert user._tcp is not None
    for num_turns in range(30):
        moving = [
            user.read(token, ranges, into=local, deadline_s=soon()),
            user.write(token, ranges, source=local, deadline_s=soon()),
        ]
        tasks = [asyncio.ensure_future(each) for each in moving]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        user._tcp.disrupt(decode_token(token).endpoint)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, PeerLost) for end in ends), ends
    await small_read_works(owner, user)


async def test_breaking_connections_at_any_moment_leaves_nothing_and_hangs_nothing() -> None:
    """The harness checks for descriptors and threads, the fixture for tasks."""
    nbytes = 4 * MIB
    ranges = [Range(at, at, 4096) for at in range(0, nbytes, 8192)]
    async with checked_engines("tcp") as engines:
        await break_often(engines, nbytes, ranges)


@pytest.mark.net
async def test_one_stopped_peer_among_four_holds_up_only_itself() -> None:
    """Progress, not speed: the others move their bytes many times over while one stands still."""
    nbytes = 8 * MIB
    async with checked_engines("tcp") as engines, AsyncExitStack() as stack:
        user = await engines.make()
        peers = [await stack.enter_async_context(PeerProcess("tcp", nbytes)) for _ in range(4)]
        regions = [user.allocate(nbytes) for _ in peers]

        async def move(number: int) -> None:
            token, local = peers[number].token, regions[number]
            deadline_s = deadline_after(600.0)
            await user.read(token, whole(nbytes), into=local, deadline_s=deadline_s)
            assert local.view == pattern(nbytes, seed=7).data
            await user.write(token, whole(nbytes), source=local, deadline_s=deadline_s)

        await asyncio.gather(*(move(number) for number in range(4)))
        await peers[0].stop()
        stopped = [asyncio.create_task(move(0)) for _ in range(8)]

        async def go_on(number: int) -> None:
            for _ in range(5):
                await move(number)

        async with asyncio.timeout(60):
            await asyncio.gather(*(go_on(number) for number in range(1, 4)))
        assert not any(task.done() for task in stopped)
        peers[0].signal(signal.SIGCONT)
        await asyncio.gather(*stopped)
