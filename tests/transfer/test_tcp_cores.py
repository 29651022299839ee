"""The thread that receives many bytes keeps off the core on which they are sent."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from tests.transfer.bulk_harness import checked_engines, pattern, soon, until, whole
from transfer import tcp_cores
from transfer.tcp_cores import MANY_NBYTES, SO_INCOMING_CPU, ReceiverCore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the core")

THREAD = 77


class FromCore(socket.socket):
    """A socket whose bytes come from a core of the test's choice."""

    core = -1

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> int:  # type: ignore[override]
        assert (level, option) == (socket.SOL_SOCKET, SO_INCOMING_CPU)
        return self.core


class Kernel:
    """Where threads may run."""

    def __init__(self, cores: set[int]) -> None:
        self.cores = cores

    def get(self, thread: int) -> set[int]:
        assert thread == THREAD
        return set(self.cores)

    def set(self, thread: int, cores: set[int]) -> None:
        assert thread == THREAD
        self.cores = set(cores)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel({0, 1, 2})
    monkeypatch.setattr(tcp_cores.os, "sched_getaffinity", made.get)
    monkeypatch.setattr(tcp_cores.os, "sched_setaffinity", made.set)
    monkeypatch.setattr(tcp_cores, "KEPT_S", 0.001)
    return made


async def test_the_receiver_keeps_off_the_senders_core_and_follows_it(kernel: Kernel) -> None:
    choice = ReceiverCore(THREAD, asyncio.get_running_loop())
    with FromCore() as sock:
        for sock.core, left in ((1, {0, 2}), (2, {0, 1}), (2, {0, 1})):
            choice.receiving(sock)
            assert kernel.cores == left
    await until(lambda: choice.avoided is None)
    assert kernel.cores == {0, 1, 2}, "afterwards the thread runs wherever it did before"


async def test_who_moves_the_thread_meanwhile_has_the_last_word(kernel: Kernel) -> None:
    choice = ReceiverCore(THREAD, asyncio.get_running_loop())
    with FromCore() as sock:
        sock.core = 1
        choice.receiving(sock)
        kernel.cores = {0}  # taskset, a cpuset
    await until(lambda: choice.avoided is None)
    assert kernel.cores == {0}


@pytest.mark.parametrize(("pinned", "left"), [({0}, {0}), ({2}, {2}), ({0, 1}, {0, 1})])
async def test_a_pinning_is_never_widened_whatever_core_the_sender_moves_to(
    kernel: Kernel, pinned: set[int], left: set[int]
) -> None:
    choice = ReceiverCore(THREAD, asyncio.get_running_loop())
    with FromCore() as sock:
        sock.core = 1
        choice.receiving(sock)
        kernel.cores = pinned  # taskset, a cpuset
        for sock.core in (2, 0, 1, 2):
            choice.receiving(sock)
            assert kernel.cores <= pinned
    await until(lambda: choice._timer is None)
    assert kernel.cores == left


async def test_it_never_gets_a_core_that_was_not_its_own_and_keeps_its_last(
    kernel: Kernel,
) -> None:
    kernel.cores = {1}
    choice = ReceiverCore(THREAD, asyncio.get_running_loop())
    with FromCore() as sock:
        for sock.core in (1, 0, -1):
            choice.receiving(sock)
            assert kernel.cores == {1}
    assert choice.avoided is None


async def test_a_thread_that_may_not_be_moved_is_left_where_it_is(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: int, cores: set[int]) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(tcp_cores.os, "sched_setaffinity", refuse)
    choice = ReceiverCore(THREAD, asyncio.get_running_loop())
    with FromCore() as sock:
        sock.core = 0
        choice.receiving(sock)
    assert choice.avoided is None


@pytest.mark.parametrize("nbytes", [MANY_NBYTES // 2, 8 * MANY_NBYTES])
async def test_only_long_requests_choose_a_core(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[socket.socket] = []
    monkeypatch.setattr(ReceiverCore, "receiving", lambda self, sock: asked.append(sock))
    async with checked_engines("tcp") as engines:
        owner, reader = await engines.make(), await engines.make()
        region, into = owner.allocate(nbytes), reader.allocate(nbytes)
        region.view[:] = pattern(nbytes)
        await reader.read(region.export("r"), whole(nbytes), into=into, deadline_s=soon())
        assert bytes(into.view) == bytes(pattern(nbytes))
        assert bool(asked) == (nbytes > MANY_NBYTES), "who reads"
        asked.clear()
        into.view[:] = pattern(nbytes, seed=2)
        await reader.write(region.export("rw"), whole(nbytes), source=into, deadline_s=soon())
        assert bytes(region.view) == bytes(pattern(nbytes, seed=2))
        assert bool(asked) == (nbytes > MANY_NBYTES), "who is written to"
