"""A Mooncake cluster that stands still or is gone costs time until the deadline, nothing else."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvstore.mooncake import MooncakeConfig, MooncakeStore
from kvstore.page import PageSpec
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.kvstore.mooncake.cluster import MooncakeCluster, require_library, running
from tests.kvstore.mooncake.conftest import PATIENT_S
from tests.kvstore.pages import SPEC, empty, filled, holds, sequence
from transfer.engine import TransferEngine
from transfer.interface import Region, deadline_after

pytestmark = [pytest.mark.net, pytest.mark.shared_processes]

SHORT_S = 0.5
POLL_S = 0.01
SOON_S = 4.0  # far less than what Mooncake itself would take
BIG = PageSpec(num_layers=8, num_kv_heads=8, head_dim=128, page_size=64, dtype="uint8")


_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    """One to be stopped, killed and filled; every test waits until it works again."""
    require_library()
    with running(tmp_path_factory.mktemp("faults"), segment_nbytes=64 << 20) as started:
        yield started


def config(cluster: MooncakeCluster) -> MooncakeConfig:
    """For a store whose keys no other test sees."""
    prefix = f"faults-{next(_NUMBERS)}"
    return MooncakeConfig(master=cluster.master, prefix=prefix, ask_s=PATIENT_S)


@pytest.fixture
async def store(cluster: MooncakeCluster) -> AsyncIterator[MooncakeStore]:
    store = MooncakeStore(config(cluster), spec=SPEC)
    assert await store.connected(deadline_s=deadline_after(20))
    yield store
    for name in cluster.processes:
        cluster.signal(name, signal.SIGCONT)
    await store.close()


async def put(
    store: MooncakeStore, transfer: TransferEngine, tokens: range, timeout_s: float = SHORT_S
) -> list[PutOutcome]:
    source, puts = filled(transfer, sequence(tokens))
    result = await store.put(puts, source=source, deadline_s=deadline_after(timeout_s))
    source.view[:] = b"\xee" * source.nbytes  # the caller's again
    return result.outcomes


async def until_stored(store: MooncakeStore, transfer: TransferEngine, tokens: range) -> None:
    async with asyncio.timeout(30):
        while True:
            outcomes = set(await put(store, transfer, tokens))
            if outcomes <= {PutOutcome.STORED, PutOutcome.PRESENT}:
                return
            await asyncio.sleep(POLL_S)


async def until_read(store: MooncakeStore, transfer: TransferEngine, tokens: range) -> None:
    into, gets = empty(transfer, sequence(tokens))
    async with asyncio.timeout(30):
        while True:
            got = await store.get(gets, into=into, deadline_s=deadline_after(SHORT_S))
            assert GetOutcome.CORRUPT not in got.outcomes
            if set(got.outcomes) == {GetOutcome.READ}:
                break
            await asyncio.sleep(POLL_S)
    assert all(holds(into, page) for page in gets)


def untouched(region: Region) -> bool:
    return bytes(region.view) == b"\xee" * region.nbytes


async def test_a_read_from_a_stopped_process_ends_at_its_deadline_and_touches_nothing_later(
    cluster: MooncakeCluster, store: MooncakeStore, transfer: TransferEngine
) -> None:
    await until_stored(store, transfer, range(8))
    into, gets = empty(transfer, sequence(range(8)))
    into.view[:] = b"\xee" * into.nbytes
    cluster.signal("owner", signal.SIGSTOP)
    async with asyncio.timeout(SOON_S):
        got = await store.get(gets, into=into, deadline_s=deadline_after(SHORT_S))
    assert set(got.outcomes) <= {GetOutcome.ABSENT, GetOutcome.FAILED}
    cluster.signal("owner", signal.SIGCONT)
    await until_stored(store, transfer, range(100, 108))
    await until_read(store, transfer, range(100, 108))
    assert untouched(into)


async def test_a_cancelled_read_from_a_stopped_process_ends_at_once(
    cluster: MooncakeCluster, store: MooncakeStore, transfer: TransferEngine
) -> None:
    await until_stored(store, transfer, range(8))
    into, gets = empty(transfer, sequence(range(8)))
    into.view[:] = b"\xee" * into.nbytes
    cluster.signal("owner", signal.SIGSTOP)
    getting = asyncio.ensure_future(store.get(gets, into=into, deadline_s=deadline_after(60)))
    async with asyncio.timeout(10):
        while True:
            if store.num_calls_under_way:
                break
            await asyncio.sleep(POLL_S)
    getting.cancel()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(asyncio.CancelledError):
            await getting
    cluster.signal("owner", signal.SIGCONT)
    await until_read(store, transfer, range(8))
    assert untouched(into)


async def test_a_write_to_a_stopped_process_fails_at_its_deadline_and_never_with_wrong_bytes(
    cluster: MooncakeCluster, store: MooncakeStore, transfer: TransferEngine
) -> None:
    await until_stored(store, transfer, range(100, 108))
    cluster.signal("owner", signal.SIGSTOP)
    async with asyncio.timeout(SOON_S):
        assert await put(store, transfer, range(8)) == [PutOutcome.FAILED] * 2
    cluster.signal("owner", signal.SIGCONT)
    await until_stored(store, transfer, range(8))  # the caller's source holds other bytes by now
    await until_read(store, transfer, range(8))


async def test_while_the_master_stands_still_everything_ends_at_its_deadline(
    cluster: MooncakeCluster, store: MooncakeStore, transfer: TransferEngine
) -> None:
    await until_stored(store, transfer, range(8))
    keys = [page.key for page in sequence(range(8))]
    into, gets = empty(transfer, sequence(range(8)))
    cluster.signal("master", signal.SIGSTOP)
    async with asyncio.timeout(SOON_S):
        matched, got, outcomes = await asyncio.gather(
            store.match(keys, deadline_s=deadline_after(SHORT_S)),
            store.get(gets, into=into, deadline_s=deadline_after(SHORT_S), wait=True),
            put(store, transfer, range(50, 58)),
        )
    assert matched == [PageState.ABSENT] * 2
    assert got.outcomes == [GetOutcome.ABSENT] * 2
    assert outcomes == [PutOutcome.FAILED] * 2
    cluster.signal("master", signal.SIGCONT)
    await until_read(store, transfer, range(8))
    await until_stored(store, transfer, range(50, 58))


async def test_a_master_that_died_and_came_back_is_used_again(
    cluster: MooncakeCluster, store: MooncakeStore, transfer: TransferEngine
) -> None:
    await until_stored(store, transfer, range(8))
    cluster.kill("master")
    assert set(await put(store, transfer, range(50, 58))) == {PutOutcome.FAILED}
    cluster.start_master()  # its memory of objects is gone
    await until_stored(store, transfer, range(8))
    await until_read(store, transfer, range(8))


async def test_a_master_that_was_killed_costs_requests_neither_deadline_nor_seconds(
    cluster: MooncakeCluster, transfer: TransferEngine, caplog: pytest.LogCaptureFixture
) -> None:
    quick = {"overdue_s": 0.05, "backoff_s": 0.05}
    store = MooncakeStore(config(cluster).model_copy(update=quick), spec=SPEC)
    assert await store.connected(deadline_s=deadline_after(20))
    await until_stored(store, transfer, range(8))
    keys = [page.key for page in sequence(range(8))]
    cluster.kill("master")
    async with asyncio.timeout(SOON_S):
        while not store.is_lost:
            matched = await store.match(keys, deadline_s=deadline_after(60))
            assert matched == [PageState.ABSENT] * 2
            assert set(await put(store, transfer, range(50, 58), 60)) == {PutOutcome.FAILED}
    assert "answers no more" in caplog.text
    cluster.start_master()
    await until_stored(store, transfer, range(8))
    assert "answers again" in caplog.text
    await store.close()


async def test_a_client_that_starts_before_the_master_waits_for_it(
    tmp_path: Path, transfer: TransferEngine
) -> None:
    require_library()
    with running(tmp_path, segment_nbytes=64 << 20) as cluster:
        cluster.kill("owner")
        cluster.kill("master")
        config = MooncakeConfig(master=cluster.master, retry_s=0.1)
        store = MooncakeStore(config, spec=SPEC)
        assert await put(store, transfer, range(8)) == [PutOutcome.FAILED] * 2
        into, gets = empty(transfer, sequence(range(8)))
        got = await store.get(gets, into=into, deadline_s=deadline_after(0.2), wait=True)
        assert got.outcomes == [GetOutcome.ABSENT] * 2
        with pytest.raises(TimeoutError):
            await store.clear(deadline_s=deadline_after(1))
        cluster.start_master()
        cluster.start_owner()
        await until_stored(store, transfer, range(8))
        await until_read(store, transfer, range(8))
        await store.close()


async def test_what_does_not_fit_is_refused(
    cluster: MooncakeCluster, transfer: TransferEngine
) -> None:
    store = MooncakeStore(config(cluster), spec=BIG)
    assert await store.connected(deadline_s=deadline_after(20))
    pages = sequence(range(64 * 100), spec=BIG)  # 100 MiB into 64
    source, puts = filled(transfer, pages, spec=BIG)
    result = await store.put(puts, source=source, deadline_s=deadline_after(20))
    assert set(result.outcomes) == {PutOutcome.STORED, PutOutcome.REFUSED}
    assert result.moved.num_pages == result.outcomes.count(PutOutcome.STORED)
    gone = await store.clear(deadline_s=deadline_after(20))  # a full segment evicts a few itself
    assert 0 < gone <= result.moved.num_pages
    await store.close()


async def test_closing_ends_a_get_that_waits_and_puts_that_run(
    cluster: MooncakeCluster, store: MooncakeStore, transfer: TransferEngine
) -> None:
    into, gets = empty(transfer, sequence(range(900, 908)))
    waits = [
        asyncio.ensure_future(store.get(gets, into=into, deadline_s=deadline_after(60), wait=True))
        for _ in range(8)
    ]
    await until_stored(store, transfer, range(800, 808))
    puts = [
        asyncio.ensure_future(put(store, transfer, range(i, i + 8), timeout_s=60))
        for i in range(0, 400, 8)
    ]
    await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    async with asyncio.timeout(20):
        await store.close()
        for got in await asyncio.gather(*waits):
            assert got.outcomes == [GetOutcome.ABSENT] * 2
        ended = [outcome for outcomes in await asyncio.gather(*puts) for outcome in outcomes]
    assert set(ended) <= {PutOutcome.STORED, PutOutcome.FAILED}
    assert PutOutcome.STORED in ended


async def test_a_closed_store_holds_nothing(
    cluster: MooncakeCluster, store: MooncakeStore, transfer: TransferEngine
) -> None:
    await until_stored(store, transfer, range(8))
    await store.close()
    into, gets = empty(transfer, sequence(range(8)))
    got = await store.get(gets, into=into, deadline_s=deadline_after(SHORT_S))
    assert got.outcomes == [GetOutcome.ABSENT] * 2
    assert await put(store, transfer, range(8)) == [PutOutcome.FAILED] * 2
    keys = [page.key for page in sequence(range(8))]
    assert await store.match(keys, deadline_s=deadline_after(1)) == [PageState.ABSENT] * 2


async def test_closing_leaves_a_call_that_hangs_behind(
    cluster: MooncakeCluster, transfer: TransferEngine, caplog: pytest.LogCaptureFixture
) -> None:
    store = MooncakeStore(config(cluster).model_copy(update={"close_s": 0.1}), spec=SPEC)
    assert await store.connected(deadline_s=deadline_after(20))
    await until_stored(store, transfer, range(8))
    cluster.signal("owner", signal.SIGSTOP)
    into, gets = empty(transfer, sequence(range(8)))
    got = await store.get(gets, into=into, deadline_s=deadline_after(SHORT_S))
    assert GetOutcome.READ not in got.outcomes
    assert store.num_calls_under_way
    async with asyncio.timeout(SOON_S):
        await store.close()
    assert "left behind" in caplog.text
    into.view[:] = b"\xee" * into.nbytes
    cluster.signal("owner", signal.SIGCONT)
    async with asyncio.timeout(30):
        while True:
            if not store.num_calls_under_way:
                break
            await asyncio.sleep(POLL_S)
    assert untouched(into)
