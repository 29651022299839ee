"""Channels over real sockets: the contract suite, real deaths, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from tests.transfer.channel_contract import (
    ANY,
    CHECKS,
    Ask,
    Check,
    Hang,
    HangStream,
    TestService,
    Told,
    hello,
    soon,
    talking,
)
from transfer.channel import LIVENESS_S, Network, Service
from transfer.errors import PeerClosed, PeerLost, PeerUnreachable
from transfer.identity import Role, new_identity
from transfer.membership import NodeInfo, NodeStatus
from transfer.registry import Registry, RegistryService
from transfer.registry_client import RegistryMembership
from transfer.zmq_network import ZmqNetwork

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def server() -> AsyncIterator[ZmqNetwork]:
    network = ZmqNetwork()
    yield network
    await network.close()


@pytest.fixture
async def client() -> AsyncIterator[ZmqNetwork]:
    network = ZmqNetwork()
    yield network
    await network.close()


@contextlib.asynccontextmanager
async def peer_process(bind: str = ANY) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run ``zmq_peer`` as a process; yield it with its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.transfer.zmq_peer", bind),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
        yield process, address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
async def test_zmq_keeps_the_contract(check: Check, server: Network, client: Network) -> None:
    await check(server, client)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_zmq_keeps_the_contract_under_uvloop(check: Check) -> None:
    async def body() -> None:
        server, client = ZmqNetwork(), ZmqNetwork()
        try:
            await check(server, client)
        finally:
            await client.close()
            await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


async def test_a_cluster_secret_lets_in_only_those_who_know_it() -> None:
    server, friend = ZmqNetwork(secret="open sesame"), ZmqNetwork(secret="open sesame")
    stranger, other = ZmqNetwork(), ZmqNetwork(secret="open barley")
    listener = await server.listen(TestService(), hello(Role.STORE), ANY)
    try:
        channel = await friend.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
        assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
        for network in (stranger, other):
            with pytest.raises(PeerUnreachable):
                await network.connect(listener.address, hello(Role.DECODE), deadline_s=soon(0.4))
    finally:
        for network in (friend, stranger, other, server):
            await network.close()


@pytest.mark.parametrize("secret", [None, ""])
def test_remote_peers_are_refused_without_a_cluster_secret(secret: str | None) -> None:
    with pytest.raises(ValueError, match="cluster secret"):
        ZmqNetwork(allow_remote=True, secret=secret)


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.7:0", "ws://0.0.0.0:0", "udp://*:0"]
)
async def test_only_loopback_is_bound_unless_allowed(server: ZmqNetwork, bind: str) -> None:
    with pytest.raises(PeerUnreachable, match="other machines"):
        await server.listen(TestService(), hello(Role.STORE), bind)


async def test_a_wildcard_listener_names_an_address_that_can_be_reached() -> None:
    network = ZmqNetwork(allow_remote=True, secret="open sesame")
    try:
        listener = await network.listen(TestService(), hello(Role.STORE), "tcp://0.0.0.0:0")
        assert "0.0.0.0" not in listener.address
        channel = await network.connect(listener.address, hello(Role.DECODE), deadline_s=soon())
        assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
    finally:
        await network.close()


async def test_a_listener_that_starts_later_is_found(server: Network, client: Network) -> None:
    first = await server.listen(TestService(), hello(Role.STORE), ANY)
    address = first.address
    await first.close()
    connecting = asyncio.ensure_future(
        client.connect(address, hello(Role.DECODE), deadline_s=soon(10))
    )
    await asyncio.sleep(0.1)
    assert not connecting.done()
    second = await server.listen(TestService(), hello(Role.STORE), address)
    channel = await connecting
    assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
    await channel.close()
    await second.close()


async def test_membership_works_over_real_sockets(server: ZmqNetwork, client: ZmqNetwork) -> None:
    service, registry = Service(), Registry()
    hosted = RegistryService(registry, service)
    listener = await server.listen(service, hello(Role.GATEWAY), ANY)
    identity = new_identity(Role.STORE, "s0")
    membership = RegistryMembership(client, listener.address, identity)
    await membership.join(NodeInfo(identity=identity, address="tcp://127.0.0.1:1"), NodeStatus)
    assert [member.node_id for member in membership.view.members] == ["s0"]
    await membership.leave()
    assert registry.view(0.0).members == ()
    hosted.close()
    await listener.close()


@pytest.mark.net
async def test_a_killed_peer_is_noticed_at_once(client: ZmqNetwork) -> None:
    async with peer_process() as (process, address):
        channel = await client.connect(address, hello(Role.DECODE), deadline_s=soon())
        request = asyncio.ensure_future(channel.request(Hang(), Told, deadline_s=soon(60)))
        items = channel.stream(HangStream(), Told, deadline_s=soon(60))
        assert (await anext(items)).text == "first"
        process.kill()
        start_s = soon(0)
        with pytest.raises(PeerLost):
            await anext(items)
        with pytest.raises(PeerLost):
            await request
        assert soon(0) - start_s < 0.5
        assert channel.closed


@pytest.mark.net
async def test_a_stopped_peer_is_lost_in_time_and_comes_back(client: ZmqNetwork) -> None:
    async with peer_process() as (process, address):
        channel = await client.connect(address, hello(Role.DECODE), deadline_s=soon())
        request = asyncio.ensure_future(channel.request(Hang(), Told, deadline_s=soon(60)))
        await channel.request(Ask("x"), Told, deadline_s=soon())
        process.send_signal(signal.SIGSTOP)
        start_s = soon(0)
        try:
            with pytest.raises(PeerLost):
                await request
            assert soon(0) - start_s < LIVENESS_S + 1
        finally:
            process.send_signal(signal.SIGCONT)
        again = await client.connect(address, hello(Role.DECODE), deadline_s=soon())
        assert (await again.request(Ask("x"), Told, deadline_s=soon())).text == "x"


@pytest.mark.net
async def test_a_killed_client_has_its_handlers_cancelled_at_once(server: ZmqNetwork) -> None:
    service = TestService()
    listener = await server.listen(service, hello(Role.STORE), ANY)
    code = (
        "import asyncio\n"
        "from tests.transfer.channel_contract import *\n"
        "from transfer.zmq_network import ZmqNetwork\n"
        "async def main():\n"
        f"    c = await ZmqNetwork().connect({listener.address!r}, hello(Role.DECODE),"
        " deadline_s=soon())\n"
        "    await c.request(Hang(), Told, deadline_s=soon(60))\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT)
    try:
        await asyncio.wait_for(service.started.wait(), 20)
    finally:
        process.kill()
        await process.wait()
    await asyncio.wait_for(service.cancelled.wait(), 0.5)
    await listener.close()


def open_files() -> int:
    return psutil.Process(os.getpid()).num_fds()


async def descriptors_return_to(limit: int) -> None:
    """Wait for ZeroMQ's own thread, which closes sockets a little later."""
    for _ in range(200):
        if open_files() <= limit:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{open_files()} descriptors are open, expected {limit}")


async def test_twenty_restarts_on_one_address_leave_no_descriptor(client: ZmqNetwork) -> None:
    address = ANY
    before = open_files() + 8  # the client's context and threads
    for _ in range(20):
        server = ZmqNetwork()
        listener = await server.listen(TestService(), hello(Role.STORE), address)
        address = listener.address
        channel = await client.connect(address, hello(Role.DECODE), deadline_s=soon())
        assert (await channel.request(Ask("x"), Told, deadline_s=soon())).text == "x"
        await server.close()
        with pytest.raises((PeerClosed, PeerLost)):
            await channel.request(Hang(), Told, deadline_s=soon())
        assert channel.closed
    await descriptors_return_to(before)


async def test_an_aborted_network_leaves_no_descriptor() -> None:
    before = open_files()
    for _ in range(3):
        server, client = ZmqNetwork(), ZmqNetwork()
        service = TestService()
        async with talking(server, client, service) as (_, channel):
            request = asyncio.ensure_future(channel.request(Hang(), Told, deadline_s=soon(60)))
            await asyncio.wait_for(service.started.wait(), 2)
            client.abort()
            server.abort()
            client.abort()
            with pytest.raises(PeerClosed):
                await request
        await server.close()
    await descriptors_return_to(before + 1)


async def test_an_abort_in_the_middle_of_a_close_ends_it() -> None:
    server, client = ZmqNetwork(), ZmqNetwork()
    service = TestService()
    async with talking(server, client, service) as (_, channel):
        request = asyncio.ensure_future(channel.request(Hang(), Told, deadline_s=soon(60)))
        await asyncio.wait_for(service.started.wait(), 20)
        closing = asyncio.ensure_future(server.close())
        await asyncio.sleep(0)  # it now awaits the handler that it cancelled
        assert not closing.done()
        server.abort()  # hung for good when the closing listener was forgotten with its socket open
        await closing
        with pytest.raises((PeerClosed, PeerLost)):
            await request
    await client.close()


@pytest.fixture
def quiet_loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_an_idle_channel_takes_no_processor_time(quiet_loop: asyncio.Runner) -> None:
    async def body() -> float:
        server, client = ZmqNetwork(), ZmqNetwork()
        async with talking(server, client, TestService()) as (_, channel):
            await channel.request(Ask("x"), Told, deadline_s=soon())
            before = sum(os.times()[:2])
            await asyncio.sleep(0.5)
            used_s = sum(os.times()[:2]) - before
        await client.close()
        await server.close()
        return used_s

    assert quiet_loop.run(body()) <= 0.05
