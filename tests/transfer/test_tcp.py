"""What only tcp has to fear: foreign bytes, secrets, slow peers, vanished peers, idle cost."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from tests.transfer.bulk_harness import (
    MIB,
    ROOT,
    PeerProcess,
    checked_engines,
    pattern,
    soon,
    until,
    whole,
)
from tests.transfer.raw_tcp import RawClient, request_frame
from transfer.engine import TransferEngine
from transfer.error_codes import error_of
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerLost,
    PeerUnreachable,
    RegionRevoked,
    Unauthorized,
)
from transfer.interface import deadline_after
from transfer.tcp_codec import Op, control_frame
from transfer.tcp_liveness import LIVENESS_S
from transfer.tcp_sockets import join_address, split_address
from transfer.token import decode_token, encode_token


async def small_read_works(owner: TransferEngine, peer: TransferEngine) -> None:
    region, local = owner.allocate(1000), peer.allocate(1000)
    region.view[:] = pattern(1000).data
    await peer.read(region.export("r"), whole(1000), into=local, deadline_s=soon())
    assert local.view == region.view


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", b"\x00" * 100, b"KVF1" * 30]
)
async def test_foreign_bytes_end_their_connection_and_no_other(garbage: bytes) -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        await small_read_works(owner, peer)
        async with RawClient(owner) as raw:
            await raw.send(garbage)
            await raw.until_cut_off()
        await small_read_works(owner, peer)


async def test_requests_before_the_hello_are_refused_with_a_reason() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make()
        async with RawClient(owner) as raw:
            await raw.send(request_frame(Op.READ, owner.allocate(8).export("r"), [(0, 8)]))
            header, body = await raw.frame()
            assert header.op is Op.DONE
            assert b"out of order" in body


async def test_data_that_nobody_asked_for_ends_the_connection() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make()
        async with RawClient(owner) as raw:
            await raw.hello()
            await raw.send(control_frame(Op.DATA, 5, b"x"))
            await raw.until_cut_off()


async def test_a_client_that_says_nothing_is_cut_off() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(connect_timeout_s=0.05)
        async with RawClient(owner) as raw:
            await raw.until_cut_off()


async def test_equal_secrets_connect_and_different_ones_do_not() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make(cluster_secret="right")
        await small_read_works(owner, await engines.make(cluster_secret="right"))
        for settings in ({"cluster_secret": "wrong"}, {}):
            with pytest.raises(Unauthorized):
                await small_read_works(owner, await engines.make(**settings))


async def test_a_reader_that_does_not_read_slows_nobody_else() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        region = owner.allocate(64 * MIB)
        async with RawClient(owner) as slow:
            await slow.hello()
            await slow.send(request_frame(Op.READ, region.export("r"), [(0, 64 * MIB)]))
            await slow.frame()
            for _ in range(5):
                await small_read_works(owner, peer)


async def test_a_writer_that_stalls_in_mid_frame_slows_nobody_else_and_is_forgotten() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        region = owner.allocate(4096)
        async with RawClient(owner) as slow:
            await slow.hello()
            await slow.send(request_frame(Op.WRITE, region.export("w"), [(0, 4096)]))
            data = control_frame(Op.DATA, 1, b"\x01" * 4096)
            await slow.send(data[:2000])
            await until(lambda: region.view[100])
            await small_read_works(owner, peer)
            region.revoke()
            before = bytes(region.view)
            await slow.send(data[2000:])
            header, body = await slow.frame()
            assert isinstance(error_of(header.status, body), RegionRevoked)
            assert region.view == before
        await small_read_works(owner, peer)


async def test_several_connections_to_one_peer_share_the_work() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make()
        peer = await engines.make(connections_per_peer=4, request_nbytes=MIB)
        region = owner.allocate(8 * MIB)
        region.view[:] = pattern(8 * MIB).data
        locals_ = [peer.allocate(8 * MIB) for _ in range(6)]
        async with asyncio.TaskGroup() as group:
            for local in locals_:
                group.create_task(
                    peer.read(region.export("r"), whole(8 * MIB), into=local, deadline_s=soon())
                )
        assert all(local.view == region.view for local in locals_)


async def test_a_close_that_is_cancelled_stops_the_engine_all_the_same() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        local = peer.allocate(8)
        await peer.read(owner.allocate(8).export("r"), whole(8), into=local, deadline_s=soon())
        closing = asyncio.ensure_future(peer.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert closing.cancelled()
        assert peer._io is not None
        assert not peer._io.is_alive


async def test_nobody_at_the_address_is_unreachable_at_once() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        token, local = owner.allocate(8).export("r"), peer.allocate(8)
        await owner.close()
        with pytest.raises(PeerUnreachable, match=owner.address):
            await peer.read(token, whole(8), into=local, deadline_s=soon())


async def test_a_listener_that_never_says_hello_is_unreachable_after_the_limit() -> None:
    async with checked_engines("tcp") as engines:
        owner = await engines.make()
        peer = await engines.make(connect_timeout_s=0.1)
        port = int(owner.address.rpartition(":")[2])
        token, local = owner.allocate(8).export("r"), peer.allocate(8)
        await owner.close()
        with socket.create_server(("127.0.0.1", port)), pytest.raises(PeerUnreachable):
            await peer.read(token, whole(8), into=local, deadline_s=soon())


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", ":1", f"{'a' * 70}.example:1"])
async def test_a_token_with_a_nonsense_address_fails_at_once(address: str) -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        token, local = decode_token(owner.allocate(8).export("r")), peer.allocate(8)
        endpoint = msgspec.structs.replace(token.endpoint, tcp=address)
        forged = encode_token(msgspec.structs.replace(token, endpoint=endpoint))
        with pytest.raises((FrameInvalid, PeerUnreachable)):
            await peer.read(forged, whole(8), into=local, deadline_s=soon())


def test_addresses_of_both_families_split_and_join() -> None:
    for address in ("127.0.0.1:80", "[::1]:80", "host.example:1"):
        assert join_address(*split_address(address)) == address


@pytest.mark.net
@pytest.mark.slow
async def test_a_host_that_vanishes_is_noticed_in_two_seconds_whatever_is_under_way() -> None:
    command = ["unshare", "-rn", sys.executable, "-m", "tests.transfer.vanishing_host"]
    probe = subprocess.run(["unshare", "-rn", "ip", "link"], capture_output=True)  # noqa: ASYNC221
    if probe.returncode:
        pytest.skip("needs user namespaces and ip")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    found = json.loads(output)
    assert sorted(found) == ["idle", "read", "write"]
    for kind, (error, seconds) in found.items():
        assert error == "PeerLost", kind
        assert seconds < LIVENESS_S + 1.0, kind


@pytest.mark.net
@pytest.mark.slow
async def test_a_stopped_peer_with_a_full_window_is_slow_not_lost() -> None:
    """Longer than the liveness limit: zero-window probes are answered by the peer's kernel."""

    async with checked_engines("tcp") as engines, PeerProcess("tcp", 64 * MIB) as process:
        peer = await engines.make()
        local = peer.allocate(64 * MIB)
        await peer.write(process.token, whole(8), source=local, deadline_s=soon())
        await process.stop()
        deadline_s = deadline_after(LIVENESS_S + 1.5)
        with pytest.raises(DeadlineExceeded):  # not PeerLost
            await peer.write(process.token, whole(64 * MIB), source=local, deadline_s=deadline_s)
        process.signal(signal.SIGCONT)
        await peer.write(process.token, whole(64 * MIB), source=local, deadline_s=soon())


async def test_an_idle_connection_costs_no_processor_time() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        await small_read_works(owner, peer)
        clocks = [thread_clock(engine) for engine in (owner, peer)]
        before = [time.clock_gettime(clock) for clock in clocks]
        await asyncio.sleep(1.0)  # the passing of real time is what is measured
        spent = [time.clock_gettime(c) - b for c, b in zip(clocks, before, strict=True)]
        assert max(spent) < 0.005, f"I/O threads used {spent} s of processor time in 1 s"


def thread_clock(engine: TransferEngine) -> int:

    name = f"kvferry-io-{engine.incarnation[:6]}"
    thread = next(t for t in threading.enumerate() if t.name == name)
    assert thread.ident is not None
    return time.pthread_getcpuclockid(thread.ident)


async def test_lost_connections_are_made_again() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(), await engines.make()
        await small_read_works(owner, peer)
        assert peer._tcp is not None
        assert peer._io is not None
        cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def cut_all() -> None:
            assert peer._tcp is not None
            for each in peer._tcp._peers.values():
                each.abort(PeerLost("cut by the test"))
            loop.call_soon_threadsafe(cut.set_result, None)

        peer._io.call(cut_all)
        await cut
        await small_read_works(owner, peer)
