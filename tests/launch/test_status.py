"""What ``kvferry status`` says of nodes: the truth about their pages, and nothing about nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from launch.cluster import with_ports
from launch.config import GatewayOptions, JoinOptions, UpOptions
from launch.errors import StartError
from launch.gateway_role import GatewayRole
from launch.http_client import post_json
from launch.inproc import InProcessCluster
from launch.main import main
from launch.parts import make_network
from launch.seat import no_answer
from launch.status import engine_text, fetch, plain, show
from transfer.channel import Hello, Service
from transfer.identity import Role, new_identity
from transfer.membership import (
    PAGE_STORE_FACT,
    PAGE_STORE_LOST,
    Member,
    MembershipView,
    NodeInfo,
    NodeStatus,
)
from transfer.registry import Registry, RegistryService

TIMEOUT_S = 60.0


def pages_shown(role: Role, **gauges: float) -> str:
    info = NodeInfo(identity=new_identity(role, "n1"), address="tcp://127.0.0.1:1")
    view = MembershipView(members=(Member(info=info, status=NodeStatus(gauges=gauges)),))
    heading, row = plain(view).splitlines()[1:]
    return row[heading.index("pages") : heading.index("heartbeat")].strip()


def test_cached_pages_are_neither_free_nor_held() -> None:
    gauges = {"num_pages": 127.0, "num_free_pages": 116.0, "num_evictable_pages": 20.0}
    for role in (Role.PREFILL, Role.DECODE):
        assert pages_shown(role, **gauges) == "96 free, 20 cached, 11 held of 127"
    assert pages_shown(Role.STORE, **gauges) == "127 stored"
    assert pages_shown(Role.GATEWAY) == ""


def on_engine(name: str, lost: float, engine: str = "mooncake://10.0.0.7:50051") -> Member:
    identity = new_identity(Role.DECODE, name)
    contract = {PAGE_STORE_FACT: engine}
    info = NodeInfo(identity=identity, address="tcp://127.0.0.1:1", contract=contract)
    return Member(info=info, status=NodeStatus(gauges={PAGE_STORE_LOST: lost}))


def test_the_engine_that_keeps_the_pages_is_named_with_those_whom_it_does_not_answer() -> None:
    well = MembershipView(members=(on_engine("d1", 0.0), on_engine("d2", 0.0)))
    assert engine_text(well) == "page store: mooncake://10.0.0.7:50051"
    ill = MembershipView(members=(on_engine("d1", 0.0), on_engine("d2", 1.0)))
    first, second = engine_text(ill).splitlines()
    assert first == "page store: mooncake://10.0.0.7:50051"
    assert "does not answer d2 (1 of 2 nodes)" in second
    assert engine_text(MembershipView(members=(on_engine("d1", 0.0, "kvferry"),))) == ""


def test_status_prints_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def asked(*_: object) -> tuple[MembershipView, dict[str, object]]:
        return MembershipView(members=(on_engine("d1", 0.0),)), {}

    monkeypatch.setattr("launch.status.fetch_all", asked)
    show(None, as_json=False, timeout_s=TIMEOUT_S)
    assert "\npage store: mooncake://10.0.0.7:50051\n" in capsys.readouterr().out


@pytest.fixture
async def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InProcessCluster]:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    options = UpOptions.of(model="fake", port=0, segment="1MiB", transfer="loopback", num_pages=64)
    cluster = InProcessCluster(with_ports(options))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


@pytest.mark.net
async def test_nodes_that_cache_a_prompt_say_so_and_their_pages_add_up(
    live: InProcessCluster,
) -> None:
    body = {"model": "fake", "prompt": list(range(200)), "max_tokens": 2}
    url = f"{live.url}/v1/completions"
    answer = await asyncio.to_thread(post_json, url, body, headers={}, timeout_s=TIMEOUT_S)
    assert answer is not None
    assert answer.status == 200
    async with asyncio.timeout(TIMEOUT_S):
        while True:  # until the heartbeats tell of it
            view = await fetch(JoinOptions.of(join=live.join_url), TIMEOUT_S)
            nodes = [*view.with_role(Role.PREFILL), *view.with_role(Role.DECODE)]
            gauges = [node.status.gauges for node in nodes]
            if all(g["num_evictable_pages"] >= 12 for g in gauges):
                break
    for g in gauges:
        assert g["num_pages"] == 63
        assert g["num_free_pages"] == 63, "what new work may take"
    assert "63 free" not in plain(view)


@pytest.mark.parametrize("starts", [True, False])
def test_who_does_not_answer_is_named_with_what_may_be_wrong(starts: bool) -> None:
    etcd = no_answer("etcd://h:2379/x", 5.0, starts=starts)
    assert etcd.startswith(
        "--join etcd://h:2379/x: nobody answered within 5 s: etcd does not answer"
    )
    gateway = no_answer("tcp://h:8000", 0.5, starts=starts)
    assert gateway.startswith("--join tcp://h:8000: nobody answered within 0.5 s: ")
    assert "a join port is the HTTP port + 100 by default" in gateway
    assert ("start `kvferry gateway` there" in gateway) is starts


def test_the_door_knows_who_keeps_the_members() -> None:
    for join, keeper in (("etcd://h/n", "etcd (etcd://h/n)"), (None, "the registry")):
        role = GatewayRole(GatewayOptions.of(model="fake", port=0, join=join))
        assert role._config.members_at == keeper
        role.abort()


@pytest.mark.net
async def test_status_says_that_it_is_etcd_that_does_not_answer() -> None:
    with pytest.raises(
        StartError, match="etcd does not answer: start it there, or name where etcd is"
    ):
        await fetch(JoinOptions.of(join="etcd://127.0.0.1:9/x"), 0.2)


@asynccontextmanager
async def empty_registry() -> AsyncIterator[str]:
    network, service = make_network(None), Service()
    registry = RegistryService(Registry(), service)
    listener = await network.listen(
        service, Hello(identity=new_identity(Role.GATEWAY)), "tcp://127.0.0.1:0"
    )
    try:
        yield listener.address
    finally:
        registry.close()
        await listener.close()
        await network.close()


@pytest.mark.net
async def test_a_registry_without_nodes_is_an_error_and_not_an_empty_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with empty_registry() as join:
        with pytest.raises(StartError, match="no node is registered with it: start nodes"):
            await fetch(JoinOptions.of(join=join), TIMEOUT_S)
        assert await asyncio.to_thread(main, ["status", "--join", join]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"--join {join}: a registry answers there" in said.err
