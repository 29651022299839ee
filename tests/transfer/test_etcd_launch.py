"""Commands and roles with ``--join etcd://...``: what they take, say, and survive."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from launch import runtime
from launch.config import GatewayOptions, JoinOptions, StoreOptions
from launch.door_seat import EtcdSeat, RegistrySeat
from launch.errors import ConfigError, StartError
from launch.gateway_role import GatewayRole
from launch.main import main
from launch.seat import etcd_access, etcd_seat, no_renewal, outside_seat
from launch.status import fetch
from launch.store_role import StoreRole
from tests.transfer.etcd_seats import until
from tests.transfer.etcd_server import EtcdServer, needs_etcd, running_etcd
from transfer.etcd import EtcdMembership
from transfer.identity import Role, new_identity
from transfer.membership import SeatTaken
from transfer.registry_client import RegistryMembership
from transfer.zmq_network import ZmqNetwork

pytestmark = [pytest.mark.net, needs_etcd]


@asynccontextmanager
async def gateway(join: str, node_id: str | None = None) -> AsyncIterator[GatewayRole]:
    role = GatewayRole(GatewayOptions.of(model="fake", port=0, join=join, node_id=node_id))
    try:
        await role.start()
        yield role
    finally:
        await role.close()


def test_the_address_decides_who_keeps_the_seat() -> None:
    identity, network = new_identity(Role.STORE), ZmqNetwork()
    assert isinstance(outside_seat("etcd://h/n", network, identity), EtcdMembership)
    assert isinstance(outside_seat("tcp://h:1", network, identity), RegistryMembership)
    embedded = GatewayRole(GatewayOptions.of(model="fake", port=0, join="tcp://127.0.0.1:8100"))
    joined = GatewayRole(GatewayOptions.of(model="fake", port=0, join="etcd://h/n"))
    assert isinstance(embedded._seat, RegistrySeat)
    assert isinstance(joined._seat, EtcdSeat)
    for role in (embedded, joined):
        role.abort()


def test_user_and_certificates_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "PASSWORD", "CACERT", "CERT", "KEY"):
        monkeypatch.setenv(f"KVFERRY_ETCD_{name}", f"/no/{name.lower()}")
    assert etcd_access() == ("/no/user", "/no/password", "/no/cacert", "/no/cert", "/no/key")
    with pytest.raises(ConfigError, match="KVFERRY_ETCD_CACERT \\(/no/cacert\\)") as caught:
        etcd_seat("etcds://h/n", new_identity(Role.STORE), renewed=no_renewal)
    assert "password" not in str(caught.value)


async def test_a_gateway_on_etcd_serves_without_it_and_says_so(etcd: EtcdServer) -> None:
    async with gateway(etcd.url) as role, httpx.AsyncClient(base_url=role.url) as client:
        health = (await client.get("/health")).json()
        assert health["checks"] == {"dispatcher": True, "membership": True}
        members = (await client.get("/admin/cluster")).json()["members"]
        assert [member["node_id"] for member in members] == [role.identity.node_id]
        etcd.stand_still()
        await until(lambda: not role._seat.membership.connected)
        assert "the last view is used" in (await client.get("/ready")).text
        assert (await client.get("/health")).status_code == 200
        etcd.go_on()
        await until(lambda: role._seat.membership.connected)
        role._seat.abort()
        assert (await client.get("/health")).status_code == 503, "nobody follows the cluster"


async def test_several_gateways_share_an_etcd_but_not_a_node_id(etcd: EtcdServer) -> None:
    async with gateway(etcd.url, "one") as one, gateway(etcd.url, "two") as two:
        await until(lambda: len(one._seat.membership.view.members) == 2)
        with pytest.raises(SeatTaken, match="node id one is taken: the process at"):
            async with gateway(etcd.url, "one"):
                pass
        for first in (one, two):
            assert not first._seat.membership.superseded
            assert first._seat.membership.connected


async def test_a_role_that_finds_no_etcd_in_time_names_it() -> None:
    nowhere = "etcd://127.0.0.1:9/test"
    door = GatewayRole(GatewayOptions.of(model="fake", port=0, join=nowhere, join_timeout=0.3))
    store = StoreRole(StoreOptions.of(segment="16MiB", join=nowhere, join_timeout=0.3))
    for role in (door, store):
        with pytest.raises(StartError, match=f"--join {re.escape(nowhere)}: nobody answered"):
            await runtime._serve(role, 0.0)
    with pytest.raises(StartError, match="name where etcd is"):
        await fetch(JoinOptions.of(join=nowhere), 0.3)


async def test_a_user_that_etcd_does_not_know_is_refused_for_good(
    own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = own_etcd
    etcd.lock(password="sesame")
    store = StoreRole(StoreOptions.of(segment="16MiB", join=etcd.url))
    with pytest.raises(ConfigError, match="KVFERRY_ETCD_USER and KVFERRY_ETCD_PASSWORD"):
        await runtime._serve(store, 0.0)
    with pytest.raises(ConfigError, match="KVFERRY_ETCD_USER"):
        await fetch(JoinOptions.of(join=etcd.url), 5.0)
    monkeypatch.setenv("KVFERRY_ETCD_USER", "root")
    monkeypatch.setenv("KVFERRY_ETCD_PASSWORD", "sesame")
    async with gateway(etcd.url) as role:
        view = await fetch(JoinOptions.of(join=etcd.url), 5.0)
        assert [member.node_id for member in view.members] == [role.identity.node_id]


async def test_etcd_over_tls_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_etcd(tmp_path, tls=True) as etcd:
        options = JoinOptions.of(join=etcd.url)
        with pytest.raises(StartError, match="etcds://"):
            await fetch(options, 1.0)
        monkeypatch.setenv("KVFERRY_ETCD_CACERT", etcd.cacert)
        with pytest.raises(StartError, match="etcd answers, but no node is registered under the"):
            await fetch(options, 5.0)


async def test_a_name_that_nobody_has_joined_is_an_error_and_not_an_empty_table(
    etcd: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(etcd.url):
        assert await asyncio.to_thread(main, ["status", "--join", etcd.url]) == 0
        capsys.readouterr()
        wrong = f"{etcd.url}-wrong"
        clear = ["cache", "clear", "--all"]
        for command in (["status"], ["status", "--json"], ["namespace"], clear):
            assert await asyncio.to_thread(main, [*command, "--join", wrong]) == 1
            said = capsys.readouterr()
            assert f"--join {wrong}: etcd answers, but no node is registered under" in said.err
            assert "spelled" in said.err
            assert (said.out, said.err.count("\n")) == ("", 1)
