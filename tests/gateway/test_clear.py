"""Claims about clearing caches: who is told, in which order, and what is said of who was not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.clearing import STORE_ROUNDS_MAX
from kvstore.events import CacheCleared, ClearCache
from kvstore.keys import namespace_of
from tests.gateway.fake_node import SPEC
from tests.gateway.fakes import FakeChannel, FakeCluster
from tests.gateway.http import Door, door
from transfer.channel import Channel, Hello
from transfer.errors import PeerUnreachable, RemoteFailed
from transfer.identity import Role, new_identity
from transfer.membership import PAGE_STORE_FACT, Member, NodeInfo, NodeStatus

CLEAR = "/admin/cache/clear"


class FakeStore:
    """A store node that only forgets: ``pages`` in turn, one number per call, then none."""

    def __init__(self, name: str, *pages: int) -> None:
        self.identity = new_identity(Role.STORE, name)
        self.told: list[bytes | None] = []
        self.clear_ids: dict[str, None] = {}
        self.unreachable = False
        self.refusal: RemoteFailed | None = None
        self._pages = list(pages)

    @property
    def member(self) -> Member:
        info = NodeInfo(
            identity=self.identity, address=f"fake://{self.identity.node_id}", transport="fake"
        )
        return Member(info=info, status=NodeStatus())

    def clear(self, message: ClearCache) -> CacheCleared:
        if self.refusal is not None:
            raise self.refusal
        self.told.append(message.namespace)
        self.clear_ids[message.clear_id] = None
        return CacheCleared(num_pages=self._pages.pop(0) if self._pages else 0)


class StoreChannel(FakeChannel):
    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.num_closed = 0

    async def request(self, message: msgspec.Struct, reply: type[Any], *, deadline_s: float) -> Any:
        assert isinstance(message, ClearCache)
        return self._store.clear(message)

    async def close(self) -> None:
        self.num_closed += 1


@asynccontextmanager
async def cluster_of(
    *stores: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Door, list[StoreChannel]]]:
    """A door over one prefill and one decode node and these stores."""
    cluster = FakeCluster(with_store=False)
    by_address = {store.member.info.address: store for store in stores}
    opened: list[StoreChannel] = []
    plain = cluster.network.connect

    async def connect(address: str, hello: Hello, *, deadline_s: float) -> Channel:
        store = by_address.get(address)
        if store is None:
            return await plain(address, hello, deadline_s=deadline_s)
        if store.unreachable:
            raise PeerUnreachable(f"nobody at {address}")
        opened.append(StoreChannel(store))
        return opened[-1]

    monkeypatch.setattr(cluster.network, "connect", connect)
    async with door(cluster) as d:
        nodes = [node.member for node in cluster.nodes.values()]
        cluster.membership.show([*nodes, *(store.member for store in stores)])
        await cluster.settle()
        yield d, opened


@pytest.fixture
def stores() -> list[FakeStore]:
    return [FakeStore("s0", 7, 2), FakeStore("s1", 5)]


async def test_a_salt_is_resolved_as_requests_resolve_it_and_everybody_is_told(
    stores: list[FakeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_of(*stores, monkeypatch=monkeypatch) as (d, opened):
        response = await d.client.post(CLEAR, json={"salt": "tenant"})
        assert response.status_code == 200
        namespace = namespace_of("fake", SPEC, salt="tenant")
        body = response.json()
        assert body["namespace"] == namespace.hex()
        assert body["named_by"] == {"model": "fake", "salt": "tenant", "adapter": None}
        assert body["pages"] == {"prefill": 3, "decode": 3, "store": 14}
        assert {n["node_id"]: n["num_pages"] for n in body["nodes"]} == {
            **{"p0": 3, "d0": 3},
            **{"s0": 9, "s1": 5},
        }
        assert d.cluster.p().cleared == d.cluster.d().cleared == [namespace]
        assert all(channel.num_closed == 1 for channel in opened)


async def test_stores_are_told_until_nothing_is_left_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restless = FakeStore("s0", *[1] * 100)
    async with cluster_of(restless, monkeypatch=monkeypatch) as (d, _):
        body = (await d.client.post(CLEAR, json={"all": True})).json()
        assert (body["namespace"], body["named_by"]) == (None, None)
        assert restless.told == [None] * STORE_ROUNDS_MAX
    calm = FakeStore("s0", 4)
    async with cluster_of(calm, monkeypatch=monkeypatch) as (d, _):
        await d.client.post(CLEAR, json={"all": True})
        assert calm.told == [None, None], "the second round finds nothing"
        assert len(calm.clear_ids) == 1, "both rounds are the same clear"
        await d.client.post(CLEAR, json={"all": True})
        assert len(calm.clear_ids) == 2


async def test_a_node_that_could_not_be_told_is_named_and_the_status_says_so(
    stores: list[FakeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores[0].unreachable = True
    async with cluster_of(*stores, monkeypatch=monkeypatch) as (d, _):
        d.cluster.p().kill()
        await d.cluster.settle()
        response = await d.client.post(CLEAR, json={"namespace": "ab" * 32})
        assert response.status_code == 502
        body = response.json()
        assert body["error"]["code"] == "incomplete"
        assert "p0, s0" in body["error"]["message"]
        assert "try again for p0, s0" in body["error"]["message"]
        errors = {node["node_id"]: node["error"] for node in body["nodes"]}
        assert errors["d0"] is errors["s1"] is None
        assert "nobody at fake://s0" in errors["s0"]
        assert errors["p0"]
        assert stores[1].told[0] == bytes.fromhex("ab" * 32)


async def test_a_store_of_another_engine_is_named_with_what_clears_it() -> None:
    cluster = FakeCluster(with_store=False)
    async with door(cluster) as d:
        members = [node.member for node in cluster.nodes.values()]
        contract = {**members[0].info.contract, PAGE_STORE_FACT: "mooncake://m:1"}
        info = msgspec.structs.replace(members[0].info, contract=contract)
        cluster.membership.show([msgspec.structs.replace(members[0], info=info), members[1]])
        response = await d.client.post(CLEAR, json={"all": True})
        assert response.status_code == 502
        message = response.json()["error"]["message"]
        assert "trying again does not clear mooncake://m:1" in message
        assert "try again" not in message
        (named,) = [n for n in response.json()["nodes"] if n["role"] == "store"]
        assert named["node_id"] == "mooncake://m:1"
        assert "remove_by_regex('^kvferry/.*', True)" in named["error"]
        assert cluster.p().cleared == cluster.d().cleared == [None]


async def test_a_store_that_refuses_is_an_error_of_that_store(
    stores: list[FakeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores[1].refusal = RemoteFailed("closed", "this store node is shutting down")
    async with cluster_of(*stores, monkeypatch=monkeypatch) as (d, _):
        response = await d.client.post(CLEAR, json={"all": True})
        assert response.status_code == 502
        by_name = {node["node_id"]: node for node in response.json()["nodes"]}
        assert "shutting down" in by_name["s1"]["error"]
        assert by_name["s0"]["num_pages"] == 9


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({}, "namespace"),
        ({"all": True, "salt": "x"}, "namespace"),
        ({"namespace": "ab" * 32, "salt": "x"}, "namespace"),
        ({"namespace": "ab"}, "namespace"),
        ({"namespace": "AB" * 32}, "namespace"),
        ({"salt": ""}, "salt"),
        ({"all": "yes"}, "all"),
        ({"everything": True}, "everything"),
        ({"salt": "x", "model": "other"}, "model"),
    ],
)
async def test_an_order_that_is_not_clear_clears_nothing(order: dict[str, Any], param: str) -> None:
    async with door() as d:
        response = await d.client.post(CLEAR, json=order)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param
        assert d.cluster.p().cleared == []


async def test_the_query_says_the_same_as_a_body(
    stores: list[FakeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_of(*stores, monkeypatch=monkeypatch) as (d, _):
        for query in ("salt=a&model=fake", "all=true", f"namespace={'cd' * 32}", "adapter=x"):
            assert (await d.client.post(f"{CLEAR}?{query}")).status_code == 200
        assert (await d.client.post(f"{CLEAR}?all=false")).status_code == 400
        assert d.cluster.d().cleared == [
            namespace_of("fake", SPEC, salt="a"),
            None,
            bytes.fromhex("cd" * 32),
            namespace_of("fake", SPEC, adapter="x"),
        ]


async def test_without_the_facts_of_a_model_only_a_name_in_hex_can_be_cleared() -> None:
    cluster = FakeCluster(num_prefill=0, num_decode=0, with_store=False)
    async with door(cluster) as d:
        response = await d.client.post(CLEAR, json={"salt": "x"})
        assert response.status_code == 503
        assert "hex" in response.json()["error"]["message"]
        assert (await d.client.post(CLEAR, json={"namespace": "ab" * 32})).status_code == 200
