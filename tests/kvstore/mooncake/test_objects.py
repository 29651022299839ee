"""What lies in Mooncake is believed only after it was verified; what is damaged goes."""

from __future__ import annotations

import asyncio
import urllib.request

import pytest

from kvstore.mooncake import MooncakeStore
from kvstore.page import PageKey
from kvstore.store import GetOutcome, PutOutcome, PutPolicy
from tests.kvstore.contract import Stores
from tests.kvstore.mooncake.cluster import MooncakeCluster
from tests.kvstore.mooncake.conftest import OpenStore
from tests.kvstore.mooncake.raw import RawClient, object_name, raw_client
from tests.kvstore.pages import empty, filled, holds, sequence
from transfer.interface import deadline_after

pytestmark = [pytest.mark.net, pytest.mark.shared_processes]


async def put(stores: Stores, store: MooncakeStore, tokens: range) -> list[PutOutcome]:
    source, puts = filled(stores.transfer, sequence(tokens))
    result = await store.put(puts, source=source, deadline_s=deadline_after(10))
    return result.outcomes


async def get(stores: Stores, store: MooncakeStore, tokens: range) -> list[GetOutcome]:
    into, gets = empty(stores.transfer, sequence(tokens))
    result = await store.get(gets, into=into, deadline_s=deadline_after(10))
    for page, outcome in zip(gets, result.outcomes, strict=True):
        assert outcome is not GetOutcome.READ or holds(into, page)
    return result.outcomes


def name_in(store: MooncakeStore, key: PageKey) -> str:
    return object_name(store.config.prefix, key)


def summary(mooncake: MooncakeCluster) -> str:
    """What the master says of itself."""
    url = f"http://127.0.0.1:{mooncake.metrics_port}/metrics/summary"
    with urllib.request.urlopen(url, timeout=10) as reply:
        said: bytes = reply.read()
    return said.decode()


async def until_gone(store: MooncakeStore, key: PageKey) -> None:
    deadline_s = deadline_after(10)
    while (await store.match([key], deadline_s=deadline_s))[0].present:
        assert deadline_after(0) < deadline_s, "the object stays"


@pytest.mark.parametrize("place", ["magic", "record", "first byte", "last byte"])
async def test_a_flipped_byte_is_corrupt_and_the_object_is_removed_and_written_anew(
    stores: Stores, open_store: OpenStore, raw: RawClient, place: str
) -> None:
    store = await open_store()
    await put(stores, store, range(4))
    key = sequence(range(4))[0].key
    value = bytearray(raw.get(name_in(store, key)))
    page_at = len(value) - store.spec.page_nbytes
    at = {"magic": 0, "record": 40, "first byte": page_at, "last byte": len(value) - 1}[place]
    value[at] ^= 1
    raw.replace(name_in(store, key), bytes(value))
    assert await get(stores, store, range(4)) == [GetOutcome.CORRUPT]
    assert store.counters()["pages_corrupt"] == 1
    await until_gone(store, key)
    assert await put(stores, store, range(4)) == [PutOutcome.STORED]
    assert await get(stores, store, range(4)) == [GetOutcome.READ]


@pytest.mark.parametrize("nbytes", [1, 100, 100_000])
async def test_an_object_of_another_size_is_corrupt_and_removed(
    stores: Stores, open_store: OpenStore, raw: RawClient, nbytes: int
) -> None:
    store = await open_store()
    key = sequence(range(4))[0].key
    raw.replace(name_in(store, key), b"x" * nbytes)
    assert await get(stores, store, range(4)) == [GetOutcome.CORRUPT]
    await until_gone(store, key)
    assert await put(stores, store, range(4)) == [PutOutcome.STORED]


async def test_a_sound_page_under_another_key_is_corrupt_and_removed(
    stores: Stores, open_store: OpenStore, raw: RawClient
) -> None:
    store = await open_store()
    await put(stores, store, range(4))
    mine, other = sequence(range(4))[0].key, sequence(range(50, 54))[0].key
    raw.replace(name_in(store, other), raw.get(name_in(store, mine)))
    assert await get(stores, store, range(50, 54)) == [GetOutcome.CORRUPT]
    await until_gone(store, other)
    assert await get(stores, store, range(4)) == [GetOutcome.READ]


async def test_a_put_over_a_damaged_object_replaces_it(
    stores: Stores, open_store: OpenStore, raw: RawClient
) -> None:
    store = await open_store()
    key = sequence(range(4))[0].key
    raw.replace(name_in(store, key), b"x" * 10_000)
    assert await put(stores, store, range(4)) == [PutOutcome.STORED]
    assert await get(stores, store, range(4)) == [GetOutcome.READ]


async def test_a_reservation_of_a_writer_that_died_ends(
    stores: Stores, open_store: OpenStore, mooncake: MooncakeCluster
) -> None:
    store = await open_store()
    key = sequence(range(4))[0].key
    with raw_client(mooncake.master) as dying:
        assert dying.native.batch_put_session_start([name_in(store, key)], [1000]) == [0]
    assert await get(stores, store, range(4)) == [GetOutcome.ABSENT]
    assert await put(stores, store, range(4)) == [PutOutcome.STORED]
    assert await get(stores, store, range(4)) == [GetOutcome.READ]


async def test_clear_removes_all_pages_and_nothing_of_others(
    stores: Stores, open_store: OpenStore, raw: RawClient
) -> None:
    store = await open_store()
    await put(stores, store, range(12))
    raw.replace("somebody-else", b"theirs")
    assert await store.clear(deadline_s=deadline_after(10)) == 3
    assert await get(stores, store, range(12)) == [GetOutcome.ABSENT] * 3
    assert raw.get("somebody-else") == b"theirs"
    assert await store.clear(deadline_s=deadline_after(10), namespace=b"n" * 32) == 0


async def test_a_raised_priority_is_a_soft_pin(
    stores: Stores, open_store: OpenStore, mooncake: MooncakeCluster
) -> None:
    store = await open_store()
    source, puts = filled(stores.transfer, sequence(range(8)))
    policy = PutPolicy(priority=80, priority_s=60)
    result = await store.put(puts, source=source, deadline_s=deadline_after(10), policy=policy)
    assert result.outcomes == [PutOutcome.STORED] * 2
    assert "soft-pinned: 2" in await asyncio.to_thread(summary, mooncake)


async def test_pages_of_many_batches_come_back(stores: Stores, open_store: OpenStore) -> None:
    writer, reader = await open_store(), await open_store()
    tokens = range(4 * 300)
    assert await put(stores, writer, tokens) == [PutOutcome.STORED] * 300
    assert await get(stores, reader, tokens) == [GetOutcome.READ] * 300
    assert await put(stores, reader, tokens) == [PutOutcome.PRESENT] * 300
