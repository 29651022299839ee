"""A worker with incomplete flights is progressed, and never destroyed. Without peers."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.transfer.bulk_harness import LIMIT_S
from tests.transfer.ucx_support import NEEDS_UCX
from transfer import ucx_orphans
from transfer.ucx_binding import open_context
from transfer.ucx_stragglers import MAX_STRAGGLERS, Stragglers


class SlowWorker:
    """Becomes quiet after some rounds of progress; checks that it is not closed before."""

    def __init__(self, num_rounds: int = 1 << 30, *, passive: bool = True) -> None:
        self.moves_only_in_progress = passive
        self.num_rounds = num_rounds
        self.settled = asyncio.Event()
        self.closed_quiet: bool | None = None

    @property
    def quiet(self) -> bool:
        return self.num_rounds <= 0

    def progress(self) -> None:
        self.num_rounds -= 1

    def close(self) -> None:
        self.closed_quiet = self.quiet

    def settle(self) -> None:
        assert not self.settled.is_set(), "settled twice"
        self.settled.set()


def keep(stragglers: Stragglers, worker: SlowWorker) -> None:
    stragglers.keep(worker, worker.settle)  # type: ignore[arg-type]


async def test_a_worker_is_progressed_until_it_is_quiet_and_only_then_closed() -> None:
    stragglers, worker = Stragglers(), SlowWorker(num_rounds=4)
    keep(stragglers, worker)
    stragglers.release(worker)  # type: ignore[arg-type]
    assert worker.closed_quiet is None
    async with asyncio.timeout(LIMIT_S):
        await worker.settled.wait()
    assert worker.closed_quiet is True
    assert len(stragglers) == 0


async def test_a_quiet_worker_waits_for_its_release() -> None:
    stragglers, worker = Stragglers(), SlowWorker(num_rounds=1)
    keep(stragglers, worker)
    stragglers.look()
    assert worker.settled.is_set()
    assert worker.closed_quiet is None
    stragglers.release(worker)  # type: ignore[arg-type]
    assert worker.closed_quiet is True


async def test_a_worker_that_is_given_up_is_never_progressed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transfer.ucx_stragglers.STRAGGLER_LIMIT_S", 0.0)
    stragglers, worker = Stragglers(), SlowWorker()
    keep(stragglers, worker)
    async with asyncio.timeout(LIMIT_S):
        await worker.settled.wait()
    assert worker.closed_quiet is False, "closed, which keeps it, before its operations end"
    num_rounds = worker.num_rounds
    stragglers.look()
    stragglers.release(worker)  # type: ignore[arg-type]
    stragglers.end()
    assert worker.num_rounds == num_rounds
    assert len(stragglers) == 0


async def test_what_a_device_moves_is_looked_after_until_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transfer.ucx_stragglers.STRAGGLER_LIMIT_S", 0.0)
    stragglers, worker = Stragglers(), SlowWorker(passive=False)
    keep(stragglers, worker)
    stragglers.release(worker)  # type: ignore[arg-type]
    async with asyncio.timeout(LIMIT_S):
        await worker.settled.wait()
    assert "may still touch memory" in caplog.text
    assert worker.closed_quiet is None
    worker.num_rounds = 0
    stragglers.end()
    assert worker.closed_quiet is True


async def test_the_oldest_is_given_up_when_there_are_too_many_and_all_at_the_end() -> None:
    stragglers = Stragglers()
    workers = [SlowWorker() for _ in range(MAX_STRAGGLERS + 1)]
    for worker in workers:
        keep(stragglers, worker)
    assert [worker.settled.is_set() for worker in workers] == [True] + [False] * MAX_STRAGGLERS
    stragglers.end()
    assert all(worker.settled.is_set() for worker in workers)
    assert len(stragglers) == 0


class EndlessFlight:
    completed = False


@NEEDS_UCX
def test_a_worker_with_an_incomplete_flight_outlives_its_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ucxx")
    destroyed: list[str] = []
    monkeypatch.setattr(ucx_orphans, "kept_for_good", [])
    monkeypatch.setattr(
        ucx_orphans, "_destroy", lambda function, _owner: destroyed.append(function)
    )
    caplog.set_level(logging.WARNING, logger="transfer.ucx_orphans")
    context = open_context(only_this_host=True)
    workers = [context.open_worker() for _ in range(2)]
    for worker in workers:
        worker._sends.append(EndlessFlight())  # type: ignore[attr-defined]
        worker._orphaned = True  # type: ignore[attr-defined]
        worker.close()
        worker.close()
    context.close()
    assert ucx_orphans.kept_for_good == workers
    assert destroyed == []
    assert len(caplog.records) == 1, "the reason is said once"
