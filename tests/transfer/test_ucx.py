"""The ucx transport between engines: every byte, faults, what is said and what is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from pydantic import SecretStr

from tests.transfer.bulk_harness import (
    MIB,
    Engines,
    PeerProcess,
    checked_engines,
    open_files,
    pattern,
    shared_memory_files,
    soon,
    until,
    whole,
)
from tests.transfer.ucx_support import NEEDS_UCX
from transfer.engine import TransferEngine
from transfer.errors import DeadlineExceeded, PeerLost, PeerUnreachable, Unauthorized
from transfer.interface import Range, deadline_after
from transfer.token import decode_token, encode_token
from transfer.ucx_binding import options_for

pytestmark = NEEDS_UCX
TRANSPORTS = pytest.mark.parametrize("tls", ["tcp", "posix,cma,self"], indirect=True)


@pytest.fixture
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Restrict UCX to some of its transports, in this process and in those it starts."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


async def make_pair(engines: Engines, **settings: object) -> tuple[TransferEngine, TransferEngine]:
    return await engines.make(**settings), await engines.make(**settings)


@TRANSPORTS
async def test_long_and_short_runs_in_any_order_land_where_they_belong(tls: str) -> None:
    lengths = [1, 100_000, 7, 31, 40_000, 32 * 1024, 32 * 1024 - 1, 3, 3 * MIB, 5]
    gap, offset, ranges = 13, 0, []
    for nbytes in lengths:
        ranges.append(Range(offset, 6 * MIB - offset - nbytes, nbytes))
        offset += nbytes + gap
    async with checked_engines("ucx") as engines:
        owner, peer = await make_pair(engines)
        remote, local = owner.allocate(6 * MIB), peer.allocate(6 * MIB)
        remote.view[:] = pattern(6 * MIB).data
        await peer.read(remote.export("r"), ranges, into=local, deadline_s=soon())
        expected = np.zeros(6 * MIB, np.uint8)
        for there, here, nbytes in ranges:
            expected[here : here + nbytes] = np.frombuffer(remote.view, np.uint8)[
                there : there + nbytes
            ]
        assert (np.frombuffer(local.view, np.uint8) == expected).all()
        remote.view[:] = bytes(6 * MIB)
        await peer.write(remote.export("w"), ranges, source=local, deadline_s=soon())
        for there, here, nbytes in ranges:
            assert remote.view[there : there + nbytes] == local.view[here : here + nbytes]
        assert peer.counters().fallbacks == 0


@TRANSPORTS
async def test_what_is_in_use_is_said_at_start_and_on_request(
    tls: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="transfer.engine")
    async with checked_engines("ucx") as engines:
        engine = await engines.make()
        wanted = "tcp/lo" if tls == "tcp" else "posix/memory"
        assert re.search(rf"ucx \d+\.\d+.*\(uc.*over .*{wanted}", engine.describe())
        assert engine.describe() in caplog.text
        assert engine.transport == "ucx"
        assert engine.is_healthy
    assert not engine.is_healthy


def listening_hosts() -> set[str]:
    """Return the IPv4 hosts on which this process listens, its libraries included."""
    own = {name for name in open_files() if name.startswith("socket:")}
    hosts = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            packed = bytes.fromhex(fields[1].partition(":")[0])
            hosts.add(socket.inet_ntoa(packed[::-1]))
    return hosts


@pytest.mark.parametrize("tls", ["tcp"], indirect=True)
async def test_nothing_of_ucx_itself_listens_beyond_this_machine(tls: str) -> None:
    async with checked_engines("ucx") as engines:
        owner, peer = await make_pair(engines)
        local = peer.allocate(8)
        await peer.read(owner.allocate(8).export("r"), whole(8), into=local, deadline_s=soon())
        assert listening_hosts() == {"127.0.0.1"}


async def test_a_secret_that_differs_is_refused_before_a_worker_is_made() -> None:
    async with checked_engines("ucx") as engines:
        owner = await engines.make(cluster_secret=SecretStr("one"))
        peer = await engines.make(cluster_secret=SecretStr("two"))
        local = peer.allocate(8)
        with pytest.raises(Unauthorized, match="secret"):
            await peer.read(owner.allocate(8).export("r"), whole(8), into=local, deadline_s=soon())


async def test_a_peer_that_answers_nothing_costs_its_own_deadline_and_nobody_else() -> None:
    async with checked_engines("ucx") as engines:
        owner, peer = await make_pair(engines)
        region, local = owner.allocate(8), peer.allocate(8)
        token = region.export("r")
        port = int(decode_token(token).endpoint.ucx.rpartition(":")[2])
        await owner.close()
        with socket.create_server(("127.0.0.1", port)):  # accepts, and never says a word
            waiting = asyncio.create_task(
                peer.read(token, whole(8), into=local, deadline_s=deadline_after(0.5))
            )
            other = await engines.make()
            served = other.allocate(8)
            await peer.read(served.export("r"), whole(8), into=local, deadline_s=soon())
            assert not waiting.done()
            with pytest.raises(DeadlineExceeded):
                await waiting


async def test_a_closed_port_is_unreachable_at_once_not_after_the_connect_limit() -> None:
    async with checked_engines("ucx") as engines:
        owner, peer = await make_pair(engines, connect_timeout_s=60.0)
        region, local = owner.allocate(8), peer.allocate(8)
        token = region.export("r")
        await owner.close()
        with pytest.raises(PeerUnreachable, match="nothing answers"):
            await peer.read(token, whole(8), into=local, deadline_s=soon())


@pytest.mark.net
@TRANSPORTS
@pytest.mark.parametrize("kind", ["read", "write"])
async def test_a_peer_that_freezes_is_lost_within_two_seconds(tls: str, kind: str) -> None:
    """Whatever the deadline, and though nobody asks anything of it again."""
    nbytes = 32 * MIB
    async with checked_engines("ucx") as engines, PeerProcess("ucx", nbytes) as process:
        peer = await engines.make()
        local = peer.allocate(nbytes)
        await peer.read(process.token, whole(8), into=local, deadline_s=soon())
        await process.stop()
        if kind == "read":
            move = peer.read(process.token, whole(nbytes), into=local, deadline_s=soon())
        else:
            move = peer.write(process.token, whole(nbytes), source=local, deadline_s=soon())
        start = asyncio.get_running_loop().time()
        with pytest.raises(PeerLost, match="has not answered"):
            await move
        assert asyncio.get_running_loop().time() - start < 2.5


@pytest.mark.net
@pytest.mark.parametrize("tls", ["posix,cma,self"], indirect=True)
async def test_a_process_that_is_killed_leaves_no_shared_memory(tls: str) -> None:
    before = shared_memory_files()
    async with checked_engines("ucx") as engines:
        peer = await engines.make()
        local = peer.allocate(8 * MIB)
        for _ in range(3):
            async with PeerProcess("ucx", 8 * MIB) as process:
                await peer.read(process.token, whole(8 * MIB), into=local, deadline_s=soon())
                await process.kill()
        assert shared_memory_files() == before


@TRANSPORTS
async def test_twenty_lives_on_one_address_leave_no_descriptor(tls: str) -> None:
    async with checked_engines("ucx") as engines:
        peer = await engines.make()
        local, port, counts = peer.allocate(MIB), 0, []
        for _ in range(20):
            owner = await engines.make(port=port)
            port = int(owner.address.rpartition(":")[2])
            region = owner.allocate(MIB)
            await peer.read(region.export("r"), whole(MIB), into=local, deadline_s=soon())
            owner.abort()
            await until(lambda: not peer_links(peer))
            counts.append(len(open_files()))
        assert counts[-1] <= counts[1], counts


def peer_links(engine: TransferEngine) -> list[object]:
    """Return the connections that ``engine`` has made."""
    assert engine._ucx is not None
    return [peer for peer in list(engine._ucx._peers.values()) if peer._client is not None]


async def test_a_peer_without_ucx_is_reached_by_tcp_loudly_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with checked_engines("ucx") as engines:
        owner, peer = await engines.make(transport="tcp"), await engines.make()
        region, local = owner.allocate(64), peer.allocate(64)
        region.view[:] = pattern(64).data
        for _ in range(2):
            await peer.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        assert local.view == region.view
        assert caplog.text.count("is reached by tcp, not ucx") == 1
        assert peer.counters().fallbacks == 1


async def test_a_blocked_ucx_port_leaves_tcp(caplog: pytest.LogCaptureFixture) -> None:
    async with checked_engines("ucx") as engines:
        owner, peer = await make_pair(engines)
        region, local = owner.allocate(64), peer.allocate(64)
        region.view[:] = pattern(64).data
        token = decode_token(region.export("r"))
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound and not listening: every connect is refused
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            blocked = encode_token(replace(token, endpoint=replace(token.endpoint, ucx=address)))
            for _ in range(2):
                await peer.read(blocked, whole(64), into=local, deadline_s=soon())
        assert local.view == region.view
        assert caplog.text.count("is reached by tcp, not ucx") == 1
        assert peer.counters().fallbacks == 1


async def test_without_a_binding_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with checked_engines("ucx") as engines:
        monkeypatch.setattr("transfer.ucx_binding.BINDINGS", {})
        with pytest.raises(PeerUnreachable, match=re.escape("pip install 'ucxx-cu12>=0.40'")):
            await engines.unstarted().start()


async def test_without_a_device_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with checked_engines("ucx") as engines:
        monkeypatch.setenv("UCX_TLS", "rc_no_such_device")
        with pytest.raises(PeerUnreachable, match=r"UCX_TLS.*ulimit -l"):
            await engines.unstarted().start()


async def test_auto_offers_ucx_where_an_rdma_device_exists_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="transfer.engine")
    async with checked_engines("ucx"), checked_engines("auto") as engines:
        plain = await engines.make()
        assert not decode_token(plain.allocate(8).export("r")).endpoint.ucx
        assert "tcp (no RDMA device with ucx) for other hosts" in caplog.text
        (tmp_path / "mlx5_0").mkdir()
        monkeypatch.setattr("transfer.ucx_binding.RDMA_DEVICES", tmp_path)
        offering = await engines.make()
        assert decode_token(offering.allocate(8).export("r")).endpoint.ucx
        assert "ucx (RDMA) for other hosts: ucx " in caplog.text


async def test_auto_starts_without_ucx_if_that_does_not_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    async with checked_engines("ucx"), checked_engines("auto") as engines:
        monkeypatch.setattr("transfer.ucx_binding.RDMA_DEVICES", tmp_path)
        monkeypatch.setenv("UCX_TLS", "rc_no_such_device")
        engine = await engines.make()
        assert not decode_token(engine.allocate(8).export("r")).endpoint.ucx
        assert engine.is_healthy
        assert "auto does not use ucx" in caplog.text
        assert engine.counters().fallbacks == 1


async def test_options_of_the_environment_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert options_for(only_this_host=True)["NET_DEVICES"] == "lo"
    assert "NET_DEVICES" not in options_for(only_this_host=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert "NET_DEVICES" not in options_for(only_this_host=True)
    assert "UCX_POSIX_ERROR_HANDLING" not in os.environ
