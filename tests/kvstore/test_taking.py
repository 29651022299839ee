"""Pages are offered and taken: one message, no grant that could be misused."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from kvstore.checksum import PageBytes, checksums_now
from kvstore.client.link import NO_OFFERS_S
from kvstore.client.writing import TRIES_MAX
from kvstore.messages import (
    OfferedPage,
    PagesTaken,
    ReservePages,
    ReserveStatus,
    TakePages,
    TakeStatus,
)
from kvstore.server import taking
from kvstore.server.node import StoreNode
from kvstore.server.taking import (
    ANSWER_MARGIN_S,
    READ_S_MAX,
    SLOW_NBYTES_PER_S,
    read_limit_s,
)
from kvstore.store import GetOutcome, PageState, PutOutcome
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.directories import CHECKSUM, LEASE_S, directory, grant, reserve, single
from tests.kvstore.fakes import World
from tests.kvstore.faulty import get_all, open_client, raw_channel, small, until
from tests.kvstore.pages import SPEC, filled, sequence
from transfer.errors import PeerLost
from transfer.interface import Priority, Region, deadline_after

ONE = range(4)  # tokens of one page


def num_sent(world: World, kind: type) -> int:
    return sum(isinstance(message, kind) for message in world.requests)


def nothing_is_owed(node: StoreNode) -> bool:
    numbers = node.numbers()
    return not any(numbers[name] for name in ("num_writing", "num_owed", "num_pages"))


async def test_few_pages_are_put_in_one_message_and_the_node_moves_them(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await put_all(stores, client, range(12)) == [PutOutcome.STORED] * 3
    assert (num_sent(world, TakePages), num_sent(world, ReservePages)) == (1, 0)
    assert (len(world.reads), len(world.writes)) == (1, 0)
    assert node.numbers()["taken"] == 3
    assert await get_all(stores, client, range(12)) == [GetOutcome.READ] * 3


async def test_more_bytes_than_are_offered_are_written(cluster: StoreCluster, world: World) -> None:
    await cluster.node()
    limit = {"offer_nbytes_max": 2 * SPEC.page_nbytes}
    cluster.client_config = cluster.client_config.model_copy(update=limit)
    stores = await cluster.stores()
    client = await open_client(stores)
    assert await put_all(stores, client, range(12)) == [PutOutcome.STORED] * 3
    assert (num_sent(world, TakePages), len(world.writes)) == (0, 1)


def test_a_read_is_given_the_time_that_its_bytes_take_within_lease_and_deadline() -> None:
    one_s = read_limit_s(SLOW_NBYTES_PER_S, lease_s=60.0, deadline_s=200.0, at_s=100.0)
    assert one_s == 100.0 + READ_S_MAX + 1.0
    three_s = read_limit_s(3 * SLOW_NBYTES_PER_S, lease_s=60.0, deadline_s=200.0, at_s=100.0)
    assert three_s == one_s + 2.0
    leased_s = read_limit_s(3 * SLOW_NBYTES_PER_S, lease_s=2.0, deadline_s=200.0, at_s=100.0)
    assert leased_s == 102.0
    late_s = read_limit_s(3 * SLOW_NBYTES_PER_S, lease_s=60.0, deadline_s=101.0, at_s=100.0)
    assert late_s == 101.0 - ANSWER_MARGIN_S


async def test_many_bytes_do_not_go_before_what_is_read(
    cluster: StoreCluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "URGENT_NBYTES_MAX", 2 * SPEC.page_nbytes)
    await cluster.node(config=small(8, lease_s=60.0))
    patient = {"op_timeout_s": 60.0}
    cluster.client_config = cluster.client_config.model_copy(update=patient)
    stores = await cluster.stores()
    client = await open_client(stores)
    for tokens in (ONE, range(100, 112)):  # one page, three pages
        source, puts = filled(stores.transfer, sequence(tokens))
        await client.put(puts, source=source, deadline_s=deadline_after(60))
    assert world.read_priorities == [Priority.NOW, Priority.BACKGROUND]


async def test_a_present_page_that_is_offered_is_not_read(
    cluster: StoreCluster, world: World
) -> None:
    await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, ONE)
    reads = len(world.reads)
    source, puts = filled(stores.transfer, sequence(ONE))
    result = await client.put(puts, source=source, deadline_s=deadline_after(5))
    assert (result.outcomes, result.moved.num_pages) == ([PutOutcome.PRESENT], 0)
    assert len(world.reads) == reads


async def test_an_offer_that_is_cancelled_frees_its_slot_at_once(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node(config=small(1, lease_s=60.0))
    stores = await cluster.stores()
    client = await open_client(stores)
    world.bulk_gate = asyncio.Event()
    putting = asyncio.ensure_future(put_all(stores, client, ONE))
    await until(lambda: node.numbers()["num_writing"] == 1)
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    await until(lambda: nothing_is_owed(node))
    world.bulk_gate = None
    assert await put_all(stores, client, [9, 9]) == [PutOutcome.STORED]


async def test_a_writer_that_dies_while_its_page_is_taken_leaves_nothing_behind(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node(config=small(1, lease_s=60.0))
    stores = await cluster.stores()
    dying, other = await open_client(stores), await open_client(stores)
    world.bulk_gate = asyncio.Event()
    lost = asyncio.ensure_future(put_all(stores, dying, ONE))
    await until(lambda: node.numbers()["num_writing"] == 1)
    dying.abort()
    await asyncio.gather(lost, return_exceptions=True)
    await until(lambda: nothing_is_owed(node))
    world.bulk_gate = None
    assert await put_all(stores, other, ONE) == [PutOutcome.STORED]
    assert await get_all(stores, other, ONE) == [GetOutcome.READ]


async def test_bytes_that_change_on_the_way_never_become_visible(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node(config=small(1))
    stores = await cluster.stores()
    client = await open_client(stores)
    world.flip_reads = True
    assert await put_all(stores, client, ONE) == [PutOutcome.FAILED]
    assert node.numbers()["torn_writes"] >= TRIES_MAX
    assert await client.match([sequence(ONE)[0].key], deadline_s=deadline_after(1)) == [
        PageState.ABSENT
    ]
    world.flip_reads = False
    assert await put_all(stores, client, ONE) == [PutOutcome.STORED]


async def test_a_node_that_cannot_read_from_here_is_written_to_and_offered_nothing_for_a_while(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node(config=small(8))
    stores = await cluster.stores()
    client = await open_client(stores)
    world.fail_read_at = len(world.reads)
    assert await put_all(stores, client, ONE) == [PutOutcome.STORED]
    assert client.counters()["unread_offers"] == node.numbers()["unread_takes"] == 1
    assert len(world.writes) == 1
    assert NO_OFFERS_S > 1.0
    assert await put_all(stores, client, [7, 7]) == [PutOutcome.STORED]
    assert num_sent(world, TakePages) == 1
    assert await get_all(stores, client, ONE) == [GetOutcome.READ]


async def test_two_writers_that_offer_the_same_page_move_it_once(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    first, second = await open_client(stores), await open_client(stores)
    world.bulk_gate = asyncio.Event()
    one = asyncio.ensure_future(put_all(stores, first, ONE))
    await until(lambda: node.numbers()["num_writing"] == 1)
    two = asyncio.ensure_future(put_all(stores, second, ONE))
    await until(lambda: node.numbers()["num_waits"] == 1)
    world.bulk_gate.set()
    assert (await one, await two) == ([PutOutcome.STORED], [PutOutcome.PRESENT])
    assert len(world.reads) == 1


async def test_of_an_offer_only_what_is_missing_is_taken(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    client = await open_client(stores)
    await put_all(stores, client, range(8))
    assert await put_all(stores, client, range(12)) == [
        *[PutOutcome.PRESENT] * 2,
        PutOutcome.STORED,
    ]
    assert len(world.reads[-1]) == 1
    assert node.numbers()["taken"] == 3


class Offer(NamedTuple):
    """An offer of one page, by hand, at a node that reads when ``world.bulk_gate`` opens."""

    node: StoreNode
    answer: asyncio.Task[PagesTaken]
    bytes_of: Region  # stays alive until it has been read


async def offered(cluster: StoreCluster, world: World) -> Offer:
    node = await cluster.node(config=small(8, lease_s=60.0))
    stores = await cluster.stores()
    channel = await raw_channel(cluster, node.address)
    source, puts = filled(stores.transfer, sequence(ONE))
    page = PageBytes(SPEC, source.view, puts[0].identity.num_tokens)
    pages = (OfferedPage(puts[0].identity, 0, checksums_now([page])[0]),)
    message = TakePages(spec=SPEC, read_token=source.export("r"), pages=pages)
    world.bulk_gate = asyncio.Event()
    asking = channel.request(message, PagesTaken, deadline_s=deadline_after(5))
    answer = asyncio.ensure_future(asking)
    await until(lambda: node.numbers()["num_writing"] == 1)
    return Offer(node, answer, source)


@pytest.mark.parametrize("torn", [False, True])
async def test_of_a_page_that_was_read_it_is_said_whether_it_was_whole(
    cluster: StoreCluster, world: World, torn: bool
) -> None:
    offer = await offered(cluster, world)
    world.flip_reads = torn
    assert world.bulk_gate is not None
    world.bulk_gate.set()
    assert (await offer.answer).statuses == (TakeStatus.TORN if torn else TakeStatus.TAKEN,)
    assert offer.node.numbers()["taken"] == (not torn)
    assert offer.node.numbers()["num_pages"] == (not torn)


async def test_a_page_whose_reservation_has_ended_by_the_time_it_was_read_is_unread(
    cluster: StoreCluster, world: World
) -> None:
    """The process stood still for longer than a lease."""
    offer = await offered(cluster, world)
    offer.node._directory.tick(deadline_after(3600.0), 0)
    assert offer.node.numbers()["num_writing"] == 0
    assert world.bulk_gate is not None
    world.bulk_gate.set()
    assert (await offer.answer).statuses == (TakeStatus.UNREAD,)
    assert (offer.node.numbers()["taken"], offer.node.numbers()["stale_commits"]) == (0, 1)
    assert nothing_is_owed(offer.node)


async def test_an_offer_with_an_impossible_checksum_or_token_takes_nothing(
    cluster: StoreCluster, world: World
) -> None:
    node = await cluster.node()
    stores = await cluster.stores()
    channel = await raw_channel(cluster, node.address)
    source, puts = filled(stores.transfer, sequence(ONE))
    world.bulk_error = PeerLost("no such memory")
    offered = OfferedPage(puts[0].identity, 0, bytes(16))
    message = TakePages(spec=SPEC, read_token=source.export("r"), pages=(offered,))
    reply = await channel.request(message, PagesTaken, deadline_s=deadline_after(1))
    assert reply.statuses == (TakeStatus.UNREAD,)
    assert nothing_is_owed(node)


def test_a_slot_that_this_process_reads_into_is_not_granted_again_before_it_lets_go() -> None:
    """The process stood still: the reservation has ended, the read has not."""
    d = directory(1)
    page = single(1)
    slot = grant(d, page)
    row = d.hold(page.key, slot.generation)
    assert row is not None
    d.tick(2 * LEASE_S, 10)
    assert d.state(page.key) is PageState.ABSENT
    assert reserve(d, single(2), 2 * LEASE_S).status is ReserveStatus.REFUSED
    assert not d.commit(page.key, slot.generation, CHECKSUM), "its reservation has ended"
    d.let_go(row)
    assert grant(d, single(2), 2 * LEASE_S).generation != slot.generation
    d.check()


def test_only_a_present_grant_can_be_held() -> None:
    d = directory(1)
    slot = grant(d, single(1))
    assert d.hold(single(1).key, slot.generation + 1) is None
    assert d.hold(single(2).key, slot.generation) is None
    d.check()
