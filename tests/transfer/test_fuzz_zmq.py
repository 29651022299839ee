"""Real control sockets and whoever may connect to them: raw frames, raw bytes, wrong answers."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from tests.transfer.channel_contract import ANY, Ask, Count, TestService, Told, hello
from tests.transfer.fuzzing import (
    EXAMPLE_LIMIT_S,
    NESTED,
    allocates_at_most,
    descriptors_return_to,
    examples,
    mutated,
    no_alarm,
    num_descriptors,
    shuffled,
)
from transfer.channel import Channel, Service
from transfer.errors import TransferError
from transfer.identity import Role, new_identity
from transfer.membership import MembershipView, NodeInfo, NodeStatus
from transfer.registry import Answer, Heartbeat, Leave, Register, Registry, RegistryService, Watch
from transfer.registry_client import RegistryMembership
from transfer.rpc_frames import (
    Cancel,
    Credit,
    End,
    Failed,
    Frame,
    Goodbye,
    HelloAccepted,
    HelloFrame,
    Item,
    Ping,
    Pong,
    Reply,
    Request,
    decode_frame,
    encode_frame,
    encode_message,
)
from transfer.zmq_network import ZmqNetwork
from transfer.zmq_socket import LoopSocket

MIB = 1 << 20
HELD_NBYTES = 16 * MIB
THEIRS = hello(Role.DECODE)
# What a ZeroMQ peer says first: signature, version 3.1, no security, then its READY command.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def soon() -> float:
    return asyncio.get_running_loop().time() + EXAMPLE_LIMIT_S


@contextmanager
def raw_socket(kind: int, address: str) -> Iterator[zmq.Socket[Any]]:
    with zmq.Context() as context:
        sock: zmq.Socket[Any] = context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)  # closing must not hold the loop
        sock.connect(address)
        try:
            yield sock
        finally:
            sock.close()


def request(id_: int, message: Any, name: str, window: int = 0) -> Frame:
    return Request(id_, name, encode_message(message), 5.0, window)


def questions(*requests: Frame) -> list[bytes]:
    """Return a conversation of a client, as frames."""
    frames = [HelloFrame(THEIRS), *requests, Ping(1, [(1, 5), (2, 5)]), Credit(2, 100), Cancel(1)]
    return [encode_frame(frame) for frame in (*frames, Goodbye("over", orderly=True))]


async def client_attack(rng: random.Random, address: str, frames: list[bytes]) -> None:
    """Send a broken conversation; it has arrived when this returns."""
    with raw_socket(zmq.DEALER, address) as sock:
        for frame in shuffled(rng, frames):
            parts = [frame] if rng.random() < 0.8 else [frame, NESTED, b""]
            sock.send_multipart(parts)
        sock.send(encode_frame(HelloFrame(THEIRS)))
        for _ in range(50):  # an answer, or a while: it may have been sent away for good
            if sock.poll(0):
                return
            await asyncio.sleep(0.002)


async def ask(channel: Channel, text: str = "x") -> None:
    assert (await channel.request(Ask(text), Told, deadline_s=soon())).text == text


async def test_a_listener_serves_others_whatever_a_client_sends() -> None:
    network = ZmqNetwork()
    service = TestService()
    listener = await network.listen(service, hello(Role.STORE), ANY)
    channel = await network.connect(listener.address, THEIRS, deadline_s=soon())
    await ask(channel)
    before = num_descriptors()
    asked = questions(
        request(1, Ask("x"), "contract.ask"), request(2, Count(500), "contract.count", 5)
    )
    with no_alarm(), allocates_at_most(HELD_NBYTES):
        for example in examples(60):
            with example as rng:
                async with asyncio.timeout(EXAMPLE_LIMIT_S):
                    await client_attack(rng, listener.address, asked)
                    await ask(channel)
    await descriptors_return_to(before)
    await network.close()


async def test_bytes_that_are_no_zeromq_end_their_connection_and_no_other() -> None:
    network = ZmqNetwork()
    listener = await network.listen(TestService(), hello(Role.STORE), ANY)
    channel = await network.connect(listener.address, THEIRS, deadline_s=soon())
    port = urlsplit(listener.address).port
    before = num_descriptors()
    whole = GREETING + READY + b"\x00\x05hello" + b"\x02" + (1 << 63).to_bytes(8, "big")
    with no_alarm():
        for example in examples(40):
            with example as rng:
                with socket.create_connection(("127.0.0.1", port)) as raw, suppress(OSError):
                    raw.sendall(mutated(rng, whole) if rng.random() < 0.9 else rng.randbytes(200))
                await ask(channel)
    await descriptors_return_to(before)
    await network.close()


@asynccontextmanager
async def hosted_registry(network: ZmqNetwork) -> AsyncIterator[tuple[Registry, str]]:
    service, registry = Service(), Registry(lease_ttl_s=3600.0)
    hosted = RegistryService(registry, service)
    listener = await network.listen(service, hello(Role.GATEWAY), ANY)
    try:
        yield registry, listener.address
    finally:
        hosted.close()
        await listener.close()


async def test_a_registry_keeps_its_members_whatever_a_client_sends() -> None:
    server, client = ZmqNetwork(), ZmqNetwork()
    node, incarnation = THEIRS.identity.node_id, THEIRS.identity.incarnation
    info, status = NodeInfo(identity=THEIRS.identity, address="x"), NodeStatus(gauges={"a": 1.0})
    beat = Heartbeat(node_id=node, incarnation=incarnation, status=status)
    asked = questions(
        request(1, Register(info=info, status=status), "registry.register"),
        request(2, Watch(), "registry.watch", 5),
        request(3, beat, "registry.heartbeat"),
        request(4, Leave(node_id=node, incarnation=incarnation), "registry.leave"),
    )
    async with hosted_registry(server) as (registry, address):
        identity = new_identity(Role.STORE, "honest")
        membership = RegistryMembership(client, address, identity)
        await membership.join(NodeInfo(identity=identity, address="y"), NodeStatus)
        with no_alarm(), allocates_at_most(HELD_NBYTES):
            for example in examples(60):
                with example as rng:
                    async with asyncio.timeout(EXAMPLE_LIMIT_S):
                        await client_attack(rng, address, asked)
                    assert registry.view(0.0).get(identity.node_id) is not None
        await membership.leave()
    await client.close()
    await server.close()


class NoView(msgspec.Struct):
    version: str


class RawListener:
    """A ROUTER socket that greets as it should and answers everything else with anything."""

    def __init__(self, rng: random.Random) -> None:
        self._context = zmq.Context()
        self._rng = rng
        sock: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind(ANY)
        self.address = sock.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._socket = LoopSocket(sock, self._on_message, lambda: None)

    def _on_message(self, parts: list[bytes]) -> None:
        key, frame = parts[0], decode_frame(parts[-1])
        if isinstance(frame, HelloFrame) and self._rng.random() < 0.8:
            self._send(key, encode_frame(HelloAccepted(hello(Role.STORE))))
        if not isinstance(frame, Request):
            return
        told = encode_message(Told("x"))
        answers: list[Frame] = [
            Item(frame.id, 0, told),
            Item(frame.id, 1, told),
            End(frame.id, 2),
            Reply(frame.id, told),
            Failed(frame.id, "full", "no"),
            Pong(1, [frame.id]),
            HelloAccepted(hello(Role.STORE)),
            Goodbye("over", orderly=True),
        ]
        chosen = self._rng.sample(answers, self._rng.randint(0, 4))
        for data in shuffled(self._rng, [encode_frame(answer) for answer in chosen]):
            self._send(key, data)

    def _send(self, key: bytes, data: bytes) -> None:
        with suppress(zmq.ZMQError):  # the client has had enough
            self._socket.send([key, data] if self._rng.random() < 0.9 else [key, data, b"more"])

    def close(self) -> None:
        self._socket.close(linger_ms=0)
        self._context.term()


async def test_a_caller_gets_an_answer_or_an_error_whatever_the_listener_sends() -> None:
    network = ZmqNetwork()
    service = TestService()
    honest = await network.listen(service, hello(Role.STORE), ANY)
    channel = await network.connect(honest.address, THEIRS, deadline_s=soon())
    await ask(channel)
    before = num_descriptors()
    with no_alarm(), allocates_at_most(HELD_NBYTES):
        for example in examples(30):
            with example as rng:
                raw = RawListener(rng)
                async with asyncio.timeout(EXAMPLE_LIMIT_S):
                    with suppress(TransferError):
                        await talk(network, raw.address)
                    await ask(channel)
                raw.close()
    await descriptors_return_to(before)
    await network.close()


async def talk(network: ZmqNetwork, address: str) -> None:
    short_s = asyncio.get_running_loop().time() + 0.1
    evil = await network.connect(address, THEIRS, deadline_s=short_s)
    try:
        with suppress(TransferError):
            await evil.request(Ask("x"), Told, deadline_s=short_s)
        async for told in evil.stream(Count(2), Told, deadline_s=short_s):
            assert isinstance(told, Told)
    finally:
        evil.abort()


@pytest.mark.parametrize("how", ["leave", "abort"])
@pytest.mark.parametrize("answer", [MembershipView(), Answer(outcome="ok"), Told("?")])
async def test_a_node_waits_for_a_registry_that_answers_wrongly(answer: Any, how: str) -> None:
    """It neither fails nor believes it: it goes on trying."""
    server, client = ZmqNetwork(), ZmqNetwork()
    service = Service()
    tried = asyncio.Event()

    async def wrong(_message: Any, _caller: Any) -> Any:
        tried.set()
        return answer

    async def wrong_views(_message: Any, _caller: Any) -> AsyncIterator[Any]:
        tried.set()
        yield NoView("?")

    service.on(Register, wrong)
    service.on_stream(Watch, wrong_views)
    listener = await server.listen(service, hello(Role.GATEWAY), ANY)
    identity = new_identity(Role.STORE)
    membership = RegistryMembership(client, listener.address, identity)
    joining = asyncio.ensure_future(
        membership.join(NodeInfo(identity=identity, address="y"), NodeStatus)
    )
    with no_alarm():
        for _ in range(2):
            tried.clear()
            await asyncio.wait_for(tried.wait(), EXAMPLE_LIMIT_S)
        assert not joining.done()
        assert not membership.connected
        async with asyncio.timeout(
            EXAMPLE_LIMIT_S
        ):  # also in the turn in which an answer is refused
            if how == "leave":
                await membership.leave()
            else:
                membership.abort()
            with suppress(TransferError):
                await joining
    await client.close()
    await server.close()
