"""Whatever clients say of parents, no page is its own ancestor: every page can be evicted."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvstore.messages import PagesReserved, ReservePages, ReserveStatus
from kvstore.page import PageKey
from kvstore.server.directory import Directory
from kvstore.store import PageIdentity
from kvstore.verify import well_formed
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.directories import directory, present, reserve, single, store
from tests.kvstore.faulty import raw_channel
from tests.kvstore.pages import SPEC, sequence
from transfer.errors import RemoteFailed
from transfer.interface import deadline_after

POLICIES = ("lru", "lfu", "slru", "heat", "fifo")


def page(key: int, parent: int, depth: int) -> PageIdentity:
    return PageIdentity(
        key=PageKey(key.to_bytes(32, "big")),
        parent=parent.to_bytes(32, "big"),
        depth=depth,
        tokens=bytes(16),
    )


def all_can_go(d: Directory, num_pages: int) -> None:
    """As many new pages as there are slots find room."""
    d.check()
    for number in range(num_pages):
        assert reserve(d, single(10**6 + number)).status is ReserveStatus.GRANTED
    d.check()


async def test_a_page_that_is_its_own_parent_is_no_page(cluster: StoreCluster) -> None:
    own = msgspec.structs.replace(single(0), parent=single(0).key)
    assert not well_formed(own, SPEC)
    node = await cluster.node()
    channel = await raw_channel(cluster, node.address)
    with pytest.raises(RemoteFailed, match="bad_page"):
        await channel.request(
            ReservePages(spec=SPEC, pages=(own,)), PagesReserved, deadline_s=deadline_after(1)
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depths", [(1, 1), (1, 2), (2, 1), (0, 1), (0, 0)])
def test_two_pages_that_claim_each_other_as_parents_can_be_evicted(
    depths: tuple[int, int], policy: str
) -> None:
    d = directory(4, policy=policy)
    for i in 0, 2:
        store(d, [page(i, i + 1, depths[0]), page(i + 1, i, depths[1])])
    all_can_go(d, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_page_in_its_own_trunk_can_be_evicted(policy: str) -> None:
    d = directory(4, policy=policy)
    store(d, [page(i, i, 1) for i in range(4)])
    all_can_go(d, 4)


def test_a_cycle_hidden_behind_pages_of_the_right_depth_can_be_evicted() -> None:
    d = directory(4)
    store(d, [page(10, 1, 5), page(11, 2, 1), page(1, 2, 4), page(2, 1, 0)])
    all_can_go(d, 4)


def test_a_child_of_another_depth_does_not_keep_a_page_nor_hide_its_children() -> None:
    d = directory(4, policy="lru")
    first, second = sequence(range(8))
    stray = msgspec.structs.replace(single(1), parent=first.key, depth=7)
    store(d, [stray, first, second])
    d.check()
    store(d, [single(2), single(3)])
    assert present(d, [stray, first, second]) == [False, True, True]
    store(d, [single(4)])
    assert present(d, [first, second]) == [True, False], "the leaf goes before its parent"


def test_any_claims_at_all_leave_only_pages_that_can_go() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        d = directory(8)
        for step in range(200):
            one = page(rng.randrange(12), rng.randrange(12), rng.randrange(3))
            granted = reserve(d, one, step * 0.1)
            if granted.slot is not None and rng.random() < 0.9:
                d.commit(one.key, granted.slot.generation, bytes(16))
            elif granted.slot is not None:
                d.abort(one.key, granted.slot.generation, quiet=True)
            if step % 10 == 0:
                d.check()
        all_can_go(d, 8)
