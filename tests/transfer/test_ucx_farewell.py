"""A worker is given back when the peer has let go of it, and not before. Without UCX."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.transfer.bulk_harness import LIMIT_S
from transfer.ucx_farewell import MAX_PARTING, Farewells
from transfer.ucx_lifeline import PING


class FakeWorker:
    """Only what a farewell asks of a worker."""

    quiet = True
    moves_only_in_progress = True

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def close(self) -> None:
        self.closed.set()


class SlowWorker(FakeWorker):
    """Has a flight under way, until told otherwise or progressed a number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet = False
        self.rounds_left: int | None = None

    def progress(self) -> None:
        if self.rounds_left is not None:
            self.rounds_left -= 1
            self.quiet = self.rounds_left <= 0


def nothing() -> None:
    """No piece was under way."""


def pair() -> tuple[socket.socket, socket.socket]:
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    peer.setblocking(False)
    return ours, peer


async def closed(worker: FakeWorker) -> None:
    async with asyncio.timeout(LIMIT_S):
        await worker.closed.wait()


async def test_a_worker_stays_until_its_peer_has_hung_up() -> None:
    farewells, worker, (ours, peer) = Farewells(), FakeWorker(), pair()
    farewells.part(worker, ours, nothing)  # type: ignore[arg-type]
    assert peer.recv(1) == b"", "the peer is told at once"
    peer.send(PING)
    await asyncio.sleep(0)
    assert not worker.closed.is_set()
    peer.close()
    await closed(worker)


async def test_a_worker_whose_peer_has_hung_up_is_closed_at_once() -> None:
    farewells, worker, (ours, peer) = Farewells(), FakeWorker(), pair()
    peer.send(PING)
    peer.close()
    farewells.part(worker, ours, nothing)  # type: ignore[arg-type]
    assert worker.closed.is_set()
    assert ours.fileno() == -1


async def test_a_peer_that_never_hangs_up_is_waited_for_within_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transfer.ucx_farewell.PARTING_LIMIT_S", 0.0)
    farewells, worker, (ours, peer) = Farewells(), FakeWorker(), pair()
    farewells.part(worker, ours, nothing)  # type: ignore[arg-type]
    await closed(worker)
    peer.close()


async def test_the_oldest_gives_way_when_too_many_wait() -> None:
    farewells, peers = Farewells(), []
    workers = [FakeWorker() for _ in range(MAX_PARTING + 1)]
    for worker in workers:
        ours, peer = pair()
        peers.append(peer)
        farewells.part(worker, ours, nothing)  # type: ignore[arg-type]
    assert [worker.closed.is_set() for worker in workers] == [True] + [False] * MAX_PARTING
    farewells.end(0.0)
    assert all(worker.closed.is_set() for worker in workers)
    for peer in peers:
        peer.close()


async def test_a_worker_that_is_not_quiet_outlasts_the_hang_up_of_its_peer() -> None:
    farewells, worker, (ours, peer) = Farewells(), SlowWorker(), pair()
    settled = asyncio.Event()
    peer.close()
    farewells.part(worker, ours, settled.set)  # type: ignore[arg-type]
    assert ours.fileno() == -1
    assert not settled.is_set()
    worker.quiet = True
    await closed(worker)
    assert settled.is_set()


async def test_at_the_end_a_worker_gets_the_time_to_become_quiet() -> None:
    farewells, worker, (ours, peer) = Farewells(), SlowWorker(), pair()
    settled = asyncio.Event()
    peer.close()
    farewells.part(worker, ours, settled.set)  # type: ignore[arg-type]
    worker.rounds_left = 3
    farewells.end(LIMIT_S)
    assert settled.is_set()
    assert worker.closed.is_set()
