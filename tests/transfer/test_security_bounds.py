"""What a peer may cost: connections, memory, time, before it has proven anything and after."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq

from tests.transfer.bulk_harness import MIB, checked_engines, pattern, soon, until, whole
from tests.transfer.channel_contract import ANY, Ask, Hang, TestService, Told, hello
from tests.transfer.fuzzing import (
    EXAMPLE_LIMIT_S,
    allocates_at_most,
    descriptors_return_to,
    num_descriptors,
    resident_nbytes,
)
from tests.transfer.raw_tcp import RawClient, lend, request_frame
from transfer import acceptor, registry, shm_owner, tcp_server, zmq_network
from transfer.channel import Caller, Service
from transfer.engine import TransferEngine
from transfer.errors import FrameInvalid, HelloRefused, RemoteFailed
from transfer.identity import Identity, Role, new_identity
from transfer.membership import MembershipView, NodeInfo, NodeStatus
from transfer.registry import MAX_VIEW_NBYTES, Registry, RegistryService, Watch
from transfer.rpc_frames import (
    MAX_FRAME_NBYTES,
    MAX_OUTSTANDING,
    HelloFrame,
    Request,
    encode_frame,
    encode_message,
)
from transfer.tcp_codec import MAX_CONTROL_NBYTES, Op
from transfer.tcp_server import (
    MAX_SERVED_READS,
    MAX_UNPROVEN,
    ServedLink,
)
from transfer.token import decode_token
from transfer.zmq_network import MAX_UNREAD_FRAMES, ZmqNetwork

SECRET = "a cluster secret of some length"
CONNECTION_NBYTES = 64 << 10  # of Python objects, for one connection that does nothing
SPAN_NBYTES = 16  # on the wire
SERVED_NBYTES = 16 * MIB  # for all that one client has asked for and not read
SLACK_NBYTES = 8 * MIB  # what the tests themselves and the libraries take


async def small_read_works(owner: TransferEngine, user: TransferEngine) -> None:
    region, local = owner.allocate(1000), user.allocate(1000)
    region.view[:] = pattern(1000).data
    await user.read(region.export("r"), whole(1000), into=local, deadline_s=soon())
    assert local.view == region.view
    region.revoke()
    local.revoke()


# ── strangers ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("start", [b"", b"KVF1", b"KVF1\x01"], ids=["silent", "magic", "a header"])
async def test_bulk_connections_that_do_not_finish_the_hello_are_closed_in_time(
    start: bytes,
) -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(cluster_secret=SECRET)
        user = await engines.make(cluster_secret=SECRET)
        await small_read_works(owner, user)
        shorten_the_hello(owner)
        before = num_descriptors()
        with allocates_at_most(50 * CONNECTION_NBYTES + SLACK_NBYTES):
            async with asyncio.timeout(EXAMPLE_LIMIT_S), AsyncExitStack() as stack:
                raws = [await stack.enter_async_context(RawClient(owner)) for _ in range(50)]
                for raw in raws:
                    await raw.send(start)
                await small_read_works(owner, user)
                assert [await raw.until_cut_off() for raw in raws] == [b""] * 50
        await descriptors_return_to(before)


def shorten_the_hello(owner: TransferEngine) -> None:
    """From now on; who is connected already had its time."""
    assert owner._tcp is not None
    server = owner._tcp._server
    server.config = server.config.model_copy(update={"connect_timeout_s": 0.1})


async def test_connections_beyond_the_maximum_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        await small_read_works(owner, user)
        monkeypatch.setattr(acceptor, "MAX_ACCEPTED", 8)
        async with asyncio.timeout(EXAMPLE_LIMIT_S), AsyncExitStack() as stack:
            held = [await stack.enter_async_context(RawClient(owner)) for _ in range(7)]
            for raw in held:
                await raw.hello()
            for _ in range(20):
                async with RawClient(owner) as raw:
                    assert await raw.until_cut_off() == b""
            await small_read_works(owner, user)  # on its own connection
        async with asyncio.timeout(EXAMPLE_LIMIT_S), RawClient(owner) as raw:
            while True:  # as soon as those have gone, others are served
                with suppress(ConnectionError):
                    await raw.hello()
                    break
                raw.sock.close()
                raw.sock = socket.socket()
                await raw.__aenter__()


async def test_strangers_without_number_hold_few_descriptors_and_keep_nobody_out() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(cluster_secret=SECRET, connect_timeout_s=3600.0)
        user = await engines.make(cluster_secret=SECRET)
        await small_read_works(owner, user)
        before = num_descriptors()
        num_strangers = 2 * MAX_UNPROVEN
        async with asyncio.timeout(EXAMPLE_LIMIT_S), AsyncExitStack() as stack:
            raws = [await stack.enter_async_context(RawClient(owner)) for _ in range(num_strangers)]
            for raw in raws[:MAX_UNPROVEN]:  # the oldest gave way
                assert await raw.until_cut_off() == b""
            assert num_descriptors() <= before + num_strangers + MAX_UNPROVEN
            await raws[-1].hello(SECRET.encode())
            newcomer = await engines.make(cluster_secret=SECRET)
            await small_read_works(owner, newcomer)
            await newcomer.close()
        await descriptors_return_to(before)


async def test_shared_memory_peers_that_do_not_say_hello_are_closed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm_owner, "HELLO_LIMIT_S", 0.1)
    async with checked_engines("shm") as engines:
        owner, user = await engines.make(), await engines.make()
        address = decode_token(owner.allocate(8).export("r")).endpoint.shm
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(EXAMPLE_LIMIT_S):
            socks = []
            for _ in range(20):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                await loop.sock_connect(sock, "\0" + address)
                socks.append(sock)
            await small_read_works(owner, user)
            for sock in socks:
                assert await loop.sock_recv(sock, 1) == b""
                sock.close()
            await small_read_works(owner, user)  # who has said hello stays


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_control_connections_that_do_not_shake_hands_are_closed_in_time(
    secret: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_network, "HANDSHAKE_LIMIT_MS", 200)
    network = ZmqNetwork(secret=secret)
    listener = await network.listen(TestService(), hello(Role.STORE), ANY)
    channel = await network.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
    address = ("127.0.0.1", urlsplit(listener.address).port)
    loop = asyncio.get_running_loop()
    socks = [socket.create_connection(address) for _ in range(20)]
    async with asyncio.timeout(EXAMPLE_LIMIT_S):
        for sock in socks:
            sock.setblocking(False)
            with suppress(ConnectionError):
                while await loop.sock_recv(sock, 4096):
                    pass
            sock.close()
        assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
    await network.close()


async def test_strangers_that_come_and_go_make_no_storm_among_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each break makes the listener look for who has gone: at most once in a while."""
    monkeypatch.setattr(zmq_network, "RECHECK_S", 3600.0)
    network = ZmqNetwork()
    listener = await network.listen(TestService(), hello(Role.STORE), ANY)
    channel = await network.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
    num_probes = 0
    probe = listener.server.probe

    def counted() -> None:
        nonlocal num_probes
        num_probes += 1
        probe()

    monkeypatch.setattr(listener.server, "probe", counted)
    for _ in range(20):
        listener._on_break()
    assert num_probes == 1
    assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
    await network.close()


# ── peers that hold the secret and misbehave ────────────────────────────────────────────────────


@pytest.mark.parametrize("num_spans", [1, 1000, MAX_CONTROL_NBYTES // SPAN_NBYTES - 8])
async def test_a_client_that_asks_and_never_reads_costs_a_bounded_amount(num_spans: int) -> None:
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        region = lend(owner, MIB, 1)
        token = region.export("r")
        await small_read_works(owner, user)
        spans = [(n, 1) for n in range(num_spans)] if num_spans > 1 else [(0, MIB)]
        template = request_frame(Op.READ, token, spans, 0)
        async with RawClient(owner, receive_nbytes=4096) as raw:
            await raw.hello()
            with allocates_at_most(SERVED_NBYTES):
                await flood(raw, template)
                await small_read_works(owner, user)
            assert max(len(link._sources) for link in served(owner)) <= 2 * MAX_SERVED_READS
        await small_read_works(owner, user)


def served(owner: TransferEngine) -> list[ServedLink]:
    assert owner._tcp is not None
    return list(owner._tcp._server._links)


async def test_a_client_that_announces_writes_and_sends_no_byte_costs_a_bounded_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_SERVED_WRITES", 40)
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        token = lend(owner, MIB, 1).export("rw")
        await small_read_works(owner, user)
        num_spans = MAX_CONTROL_NBYTES // SPAN_NBYTES - 8
        template = request_frame(Op.WRITE, token, [(2 * n, 1) for n in range(num_spans)], 0)
        async with asyncio.timeout(EXAMPLE_LIMIT_S), RawClient(owner) as raw:
            await raw.hello()
            with allocates_at_most(40 * MAX_CONTROL_NBYTES + SLACK_NBYTES):
                for request_id in range(1, 42):
                    await raw.send(template[:8] + request_id.to_bytes(8, "little") + template[16:])
                await raw.until_cut_off()  # one more than the limit breaks the protocol
                await small_read_works(owner, user)


async def flood(raw: RawClient, template: bytes) -> None:
    """Send requests until the engine takes no more, has hung up, or far more than the limit."""
    for request_id in range(1, 20 * MAX_SERVED_READS):
        frame = template[:8] + request_id.to_bytes(8, "little") + template[16:]
        try:
            async with asyncio.timeout(0.3):
                await asyncio.get_running_loop().sock_sendall(raw.sock, frame)
        except (TimeoutError, ConnectionError):
            return


async def test_a_client_that_makes_errors_and_never_reads_them_is_not_listened_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_UNREAD_ANSWERS_NBYTES", 32 << 10)
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        token = lend(owner, 64, 1).export("r")
        await small_read_works(owner, user)
        async with RawClient(owner, receive_nbytes=4096) as raw:
            await raw.hello()
            refused = request_frame(Op.READ, token, [(1 << 40, 1)], 1)
            loop = asyncio.get_running_loop()
            flooding = loop.create_task(loop.sock_sendall(raw.sock, refused * 200_000))
            await until(lambda: unread_nbytes(owner) >= 32 << 10)
            await small_read_works(owner, user)
            assert not flooding.done()
            assert 32 << 10 <= unread_nbytes(owner) <= 64 << 10
            flooding.cancel()
            await asyncio.wait([flooding])
        await small_read_works(owner, user)


def unread_nbytes(owner: TransferEngine) -> int:
    return max(link.link.control_nbytes for link in served(owner))


async def test_idle_clients_cost_a_bounded_amount_each() -> None:
    num_clients = 200
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        await small_read_works(owner, user)
        before = num_descriptors()
        async with AsyncExitStack() as stack:
            with allocates_at_most(num_clients * CONNECTION_NBYTES):
                for _ in range(num_clients):
                    raw = await stack.enter_async_context(RawClient(owner))
                    await raw.hello()
                await small_read_works(owner, user)
        await descriptors_return_to(before)


async def test_more_calls_than_the_limit_are_refused_and_others_are_served() -> None:
    network = ZmqNetwork()
    service = TestService()
    listener = await network.listen(service, hello(Role.STORE), ANY)
    channel = await network.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(listener.address)
        raw.send(encode_frame(HelloFrame(hello(Role.PREFILL))))
        payload = encode_message(Hang())
        for id_ in range(1, MAX_OUTSTANDING + 1000):
            raw.send(encode_frame(Request(id_, "contract.hang", payload, 30.0, 0)))
        server = listener.server
        await until(lambda: server.num_running == MAX_OUTSTANDING)
        assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
        assert server.num_running <= MAX_OUTSTANDING
    await until(lambda: server.num_running == 0)  # the client has gone
    await network.close()


async def test_a_client_that_never_reads_its_answers_is_sent_away() -> None:
    network = ZmqNetwork()
    listener = await network.listen(TestService(), hello(Role.STORE), ANY)
    channel = await network.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
    gone = asyncio.Event()
    server = listener.server
    on_gone = server.on_gone

    def noticed(key: bytes, reason: str) -> None:
        gone.set()
        on_gone(key, reason)

    server.on_gone = noticed
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVHWM, 1)
        raw.setsockopt(zmq.RCVBUF, 4096)
        raw.connect(listener.address)
        raw.send(encode_frame(HelloFrame(hello(Role.PREFILL))))
        payload = encode_message(Ask("x" * 2000))
        async with asyncio.timeout(EXAMPLE_LIMIT_S):
            for id_ in range(1, 1 << 20):
                with suppress(zmq.Again):
                    raw.send(
                        encode_frame(Request(id_, "contract.ask", payload, 30.0, 0)), zmq.NOBLOCK
                    )
                if id_ % 200 == 0:
                    await asyncio.sleep(0)
                if gone.is_set():
                    break
        assert gone.is_set()
        assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
    await network.close()


async def test_frames_that_wait_while_the_loop_is_busy_are_bounded() -> None:
    """The queue of a peer that sends without end is its own business, not this process's."""
    network = ZmqNetwork()
    listener = await network.listen(TestService(), hello(Role.STORE), ANY)
    frame = bytes(MIB)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.SNDHWM, 4)
        raw.connect(listener.address)
        before = resident_nbytes()
        num_sent = 0
        while raw.poll(300, zmq.POLLOUT) and num_sent < 10 * MAX_UNREAD_FRAMES:
            raw.send(frame)  # the loop is held by this very thread
            num_sent += 1
        assert num_sent < 4 * MAX_UNREAD_FRAMES
        assert resident_nbytes() - before <= 4 * MAX_UNREAD_FRAMES * MIB
    await network.close()


# ── the registry ────────────────────────────────────────────────────────────────────────────────


def big_info(identity: Identity, num_labels: int) -> NodeInfo:
    labels = {f"label {n}": "x" * 1000 for n in range(num_labels)}
    return NodeInfo(identity=identity, address="x", labels=labels)


def fill(core: Registry) -> list[Identity]:
    """Seat talkative members until the registry takes no more; return those that sit."""
    seated: list[Identity] = []
    with suppress(HelloRefused):
        while len(seated) < MAX_VIEW_NBYTES:
            identity = new_identity(Role.STORE, f"n{len(seated):03}")
            core.register(0.0, big_info(identity, 60), NodeStatus())
            seated.append(identity)
    return seated


def test_members_together_never_say_more_than_a_view_can_carry() -> None:
    core = Registry()
    seated = fill(core)
    view = encode_message(core.view(0.0))
    assert MAX_VIEW_NBYTES // 2 < len(view) <= MAX_VIEW_NBYTES
    assert len(view) < MAX_FRAME_NBYTES
    late = big_info(new_identity(Role.STORE, "late"), 50)
    with pytest.raises(HelloRefused, match="fewer labels"):
        core.register(1.0, late, NodeStatus())
    core.register(1.0, NodeInfo(identity=seated[0], address="x"), NodeStatus())  # says less now
    core.register(1.0, late, NodeStatus())
    for identity in (*seated, late.identity):
        assert core.leave(1.0, identity.node_id, identity.incarnation) == "ok"
    assert len(fill(core)) == len(seated), "what those who left had said still counts"


def test_a_status_that_does_not_fit_changes_nothing_but_keeps_the_lease() -> None:
    core = Registry(lease_ttl_s=10.0)
    first, *_ = fill(core)
    gauges = {f"gauge {number} {'x' * 100}": 1.0 for number in range(2000)}
    with pytest.raises(HelloRefused):
        core.heartbeat(9.0, first.node_id, first.incarnation, NodeStatus(gauges=gauges))
    core.tick(15.0)
    assert [member.status for member in core.view(15.0).members] == [NodeStatus()]


async def test_watches_of_one_registry_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_WATCHERS", 3)
    service = Service()
    hosted = RegistryService(Registry(), service)
    handler = service.streams[Watch]
    caller = Caller(new_identity(Role.OBSERVER), soon())
    streams: list[AsyncIterator[Any]] = [handler(Watch(), caller) for _ in range(4)]
    for stream in streams[:3]:
        assert isinstance(await anext(stream), MembershipView)
    with pytest.raises(RemoteFailed, match="overloaded"):
        await anext(streams[3])
    hosted.close()
    for stream in streams:
        await stream.aclose()


async def test_a_message_that_is_too_long_is_refused_before_it_is_sent() -> None:
    with pytest.raises(FrameInvalid, match="region"):
        encode_frame(Request(1, "any", bytes(MAX_FRAME_NBYTES), 1.0, 0))
