"""What is chosen, what is refused at start, and what is said about it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace
from pydantic import SecretStr

from tests.transfer.bulk_harness import checked_engines, pattern, soon, whole
from tests.transfer.contract.world import filled
from transfer.config import TransferConfig
from transfer.errors import PeerUnreachable
from transfer.operation_limit import OperationLimit
from transfer.token import Endpoint, Token
from transfer.transports import choose, host_id, process_id

HERE = Endpoint("me", "p1", "h1", "local-1", "shm-1", "127.0.0.1:1")
SAME_HOST = replace(HERE, incarnation="other", process="p2", loopback="local-9")
FAR = replace(SAME_HOST, host="h2")
HERE_UCX = replace(HERE, ucx="127.0.0.1:2")  # offered: by "ucx", and by "auto" with RDMA
FAR_UCX = replace(FAR, ucx="10.0.0.2:2")


def token(endpoint: Endpoint, *, shared: bool = True) -> Token:
    return Token(1, endpoint, 65536, 8, "r", bytes(16), shared)


@pytest.mark.parametrize(
    ("transport", "there", "shared", "chosen"),
    [
        ("auto", HERE, True, "loopback"),
        ("auto", SAME_HOST, True, "shm"),
        ("auto", SAME_HOST, False, "tcp"),
        ("auto", FAR, True, "tcp"),
        ("auto", replace(SAME_HOST, shm=""), True, "tcp"),
        ("shm", HERE, True, "shm"),
        ("shm", FAR, True, "tcp"),
        ("tcp", HERE, True, "tcp"),
        ("loopback", HERE, True, "loopback"),
        ("loopback", SAME_HOST, True, None),
        ("auto", replace(FAR, tcp=""), True, None),
        ("ucx", FAR, True, "tcp"),  # we would, but cannot
    ],
)
def test_choice(transport: str, there: Endpoint, shared: bool, chosen: str | None) -> None:
    assert choose(transport, HERE, token(there, shared=shared)) == chosen


@pytest.mark.parametrize(
    ("transport", "there", "shared", "chosen"),
    [
        ("ucx", FAR_UCX, True, "ucx"),
        ("ucx", replace(SAME_HOST, ucx="127.0.0.1:3"), True, "ucx"),
        ("ucx", FAR, True, "tcp"),
        ("ucx", replace(FAR_UCX, tcp=""), True, "ucx"),
        ("auto", FAR_UCX, True, "ucx"),
        ("auto", FAR, True, "tcp"),
        ("auto", replace(SAME_HOST, ucx="127.0.0.1:3"), True, "shm"),
        ("auto", replace(SAME_HOST, ucx="127.0.0.1:3"), False, "ucx"),
        ("tcp", FAR_UCX, True, "tcp"),
        ("shm", FAR_UCX, True, "tcp"),
    ],
)
def test_ucx_is_chosen_where_both_sides_offer_it(
    transport: str, there: Endpoint, shared: bool, chosen: str | None
) -> None:
    assert choose(transport, HERE_UCX, token(there, shared=shared)) == chosen


def test_ids_are_stable_within_a_process() -> None:
    assert host_id() == host_id()
    assert process_id() == process_id()


def test_an_unknown_transport_is_refused_with_its_name_and_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'rmda'.*auto, loopback, shm, tcp"):
        TransferConfig(transport="rmda")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "example.org"])
def test_nothing_listens_beyond_this_machine_without_a_secret(host: str) -> None:
    with pytest.raises(ValueError, match="cluster secret"):
        TransferConfig(host=host, advertise_host="10.1.2.3")
    accepted = TransferConfig(host=host, advertise_host="10.1.2.3", cluster_secret=SecretStr("s"))
    assert accepted.secret == b"s"


def test_a_secret_is_not_shown_in_errors() -> None:
    with pytest.raises(ValueError, match="wildcard") as caught:
        TransferConfig(host="0.0.0.0", cluster_secret=SecretStr("hush-hush"))
    assert "hush" not in str(caught.value)


async def test_auto_says_what_it_chose_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="transfer.engine")
    async with checked_engines("auto") as engines:
        engine = await engines.make()
        assert engine.transport == "shm"
        assert "auto chose shm" in caplog.text
        assert engine.address in caplog.text
        assert engine.is_healthy
    assert not engine.is_healthy


async def test_an_address_in_use_is_said_with_the_remedy() -> None:
    async with checked_engines("tcp") as engines:
        first = await engines.make()
        port = int(first.address.rpartition(":")[2])
        second = engines.unstarted(port=port)
        with pytest.raises(PeerUnreachable, match=f"{port}.*port 0|port.*0 takes a free one"):
            await second.start()


async def test_a_loopback_engine_is_not_reached_from_tcp() -> None:
    async with checked_engines("tcp") as engines:
        owner, peer = await engines.make(transport="loopback"), await engines.make()
        region, local = owner.allocate(8), peer.allocate(8)
        with pytest.raises(PeerUnreachable, match="use 'auto' or 'tcp'"):
            await peer.read(region.export("r"), whole(8), into=local, deadline_s=soon())


async def test_auto_moves_bytes_within_the_process_by_loopback() -> None:
    async with checked_engines("auto") as engines:
        owner, peer = await engines.make(), await engines.make()
        region, local = owner.allocate(64), peer.allocate(64)
        region.view[:] = pattern(64).data
        await peer.read(region.export("r"), whole(64), into=local, deadline_s=soon())
        assert local.view == region.view
        assert owner.counters().bytes_served == 64
        assert peer.counters().fallbacks == 0


def test_operations_are_admitted_up_to_the_limit_of_each_peer_and_again_when_some_end() -> None:
    limit = OperationLimit(2)
    with limit.admit("a"), limit.admit("b"):
        with limit.admit("a"), pytest.raises(PeerUnreachable, match="2 operations"):
            limit.admit("a")
        with limit.admit("a"), limit.admit("b"):
            pass
    assert not limit.num_peers


async def test_each_peer_has_a_limit_of_its_own() -> None:
    async with checked_engines("tcp") as engines:
        user = await engines.make(max_operations_per_peer=1)
        owners = [await engines.make() for _ in range(3)]
        locals_ = [user.allocate(64) for _ in owners]
        async with asyncio.TaskGroup() as group:
            for owner, local in zip(owners, locals_, strict=True):
                token = filled(owner, 64).export("r")
                group.create_task(user.read(token, whole(64), into=local, deadline_s=soon()))
        assert all(local.view == pattern(64).data for local in locals_)
