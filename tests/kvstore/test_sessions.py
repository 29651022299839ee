"""Fencing and leases: renewals, writers that die, and the time until memory is free again."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.config import LEASE_LIFE_S_MAX
from kvstore.messages import (
    AcquirePages,
    AwaitPages,
    HoldSession,
    LeasesRenewed,
    PageGrant,
    PagesAcquired,
    PagesPinned,
    PagesReserved,
    PageStates,
    PinPages,
    RenewLeases,
    ReservePages,
    StoreDone,
    UnpinPages,
    pack_keys,
)
from kvstore.store import PageState
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.directories import CHECKSUM, LEASE_S, directory, grant, single, store
from tests.kvstore.faulty import open_client, raw_channel, until
from tests.kvstore.pages import SPEC, sequence
from transfer.errors import RemoteFailed
from transfer.interface import deadline_after

# ---- the core


def test_a_renewed_lease_lasts_a_whole_lease_from_then_on() -> None:
    d = directory(1)
    store(d, [single(0)])
    lease = d.acquire([single(0).key], 0.0)
    assert lease is not None
    assert d.renew_lease(lease.lease_id, LEASE_S / 2)
    d.tick(LEASE_S, 0)
    assert d.num_leases == 1
    d.tick(1.5 * LEASE_S, 0)
    assert d.num_leases == 0
    assert not d.renew_lease(lease.lease_id, 1.5 * LEASE_S)
    d.check()


def test_no_lease_is_renewed_for_ever() -> None:
    d = directory(2)
    store(d, [single(0)])
    slot = grant(d, single(1))
    lease = d.acquire([single(0).key], 0.0)
    assert lease is not None
    now_s = 0.0
    while d.renew_lease(lease.lease_id, now_s) and d.renew_write(
        single(1).key, slot.generation, now_s
    ):
        now_s += LEASE_S / 2
        d.tick(now_s, 0)
        assert now_s < LEASE_LIFE_S_MAX
    d.tick(LEASE_LIFE_S_MAX, 0)
    assert d.num_leases == d.num_writing == 0
    d.check()


def test_a_renewed_reservation_can_still_be_committed() -> None:
    d = directory(1)
    slot = grant(d, single(0))
    assert d.renew_write(single(0).key, slot.generation, LEASE_S / 2)
    d.tick(LEASE_S, 0)
    assert d.commit(single(0).key, slot.generation, CHECKSUM)
    assert not d.renew_write(single(0).key, slot.generation, LEASE_S)


def test_a_dead_writer_frees_its_keys_at_once_and_its_slots_when_they_are_quiet() -> None:
    d = directory(4)
    mine, other = [single(0), single(1)], single(2)
    d.reserve(mine, SPEC, 0.0, writer="dead")
    d.reserve([other], SPEC, 0.0, writer="alive")
    heard: list[str] = []
    d.watches.add([mine[0].key], lambda: heard.append("settled"))
    assert d.bury("dead", 1.0) == 2
    assert heard == ["settled"]
    assert [d.state(page.key) for page in mine] == [PageState.ABSENT] * 2
    assert d.state(other.key) is PageState.WRITING
    assert d.segment.num_used == 3, "its bytes may still be on the wire"
    d.check()
    d.tick(LEASE_S, 0)
    assert d.segment.num_used == 0
    assert d.bury("dead", 20.0) == 0
    d.check()


def test_the_time_from_abort_to_free_memory_is_bounded_and_told() -> None:
    d = directory(2)
    slot = grant(d, single(0), 1.0)
    d.tick(2.0, 0)
    d.abort(single(0).key, slot.generation, quiet=False)
    d.tick(4.0, 0)
    assert d.gauges()["oldest_owed_s"] == pytest.approx(2.0)
    assert d.gauges()["num_fenced"] == 1
    d.tick(1.0 + LEASE_S, 0)
    assert d.gauges()["reclaim_s_max"] == pytest.approx(LEASE_S - 1.0)
    assert d.gauges()["oldest_owed_s"] == d.num_owed == 0
    assert d.counters["reclaimed"] == 1


# ---- the node


async def test_a_reader_that_renews_keeps_its_page(cluster: StoreCluster) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    await put_all(stores, await open_client(stores), range(4))
    channel = await raw_channel(cluster, node.address)
    page = sequence(range(4))[0]
    acquired = await channel.request(
        AcquirePages(keys=(page.key,)), PagesAcquired, deadline_s=deadline_after(1)
    )
    renew = RenewLeases(incarnation=acquired.incarnation, lease_ids=(acquired.lease_id, 999))
    reply = await channel.request(renew, LeasesRenewed, deadline_s=deadline_after(1))
    assert reply.leases == (True, False)
    assert reply.lease_s == node.config.lease_s
    stale = RenewLeases(incarnation="another", lease_ids=(acquired.lease_id,))
    with pytest.raises(RemoteFailed, match="stale_incarnation"):
        await channel.request(stale, LeasesRenewed, deadline_s=deadline_after(1))


async def test_a_waiting_reader_hears_of_the_writers_death_at_once(cluster: StoreCluster) -> None:
    node = await cluster.node()
    writer, reader = [await raw_channel(cluster, node.address) for _ in range(2)]
    page = sequence(range(4))[0]
    session = writer.stream(HoldSession(), StoreDone, deadline_s=deadline_after(100))
    assert await anext(session) == StoreDone()
    reserve = ReservePages(spec=SPEC, pages=(page,))
    reserved = await writer.request(reserve, PagesReserved, deadline_s=deadline_after(1))
    renew = RenewLeases(
        incarnation=reserved.incarnation,
        writes=(PageGrant(page.key, reserved.grants[0].generation), PageGrant(page.key, 999)),
    )
    reply = await writer.request(renew, LeasesRenewed, deadline_s=deadline_after(1))
    assert reply.writes == (True, False)
    wait = AwaitPages(keys=(page.key,), wait_s=20.0)
    waiting = asyncio.ensure_future(reader.request(wait, PageStates, deadline_s=deadline_after(20)))
    await until(lambda: node.numbers()["num_waits"] == 1)
    writer.abort()
    assert (await waiting).states == (PageState.ABSENT,)
    assert node.numbers()["buried_writes"] == 1
    assert node.numbers()["num_fenced"] == 1


async def test_a_client_holds_a_session_while_it_lives(cluster: StoreCluster) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(4))
    await until(lambda: node.numbers()["num_sessions"] == 1)
    await client.close()
    await until(lambda: node.numbers()["num_sessions"] == 0)


async def test_pages_are_pinned_and_unpinned_by_key(cluster: StoreCluster) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    await put_all(stores, await open_client(stores), range(4))
    channel = await raw_channel(cluster, node.address)
    keys = pack_keys([sequence(range(4))[0].key, sequence([9])[0].key])
    pinned = await channel.request(PinPages(keys), PagesPinned, deadline_s=deadline_after(1))
    assert pinned.done == b"\1\0"
    assert node.numbers()["pinned_nbytes"] == SPEC.page_nbytes
    unpinned = await channel.request(UnpinPages(keys), PagesPinned, deadline_s=deadline_after(1))
    assert unpinned.done == b"\1\0"
    assert node.numbers()["pinned_nbytes"] == 0
