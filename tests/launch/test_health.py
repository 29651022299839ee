"""A dead service thread or task shows: at the gateway in ``/health``, at nodes by their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from engine.fake import FakeRunner
from launch import runtime
from launch.config import GatewayOptions, NodeOptions, StoreOptions
from launch.errors import ConfigError, LaunchError, StartError
from launch.gateway_role import GatewayRole
from launch.node_role import NodeRole, NodeRoleName
from launch.store_role import StoreRole

pytestmark = pytest.mark.net

SEEN_WITHIN_S = 5.0


@asynccontextmanager
async def gateway() -> AsyncIterator[Any]:
    """A gateway in this process. What a test broke in it, it closes all the same."""
    options = GatewayOptions.of(model="fake", port=0)
    role = GatewayRole(options)
    await role.start()
    try:
        yield role
    finally:
        await role.close()


def join_of(role: Any) -> str:
    return str(role._seat.join_url)


async def health_of(client: httpx.AsyncClient) -> tuple[int, dict[str, bool]]:
    response = await client.get("/health")
    return response.status_code, response.json()["checks"]


async def kill_listener(role: Any) -> None:
    role._seat.listener.abort()


async def kill_registry_service(role: Any) -> None:
    role._seat._service.close()


async def kill_heartbeat(role: Any) -> None:
    role._seat.membership.abort()


async def kill_probe(role: Any) -> None:
    role._seat._health.abort()


KILLS = [
    (kill_listener, "listener"),
    (kill_registry_service, "listener"),
    (kill_probe, "listener"),
    (kill_heartbeat, "membership"),
]


@pytest.mark.parametrize(("kill", "check"), KILLS)
async def test_a_dead_service_of_the_gateway_turns_health_red(
    kill: Callable[[Any], Any], check: str
) -> None:
    async with gateway() as role, httpx.AsyncClient(base_url=role.url) as client:
        status, checks = await health_of(client)
        assert (status, all(checks.values())) == (200, True)
        assert set(checks) == {"dispatcher", "listener", "registry", "membership"}
        await kill(role)
        async with asyncio.timeout(SEEN_WITHIN_S):
            while (await health_of(client))[0] == 200:  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.05)
        status, checks = await health_of(client)
        assert status == 503
        assert not checks[check]


async def kill_step_loop(role: Any) -> None:
    role._node._loop._task.cancel()


async def kill_store_timer(role: Any) -> None:
    role._node._ticker.cancel()


async def kill_transfer_thread(role: Any) -> None:
    io = role._parts.transfer._io
    io.loop.call_soon_threadsafe(io.loop.stop)


async def kill_seat(role: Any) -> None:
    while not role._parts.membership.connected:  # noqa: ASYNC110 - it is listed before it knows
        await asyncio.sleep(0.01)
    role._parts.membership._outside._task.cancel()


def node_role(name: NodeRoleName, join: str, node_id: str | None = None) -> Any:
    options = NodeOptions.of(model="fake", join=join, node_id=node_id)
    return NodeRole(name, options, FakeRunner(num_pages=16))


def store_role(join: str, node_id: str | None = None) -> Any:
    return StoreRole(StoreOptions.of(join=join, segment="16MiB", node_id=node_id))


NODES = [
    (lambda join: node_role("prefill", join), kill_step_loop, "step loop"),
    (lambda join: node_role("decode", join), kill_step_loop, "step loop"),
    (lambda join: node_role("decode", join), kill_transfer_thread, "I/O thread"),
    (lambda join: node_role("decode", join), kill_seat, "seat"),
    (store_role, kill_store_timer, "timer"),
    (store_role, kill_transfer_thread, "I/O thread"),
]


@pytest.mark.parametrize(("make", "kill", "why"), NODES)
async def test_a_node_process_ends_when_a_part_of_it_died(
    make: Callable[[str], Any], kill: Callable[[Any], Any], why: str
) -> None:
    """The whole life of a role process, but for the process: it raises, hence ends non-zero."""
    async with gateway() as door:
        role = make(join_of(door))
        life = asyncio.create_task(runtime._serve(role, 1.0))
        nodes = door._seat.membership
        async with asyncio.timeout(10):
            while len(nodes.view.members) < 2:  # noqa: ASYNC110 - a view has no event
                await asyncio.sleep(0.01)
        await kill(role)
        async with asyncio.timeout(SEEN_WITHIN_S):
            with pytest.raises(StartError, match=why):
                await life


TWINS = [lambda join: node_role("decode", join, node_id="twin"), lambda j: store_role(j, "twin")]


@pytest.mark.parametrize("make", TWINS)
async def test_a_process_whose_node_id_a_living_one_has_ends_for_good(
    make: Callable[[str], Any],
) -> None:
    async with gateway() as door:
        first, second = make(join_of(door)), make(join_of(door))
        await first.start()
        try:
            async with asyncio.timeout(SEEN_WITHIN_S):
                with pytest.raises(ConfigError, match="node id twin is taken: the process at tcp:"):
                    await runtime._serve(second, 1.0)
            member = door._seat.membership.view.get(first._parts.identity.node_id)
            assert member.info.identity == first._parts.identity, "the first one stays"
            assert not first._parts.membership.superseded
        finally:
            await first.close()


class _Stuck:
    """A role that fails, and whose orderly close waits for something dead."""

    def __init__(self) -> None:
        self.aborted = False

    async def start(self) -> None: ...

    async def failed(self) -> LaunchError:
        return await runtime.broken({"a part died": lambda: False})

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None:
        await asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        self.aborted = True


async def test_a_failed_role_that_does_not_close_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "FAILED_CLOSE_S", 0.05)
    role = _Stuck()
    async with asyncio.timeout(2):
        with pytest.raises(StartError, match="a part died"):
            await runtime._serve(role, 1.0)
    assert role.aborted
