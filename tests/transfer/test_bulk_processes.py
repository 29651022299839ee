"""Bulk transfers between real processes: killed, stopped and restarted peers."""

from __future__ import annotations

import asyncio
import hashlib
import signal

import numpy as np
import pytest

from tests.transfer.bulk_harness import (
    MIB,
    PeerProcess,
    checked_engines,
    kvferry_sockets,
    pattern,
    shared_memory_files,
    soon,
    whole,
)
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost, PeerUnreachable
from transfer.interface import deadline_after
from transfer.token import decode_token

pytestmark = pytest.mark.net
BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])


@BOTH
async def test_reads_and_writes_cross_processes(transport: str) -> None:
    nbytes = 4 * MIB
    async with checked_engines("auto" if transport == "shm" else "tcp") as engines:
        peer = await engines.make()
        async with PeerProcess(transport, nbytes) as process:
            local = peer.allocate(nbytes)
            await peer.read(process.token, whole(nbytes), into=local, deadline_s=soon())
            assert local.view == pattern(nbytes, seed=7).data
            local.view[:] = pattern(nbytes, seed=8).data
            await peer.write(process.token, whole(nbytes), source=local, deadline_s=soon())
            assert await process.command("sum") == hashlib.sha256(local.view).hexdigest()
            assert await process.command("close") == "closed"
            with pytest.raises((PeerClosed, PeerUnreachable)):
                await peer.read(process.token, whole(8), into=local, deadline_s=soon())
        assert peer.counters().fallbacks == 0


@BOTH
async def test_a_killed_peer_is_lost_within_two_seconds_and_leaves_nothing(transport: str) -> None:
    nbytes = 8 * MIB
    before = shared_memory_files()
    async with checked_engines(transport) as engines:
        peer = await engines.make()
        local = peer.allocate(nbytes)
        async with PeerProcess(transport, nbytes) as process:
            await peer.read(process.token, whole(nbytes), into=local, deadline_s=soon())

            async def read_until_lost() -> None:
                while True:
                    await peer.read(process.token, whole(nbytes), into=local, deadline_s=soon())

            task = asyncio.create_task(read_until_lost())
            await asyncio.sleep(0)
            await process.kill()
            async with asyncio.timeout(2):
                with pytest.raises((PeerLost, PeerUnreachable)):
                    await task
        name = "kvferry/" + process_address(process.token)
        assert name not in kvferry_sockets()
    assert shared_memory_files() == before


def process_address(token: bytes) -> str:
    return decode_token(token).endpoint.tcp


@BOTH
async def test_a_stopped_peer_exceeds_the_deadline_at_the_deadline(transport: str) -> None:
    nbytes = 32 * MIB
    async with checked_engines(transport) as engines:
        peer = await engines.make()
        local = peer.allocate(nbytes)
        async with PeerProcess(transport, nbytes) as process:
            await process.stop()
            start = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                await peer.read(
                    process.token, whole(nbytes), into=local, deadline_s=deadline_after(0.4)
                )
            assert 0.39 < asyncio.get_running_loop().time() - start < 0.8
            assert not np.frombuffer(local.view, np.uint8).any()
            process.signal(signal.SIGCONT)
            await peer.read(process.token, whole(nbytes), into=local, deadline_s=soon())
            assert local.view == pattern(nbytes, seed=7).data


async def test_a_peer_stopped_in_the_middle_of_a_tcp_read_holds_up_only_itself() -> None:
    nbytes = 32 * MIB
    async with checked_engines("tcp") as engines:
        peer = await engines.make()
        local, other = peer.allocate(nbytes), peer.allocate(nbytes)
        async with PeerProcess("tcp", nbytes) as stopped, PeerProcess("tcp", nbytes) as running:
            await peer.read(stopped.token, whole(8), into=local, deadline_s=soon())
            await stopped.stop()
            waiting = asyncio.create_task(
                peer.read(stopped.token, whole(nbytes), into=local, deadline_s=deadline_after(1.0))
            )
            await peer.read(running.token, whole(nbytes), into=other, deadline_s=soon())
            assert other.view == pattern(nbytes, seed=7).data
            with pytest.raises(DeadlineExceeded):
                await waiting


async def test_memory_of_another_process_that_is_not_shared_comes_by_tcp() -> None:
    async with (
        checked_engines("auto") as engines,
        PeerProcess("auto", 4096, "registered") as process,
    ):
        peer = await engines.make()
        local = peer.allocate(4096)
        await peer.read(process.token, whole(4096), into=local, deadline_s=soon())
        assert local.view == pattern(4096, seed=7).data
