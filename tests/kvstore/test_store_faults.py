"""The distributed store when bytes, writers and memory fail: corruption, pressure, fencing."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvstore.client.writing import TRIES_MAX
from kvstore.config import StoreClientConfig
from kvstore.messages import (
    AcquirePages,
    CommitPages,
    MatchPages,
    PageCommit,
    PagesAcquired,
    PagesCommitted,
    PagesMatched,
    PagesReserved,
    ReservePages,
)
from kvstore.page import PageKey
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.fakes import World
from tests.kvstore.faulty import get_all, open_client, raw_channel, small, until
from tests.kvstore.pages import SPEC, sequence
from transfer.errors import RemoteFailed
from transfer.interface import deadline_after

# ---- corruption


@pytest.mark.parametrize("num_tokens", [4, 3])
async def test_a_flipped_byte_in_the_segment_is_detected_and_the_page_dropped(
    cluster: StoreCluster, num_tokens: int
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(8 + num_tokens))
    node.region.view[2 * SPEC.page_nbytes] ^= 1  # slots are granted in order
    read = [GetOutcome.READ] * 2
    assert await get_all(stores, client, range(8 + num_tokens)) == [*read, GetOutcome.CORRUPT]
    await client.quiet()
    assert await get_all(stores, client, range(8 + num_tokens)) == [*read, GetOutcome.ABSENT]
    assert node.numbers()["corrupt_dropped"] == 1
    assert client.counters()["get_corrupt"] == 1
    assert (await put_all(stores, client, range(8 + num_tokens)))[2] is PutOutcome.STORED


async def test_a_byte_flipped_on_the_wire_is_detected_but_the_page_stays(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    world.flip_reads = True
    assert await get_all(stores, client, range(4)) == [GetOutcome.CORRUPT]
    await client.quiet()
    world.flip_reads = False
    assert await get_all(stores, client, range(4)) == [GetOutcome.READ]
    assert node.numbers()["corrupt_reports"] == 1
    assert node.numbers()["corrupt_dropped"] == 0


async def test_a_torn_write_never_becomes_visible(cluster: StoreCluster, world: World) -> None:
    cluster.always_write()
    node = await cluster.node(config=small(4))
    stores = await cluster.stores()
    client = await open_client(stores)
    world.flip_writes = True
    assert await put_all(stores, client, range(4)) == [PutOutcome.FAILED]
    keys = [page.key for page in sequence(range(4))]
    assert await client.match(keys, deadline_s=deadline_after(1)) == [PageState.ABSENT]
    assert node.numbers()["torn_writes"] == TRIES_MAX
    world.flip_writes = False
    assert await put_all(stores, client, range(4)) == [PutOutcome.STORED]


@pytest.mark.parametrize("k", range(3))
async def test_a_read_that_breaks_once_is_read_again_at_once(
    cluster: StoreCluster, world: World, k: int
) -> None:
    await cluster.node()
    cluster.client_config = StoreClientConfig(batch_nbytes=1)  # one page per transfer call
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(12))
    world.fail_read_at = len(world.reads) + k
    assert await get_all(stores, client, range(12)) == [GetOutcome.READ] * 3
    assert client.counters()["bulk_failures"] == 1
    assert "backoffs" not in client.counters(), "a broken connection is no dead node"


@pytest.mark.parametrize("k", range(3))
async def test_a_page_that_cannot_be_read_fails_and_no_other(
    cluster: StoreCluster, world: World, k: int
) -> None:
    await cluster.node()
    cluster.client_config = StoreClientConfig(batch_nbytes=1)  # one page per transfer call
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(12))
    world.unreadable = k * SPEC.page_nbytes  # slots are granted in order
    outcomes = await get_all(stores, client, range(12))
    assert Counter(outcomes) == {GetOutcome.READ: 2, GetOutcome.FAILED: 1}
    assert outcomes[k] is GetOutcome.FAILED


# ---- pressure and leases


async def test_eviction_never_takes_a_page_that_is_being_read(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node(config=small(2, lease_s=5.0))
    stores = await cluster.stores()
    reader, writer = await open_client(stores), await open_client(stores)
    await put_all(stores, writer, range(8))
    world.bulk_gate = asyncio.Event()
    reading = asyncio.ensure_future(get_all(stores, reader, range(8)))
    await until(lambda: node.numbers()["num_leases"] == 1)
    assert await put_all(stores, writer, [9, 9]) == [PutOutcome.REFUSED]
    world.bulk_gate.set()
    assert await reading == [GetOutcome.READ] * 2
    await reader.quiet()
    assert await put_all(stores, writer, [9, 9]) == [PutOutcome.STORED]


async def test_a_reader_that_never_releases_loses_its_lease(cluster: StoreCluster) -> None:
    node = await cluster.node(config=small(1))
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    channel = await raw_channel(cluster, node.address)
    keys = tuple(page.key for page in sequence(range(4)))
    lease = await channel.request(
        AcquirePages(keys=keys), PagesAcquired, deadline_s=deadline_after(1)
    )
    assert len(lease.pages) == 1
    assert await put_all(stores, client, [9, 9]) == [PutOutcome.REFUSED]
    await until(lambda: node.numbers()["num_leases"] == 0)
    assert await put_all(stores, client, [9, 9]) == [PutOutcome.STORED]


async def test_a_long_read_renews_its_lease_as_it_goes(cluster: StoreCluster, world: World) -> None:
    node = await cluster.node(config=small(16, lease_s=0.3))
    cluster.client_config = StoreClientConfig(batch_nbytes=1, num_batches=1)
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(64))
    world.bulk_delay_s = 0.06  # 16 pages take three times as long as a lease
    assert await get_all(stores, client, range(64)) == [GetOutcome.READ] * 16
    assert node.numbers()["renewed_leases"] > 0


async def test_pressure_turns_pages_over_and_reads_are_whole_or_absent(
    cluster: StoreCluster,
) -> None:
    await cluster.node(config=small(8, lease_s=30.0))
    cluster.client_config = StoreClientConfig(op_timeout_s=20.0)
    stores = await cluster.stores()
    client = await open_client(stores)

    async def use(number: int) -> None:
        tokens = [number % 7, 1, 2, 3, number % 11, 5, 6, 7, number]
        outcomes = await put_all(stores, client, tokens)
        assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.REFUSED}
        assert set(await get_all(stores, client, tokens)) <= {GetOutcome.READ, GetOutcome.ABSENT}

    for start in range(0, 60, 6):
        await asyncio.gather(*(use(start + i) for i in range(6)))
    assert cluster.nodes[0].numbers()["evicted"] > 10


# ---- writers that die


async def test_a_writer_that_dies_mid_write_is_replaced(
    cluster: StoreCluster, world: World
) -> None:
    cluster.always_write()
    node = await cluster.node(config=small(4))
    stores = await cluster.stores()
    dying, other = await open_client(stores), await open_client(stores)
    world.bulk_gate = asyncio.Event()
    lost = asyncio.ensure_future(put_all(stores, dying, range(4)))
    await until(lambda: node.numbers()["num_writing"] == 1)
    joined = asyncio.ensure_future(put_all(stores, other, range(4)))
    await asyncio.sleep(0.05)
    lost.cancel()
    dying.abort()  # no message is sent any more
    await asyncio.gather(lost, return_exceptions=True)
    assert not joined.done()
    world.bulk_gate.set()
    assert await joined == [PutOutcome.STORED]
    numbers = node.numbers()  # its end is noticed, or its reservation runs out
    assert numbers.get("buried_writes", 0) + numbers.get("expired_writes", 0) == 1
    assert await get_all(stores, other, range(4)) == [GetOutcome.READ]


async def test_a_cancelled_put_gives_its_reservation_up_but_the_slot_stays_fenced(
    cluster: StoreCluster, world: World
) -> None:
    cluster.always_write()
    node = await cluster.node(config=small(1, lease_s=0.3))
    stores = await cluster.stores()
    client = await open_client(stores)
    world.bulk_gate = asyncio.Event()
    putting = asyncio.ensure_future(put_all(stores, client, range(4)))
    await until(lambda: node.numbers()["num_writing"] == 1)
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    await client.quiet()
    world.bulk_gate = None
    assert node.numbers()["num_writing"] == 0
    assert await put_all(stores, client, range(4)) == [PutOutcome.REFUSED]
    await until(lambda: node.numbers()["num_owed"] == 0)
    assert await put_all(stores, client, range(4)) == [PutOutcome.STORED]


async def test_a_lost_commit_reply_fails_the_put_and_harms_nothing(
    cluster: StoreCluster, world: World
) -> None:
    cluster.always_write()
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    world.reply_lost = PagesCommitted
    assert await put_all(stores, client, range(4)) == [PutOutcome.FAILED]
    world.reply_lost = None
    await client.quiet()
    assert node.numbers()["num_pages"] == 1
    other = await open_client(stores)
    assert await get_all(stores, other, range(4)) == [GetOutcome.READ]


async def test_a_commit_of_another_incarnation_or_generation_is_refused(
    cluster: StoreCluster,
) -> None:
    node = await cluster.node()
    channel = await raw_channel(cluster, node.address)
    commit = PageCommit(PageKey(b"k" * 32), 7, b"c" * 16)
    with pytest.raises(RemoteFailed, match="incarnation"):
        await channel.request(
            CommitPages(incarnation="old", pages=(commit,)),
            PagesCommitted,
            deadline_s=deadline_after(1),
        )
    reply = await channel.request(
        CommitPages(incarnation=node.identity.incarnation, pages=(commit,)),
        PagesCommitted,
        deadline_s=deadline_after(1),
    )
    assert reply.statuses == ("stale",)
    assert node.numbers()["fenced"] == 1


async def test_a_message_with_too_many_pages_is_refused(cluster: StoreCluster) -> None:
    node = await cluster.node()
    channel = await raw_channel(cluster, node.address)
    keys = tuple(PageKey(i.to_bytes(32, "little")) for i in range(1025))
    with pytest.raises(RemoteFailed, match="too_many_pages"):
        await channel.request(AcquirePages(keys=keys), PagesAcquired, deadline_s=deadline_after(1))
    with pytest.raises(RemoteFailed, match="too_many_pages"):
        await channel.request(
            MatchPages(bytes(32 * 65_537)), PagesMatched, deadline_s=deadline_after(1)
        )


async def test_packed_keys_of_a_wrong_length_are_refused(cluster: StoreCluster) -> None:
    node = await cluster.node()
    channel = await raw_channel(cluster, node.address)
    with pytest.raises(RemoteFailed, match="bad_keys"):
        await channel.request(MatchPages(bytes(33)), PagesMatched, deadline_s=deadline_after(1))


async def test_a_page_that_does_not_fit_its_spec_is_refused(cluster: StoreCluster) -> None:
    node = await cluster.node()
    channel = await raw_channel(cluster, node.address)
    page = sequence(range(4))[0]
    bad = type(page)(key=page.key, parent=page.parent, depth=0, tokens=b"\1\0\0\0" * 5)
    with pytest.raises(RemoteFailed, match="bad_page"):
        await channel.request(
            ReservePages(spec=SPEC, pages=(bad,)), PagesReserved, deadline_s=deadline_after(1)
        )
