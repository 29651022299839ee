"""The contract between real processes: peers that are killed, frozen, restarted or end in order.

For every transport that crosses processes. What the same faults do in virtual time is in
``tests/sim/test_sim_transfer.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import weakref
from functools import partial

import numpy as np
import pytest

from tests.transfer.bulk_harness import (
    LIMIT_S,
    MIB,
    Engines,
    Leftovers,
    PeerProcess,
    checked_engines,
    kvferry_sockets,
    old_objects_set_aside,
    pattern,
    soon,
    until,
    until_freed,
    whole,
)
from tests.transfer.contract import transports
from tests.transfer.contract.holds import hold_at_gate, hold_copies
from tests.transfer.contract.holds_ucx import links_that_can_be_held
from tests.transfer.contract.world import (
    GONE,
    IN_PIECES,
    PIECE_NBYTES,
    Hold,
    assert_nothing_reused,
    becomes_stale,
)
from transfer.engine import TransferEngine
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost, PeerUnreachable
from transfer.interface import deadline_after
from transfer.region import HostRegion
from transfer.token import decode_token

pytestmark = pytest.mark.net
CROSSING = pytest.mark.parametrize("transport", transports.that_cross_processes())
NBYTES = 8 * MIB
LOST_LIMIT_S = 2.0
USABLE_LIMIT_S = 1.0


async def read(
    user: TransferEngine, token: bytes, local: HostRegion, timeout_s: float = LIMIT_S
) -> None:
    every = whole(local.nbytes)
    await user.read(token, every, into=local, deadline_s=deadline_after(timeout_s))


async def read_until_it_fails(user: TransferEngine, token: bytes) -> None:
    local = user.allocate(8)
    while True:
        await read(user, token, local, LOST_LIMIT_S)


def address_of(token: bytes) -> str:
    return decode_token(token).endpoint.tcp


def ports_of(token: bytes) -> dict[str, int]:
    """Return the settings with which another engine listens where the owner of ``token`` did."""
    endpoint = decode_token(token).endpoint
    addresses = {"port": endpoint.tcp, "ucx_port": endpoint.ucx}
    return {name: int(each.rpartition(":")[2]) for name, each in addresses.items() if each}


@CROSSING
async def test_reads_and_writes_cross_processes(transport: str) -> None:
    async with checked_engines(transport) as engines, PeerProcess(transport, NBYTES) as process:
        user = await engines.make()
        local = user.allocate(NBYTES)
        await read(user, process.token, local)
        assert local.view == pattern(NBYTES, seed=7).data
        local.view[:] = pattern(NBYTES, seed=8).data
        await user.write(process.token, whole(NBYTES), source=local, deadline_s=soon())
        assert await process.command("sum") == hashlib.sha256(local.view).hexdigest()
        assert user.counters().fallbacks == 0, "a slower path than the one asked for was used"


@CROSSING
async def test_both_processes_read_and_write_each_other_at_once(transport: str) -> None:
    async with checked_engines(transport) as engines, PeerProcess(transport, NBYTES) as process:
        mine = await engines.make()
        inbox, local = mine.allocate(NBYTES), mine.allocate(NBYTES)
        token = inbox.export("rw").hex()
        answers, _ = await asyncio.gather(
            process.command(f"push {token}"), read(mine, process.token, local)
        )
        assert answers == "ok"
        assert inbox.view == local.view == pattern(NBYTES, seed=7).data
        inbox.view[:] = pattern(NBYTES, seed=9).data
        assert await process.command(f"pull {token}") == "ok"
        assert await process.command("sum") == hashlib.sha256(inbox.view).hexdigest()


@CROSSING
async def test_a_process_that_ends_in_order_is_closed_not_lost(transport: str) -> None:
    async with checked_engines(transport) as engines, PeerProcess(transport, 64) as process:
        user = await engines.make()
        local = user.allocate(64)
        await read(user, process.token, local)
        assert await process.command("close") == "closed"
        with pytest.raises((PeerClosed, PeerUnreachable)):
            await read(user, process.token, local, 2.0)


async def hold_pending_read(
    engines: Engines, process: PeerProcess
) -> tuple[TransferEngine, HostRegion, asyncio.Task[None], Hold | None]:
    """Return a read of the process's memory that stands still: the process is frozen, or, where
    the user copies by itself, its copies are held."""
    user = await engines.make(**IN_PIECES)
    local = user.allocate(NBYTES)
    spare = user.allocate(8)
    await read(user, process.token, spare)
    hold = None
    if user.transport == "shm":
        hold = hold_copies(user, lambda copy: copy.local.nbytes == NBYTES, passes=1)
    else:
        await process.stop()
    task = asyncio.create_task(read(user, process.token, local))
    if hold is not None:
        await hold.reached()
    return user, local, task, hold


@CROSSING
async def test_a_killed_process_is_lost_within_two_seconds_and_leaves_nothing(
    transport: str,
) -> None:
    async with checked_engines(transport) as engines:
        leftovers = Leftovers()
        async with PeerProcess(transport, NBYTES) as process:
            user, local, task, hold = await hold_pending_read(engines, process)
            await process.kill()
            async with asyncio.timeout(LOST_LIMIT_S):
                with pytest.raises(GONE):
                    await read_until_it_fails(user, process.token)
                if hold is not None:
                    hold.release()
                with pytest.raises(PeerLost):
                    await task
        before = bytes(local.view)
        assert before[-PIECE_NBYTES:] == bytes(PIECE_NBYTES), "everything moved: nothing was tested"
        assert f"kvferry/{address_of(process.token)}" not in kvferry_sockets()
        await engines.close()
        assert local.view == before
        await leftovers.none_left()


@CROSSING
async def test_a_new_life_on_the_same_address_is_usable_within_a_second(transport: str) -> None:
    """Three lives, each killed in the middle of a read; the old tokens stay void."""
    async with checked_engines(transport) as engines:
        user = await engines.make()
        local, old, ports = user.allocate(NBYTES), [], {"port": 0}
        for _ in range(3):
            async with PeerProcess(transport, NBYTES, "", json.dumps(ports)) as process:
                start_s = asyncio.get_running_loop().time()
                await read(user, process.token, local)
                took_s = asyncio.get_running_loop().time() - start_s
                assert took_s < USABLE_LIMIT_S, (
                    "the first read of a new life waited for the old one"
                )
                assert local.view == pattern(NBYTES, seed=7).data
                for token in old:
                    await becomes_stale(partial(read, user, token, local))
                old.append(process.token)
                ports = ports_of(process.token)
                pending = asyncio.create_task(read(user, process.token, local))
                await asyncio.sleep(0)
                await process.kill()
                await asyncio.gather(pending, return_exceptions=True)


@CROSSING
async def test_a_frozen_process_exceeds_the_deadline_at_the_deadline_and_holds_up_nobody(
    transport: str,
) -> None:
    async with (
        checked_engines(transport) as engines,
        PeerProcess(transport, NBYTES) as frozen,
        PeerProcess(transport, NBYTES) as running,
    ):
        user = await engines.make()
        local, other = user.allocate(NBYTES), user.allocate(NBYTES)
        await read(user, running.token, other)  # the frozen one is not even connected
        await frozen.stop()
        start_s = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(read(user, frozen.token, local, 0.5))
        for _ in range(5):
            await read(user, running.token, other)
        with pytest.raises(DeadlineExceeded):
            await waiting
        took_s = asyncio.get_running_loop().time() - start_s
        assert 0.5 <= took_s < 3.0
        assert other.view == pattern(NBYTES, seed=7).data
        assert not np.frombuffer(local.view, np.uint8).any()
        frozen.signal(signal.SIGCONT)
        await read(user, frozen.token, local)
        assert local.view == pattern(NBYTES, seed=7).data


@CROSSING
@pytest.mark.parametrize("kind", ["read", "write"])
async def test_late_bytes_of_a_thawed_process_reach_no_reused_memory(
    transport: str, kind: str
) -> None:
    """The operation ends while the process is frozen; its memory is reused before it goes on."""
    async with checked_engines(transport) as engines, PeerProcess(transport, NBYTES) as process:
        user = await engines.make()
        local, spare = user.allocate(NBYTES), user.allocate(8)
        await read(user, process.token, spare)
        await process.command("fill 3")
        local.view[:] = pattern(NBYTES, seed=4).data
        await process.stop()
        every, soon_s = whole(NBYTES), deadline_after(0.2)
        try:  # a peer that maps memory needs no living owner
            if kind == "read":
                await user.read(process.token, every, into=local, deadline_s=soon_s)
            else:
                await user.write(process.token, every, source=local, deadline_s=soon_s)
        except DeadlineExceeded:
            pass
        local.view[:] = reused = b"\xee" * NBYTES
        process.signal(signal.SIGCONT)
        here = user.allocate(NBYTES)
        await read(user, process.token, here)
        assert local.view == reused
        assert_nothing_reused(here.view, pattern(NBYTES, 3).tobytes(), pattern(NBYTES, 4).tobytes())


@CROSSING
async def test_a_user_that_is_killed_while_it_writes_disturbs_neither_owner_nor_others(
    transport: str,
) -> None:
    """The owner makes no request, and its memory becomes quiet and free all the same."""
    with links_that_can_be_held():
        await lose_writers(transport)


async def lose_writers(transport: str) -> None:
    async with (
        checked_engines(transport) as engines,
        PeerProcess(transport, NBYTES) as doomed,
        PeerProcess(transport, NBYTES) as other,
    ):
        owner = await engines.make(**IN_PIECES)
        inbox = owner.allocate(NBYTES)
        token = inbox.export("w").hex()

        async def lose_a_writer(region: HostRegion) -> None:
            hold = hold_at_gate(region, passes=1)
            await doomed.order(f"flood {region.export('w').hex()}")
            assert await doomed.line() == "flooding"
            await until(lambda: region.view[0] == pattern(1, seed=7)[0])
            await doomed.kill()
            hold.release()
            assert await other.command(f"push {token}") == "ok"
            assert inbox.view == pattern(NBYTES, seed=7).data
            region.revoke()
            region.view[:] = quiet = b"\xee" * NBYTES
            assert await other.command(f"push {token}") == "ok"
            assert region.view == quiet

        if transport == "shm":
            await lose_a_writer(owner.allocate(NBYTES))  # registered memory would go by tcp
            return
        with old_objects_set_aside():
            memory = np.zeros(NBYTES, np.uint8)
            await lose_a_writer(owner.register(memory))
            freed = weakref.ref(memory)
            del memory
            await until_freed(freed)


@CROSSING
async def test_memory_that_cannot_be_shared_comes_by_tcp(transport: str) -> None:
    async with (
        checked_engines(transport) as engines,
        PeerProcess(transport, 4096, "registered") as process,
    ):
        user = await engines.make()
        local = user.allocate(4096)
        await read(user, process.token, local)
        assert local.view == pattern(4096, seed=7).data
