"""What a node says of its namespaces is what they hold."""

from __future__ import annotations

import pytest

from kvstore.keys import Namespace, namespace_of, page_keys
from kvstore.messages import NamespaceUsage, ReadStats, ReserveStatus, StoreStats
from kvstore.server.directory import Directory
from kvstore.server.segment import Segment
from kvstore.store import PageIdentity, PutPolicy, identities
from tests.kvstore.cluster import StoreCluster
from tests.kvstore.contract import put_all
from tests.kvstore.pages import SPEC
from transfer.channel import Hello
from transfer.identity import Role, new_identity
from transfer.interface import deadline_after

A, B = (namespace_of("test-model", SPEC, salt=salt) for salt in "ab")


def pages_of(namespace: Namespace, num: int) -> list[PageIdentity]:
    tokens = list(range(num * SPEC.page_size))
    keys = page_keys(namespace, tokens, SPEC.page_size)
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return identities(namespace, keys, packed, SPEC.page_size)


def store(directory: Directory, namespace: Namespace, num: int) -> None:
    policy = PutPolicy(namespace=namespace)
    pages = pages_of(namespace, num)
    for page, reserved in zip(
        pages, directory.reserve(pages, SPEC, 0.0, policy, "writer"), strict=True
    ):
        assert reserved.status is ReserveStatus.GRANTED
        assert reserved.slot is not None
        directory.commit(page.key, reserved.slot.generation, bytes(16))


def directory_of(num_slots: int) -> Directory:
    nbytes = num_slots * SPEC.page_nbytes
    return Directory(Segment(nbytes), lease_s=6.0, high=nbytes, low=nbytes)


def largest(directory: Directory, num_max: int = 10) -> tuple[NamespaceUsage, ...]:
    usage = directory.usage()
    for _ in usage.steps():
        pass
    return usage.largest(num_max)


def test_usage_counts_pages_and_bytes_the_largest_first() -> None:
    directory = directory_of(64)
    assert largest(directory) == ()
    store(directory, A, 3)
    store(directory, B, 5)
    nbytes = SPEC.page_nbytes
    assert largest(directory) == (
        NamespaceUsage(B, 5, 5 * nbytes, 0),
        NamespaceUsage(A, 3, 3 * nbytes, 0),
    )
    assert largest(directory, 1) == (NamespaceUsage(B, 5, 5 * nbytes, 0),)
    assert directory.clear(B) == 5
    assert largest(directory) == (NamespaceUsage(A, 3, 3 * nbytes, 0),)


def test_reservations_do_not_count_before_their_commit() -> None:
    directory = directory_of(64)
    directory.reserve(pages_of(A, 4), SPEC, 0.0, PutPolicy(namespace=A), "writer")
    assert largest(directory) == ()


def test_usage_is_counted_in_steps_that_cover_every_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.server.usage.ROWS_PER_STEP", 64)
    num = 100
    directory = directory_of(num)
    store(directory, A, num)
    usage = directory.usage()
    assert sum(1 for _ in usage.steps()) == 2
    assert usage.largest(1)[0].num_pages == num


async def test_a_node_lists_namespaces_when_asked_and_states_its_policy(
    cluster: StoreCluster,
) -> None:
    node = await cluster.node("store-0")
    stores = await cluster.stores()
    client = await stores.open()
    await put_all(stores, client, range(10))
    network = cluster.network()
    hello = Hello(identity=new_identity(Role.OBSERVER))
    channel = await network.connect(node.address, hello, deadline_s=deadline_after(5))
    asked: dict[int, StoreStats] = {}
    for num in (0, 5, -3):
        message = ReadStats(num_namespaces=num)
        asked[num] = await channel.request(message, StoreStats, deadline_s=deadline_after(5))
    await channel.close()
    assert asked[0].namespaces == asked[-3].namespaces == ()
    assert [usage.num_pages for usage in asked[5].namespaces] == [3]
    assert asked[5].facts == {"policy": "lru", "replicas": "1"}
    assert asked[5].numbers["num_pages"] == 3
    assert asked[5].numbers["uptime_s"] >= 0
