"""Seats in the cluster, in virtual time: joining, losing the registry, coming back."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, SimNode, run_sim, seeds
from transfer.channel import Hello, Service
from transfer.errors import HelloRefused, PeerClosed, PeerLost, PeerUnreachable, RemoteFailed
from transfer.identity import Role
from transfer.kept_seat import first_failure
from transfer.membership import MembershipView, NodeInfo, NodeStatus, SeatTaken, Superseded
from transfer.registry import (
    GAUGE_INTERVAL_S,
    HEARTBEAT_S,
    LEASE_TTL_S,
    Answer,
    Heartbeat,
    Leave,
    Registry,
    RegistryService,
)
from transfer.registry_client import LocalMembership, RegistryMembership

BIND = "tcp://127.0.0.1:7000"
JOIN = "tcp://gateway:7000"
CALM = FaultPlan()


class Seat:
    """A node with a membership."""

    def __init__(
        self, cluster: SimCluster, name: str, *, role: Role = Role.PREFILL, **contract: str
    ) -> None:
        self.node: SimNode = cluster.node(name)
        identity = self.node.identity(role)
        self.status = NodeStatus()
        self.info = NodeInfo(identity=identity, address=f"sim://{name}:1", contract=contract)
        self.membership = RegistryMembership(self.node.network, JOIN, identity)

    async def join(self) -> None:
        await self.node.run(self.membership.join(self.info, lambda: self.status))

    def names(self) -> list[str]:
        return [member.node_id for member in self.membership.view.members]


async def start_gateway(cluster: SimCluster) -> tuple[Registry, LocalMembership]:
    node = cluster.node("gateway")
    service, registry = Service(), Registry()

    async def start() -> LocalMembership:
        RegistryService(registry, service)
        await node.network.listen(service, Hello(identity=node.identity(Role.GATEWAY)), BIND)
        return LocalMembership(registry)

    return registry, await node.run(start())


def simulate(
    body: Callable[[SimCluster], Coroutine[Any, Any, None]], plan: FaultPlan = CALM, seed: int = 1
) -> None:
    async def scenario(cluster: SimCluster) -> None:
        await body(cluster)
        cluster.crash_all()

    run_sim(scenario, seed, plan)


def test_members_see_each_other_and_leave_in_order() -> None:
    async def body(cluster: SimCluster) -> None:
        _, local = await start_gateway(cluster)
        a, b = Seat(cluster, "a"), Seat(cluster, "b")
        await a.join()
        await b.join()
        await cluster.until(lambda: a.names() == b.names() == ["a", "b"], timeout_s=0.1)
        assert a.membership.connected
        assert [m.node_id for m in local.view.members] == ["a", "b"]
        await a.node.run(a.membership.leave())
        await a.node.run(a.membership.leave())
        await cluster.until(lambda: b.names() == ["b"], timeout_s=0.1)
        assert not a.membership.connected

    simulate(body)


def test_a_crashed_member_is_gone_after_its_lease() -> None:
    async def body(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        a, b = Seat(cluster, "a"), Seat(cluster, "b")
        await a.join()
        await b.join()
        await asyncio.sleep(10)
        cluster.crash("a")
        await cluster.until(lambda: b.names() == ["b"], timeout_s=LEASE_TTL_S + 0.1)

    simulate(body)


@pytest.mark.parametrize("order", list(itertools.permutations(["gateway", "a", "b"])))
def test_nodes_start_in_any_order(order: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def body(cluster: SimCluster) -> None:
        seats = {name: Seat(cluster, name) for name in ("a", "b")}
        joining = []
        for name in order:
            if name == "gateway":
                await start_gateway(cluster)
            else:
                seat = seats[name]
                joining.append(
                    seat.node.spawn(seat.membership.join(seat.info, lambda: NodeStatus()))
                )
            await asyncio.sleep(12)
        await asyncio.wait_for(asyncio.gather(*joining), 3)
        for seat in seats.values():
            await cluster.until(lambda seat=seat: seat.names() == ["a", "b"], timeout_s=1)

    simulate(body)
    waits = [r.getMessage() for r in caplog.records if "waits for the registry" in r.getMessage()]
    num_early = order.index("gateway")
    assert num_early * 2 <= len(waits) <= num_early * 5, "says it, and not all the time"
    assert all("kvferry gateway --join-port 7000" in text for text in waits)


def test_a_restarted_registry_finds_its_members_again() -> None:
    async def body(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        seats = [Seat(cluster, name) for name in "abc"]
        for seat in seats:
            await seat.join()
        for _ in range(5):
            await asyncio.sleep(1)
            cluster.restart("gateway")
            await cluster.until(lambda: not seats[0].membership.connected, timeout_s=3)
            assert seats[0].names() == ["a", "b", "c"], "the last view stays"
            await asyncio.sleep(2)
            registry, _ = await start_gateway(cluster)
            await cluster.until(lambda r=registry: len(r.view(0).members) == 3, timeout_s=3)
            await cluster.until(
                lambda: all(s.membership.connected and len(s.names()) == 3 for s in seats),
                timeout_s=3,
            )

    simulate(body)


def test_a_mismatch_is_refused_at_once_with_both_sides() -> None:
    async def body(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        await Seat(cluster, "a", page_size="16").join()
        start_s = cluster.now_s
        with pytest.raises(HelloRefused) as refused:
            await Seat(cluster, "b", page_size="32").join()
        assert "page_size=16" in str(refused.value)
        assert "page_size=32" in str(refused.value)
        assert cluster.now_s - start_s < 0.1

    simulate(body)


def test_an_expired_node_registers_again_by_itself() -> None:
    async def body(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        a, b = Seat(cluster, "a"), Seat(cluster, "b")
        await a.join()
        await b.join()
        cluster.pause("a")
        await cluster.until(lambda: b.names() == ["b"], timeout_s=LEASE_TTL_S + 0.1)
        cluster.resume("a")
        await cluster.until(lambda: b.names() == ["a", "b"], timeout_s=4)
        cluster.partition(["a"], ["gateway"])
        await cluster.until(lambda: b.names() == ["b"], timeout_s=LEASE_TTL_S + 0.1)
        cluster.heal()
        await cluster.until(lambda: b.names() == ["a", "b"], timeout_s=4)

    simulate(body)


def test_a_stopped_registry_removes_nobody_when_it_wakes() -> None:
    async def body(cluster: SimCluster) -> None:
        registry, _ = await start_gateway(cluster)
        for name in "ab":
            await Seat(cluster, name).join()
        cluster.pause("gateway")
        await asyncio.sleep(10)
        cluster.resume("gateway")
        await asyncio.sleep(10)
        assert registry.num_expired == 0
        assert len(registry.view(0).members) == 2

    simulate(body)


def twin_of_a(cluster: SimCluster, name: str, address: str) -> Seat:
    """Another process, with the node id of "a"."""
    twin = Seat(cluster, name)
    twin.info = NodeInfo(identity=twin.node.identity(Role.PREFILL, "a"), address=address)
    twin.membership = RegistryMembership(twin.node.network, JOIN, twin.info.identity)
    return twin


def test_a_second_process_with_the_node_id_of_one_that_lives_is_refused() -> None:
    async def body(cluster: SimCluster) -> None:
        registry, _ = await start_gateway(cluster)
        first = Seat(cluster, "a")
        await first.join()
        stray = twin_of_a(cluster, "elsewhere", "sim://elsewhere:1")
        start_s = cluster.now_s
        with pytest.raises(SeatTaken) as refused:
            await stray.join()
        for part in ("node id a", "sim://a:1", first.info.identity.incarnation, "--node-id"):
            assert part in str(refused.value)
        assert cluster.now_s - start_s <= 2 * HEARTBEAT_S
        await asyncio.sleep(10)
        (member,) = registry.view(0).members
        assert member.info == first.info
        assert first.membership.connected
        assert not first.membership.superseded
        assert not stray.membership.alive

    simulate(body)


def test_a_process_killed_and_started_elsewhere_has_its_seat_when_its_lease_ends() -> None:
    async def body(cluster: SimCluster) -> None:
        registry, _ = await start_gateway(cluster)
        await Seat(cluster, "a").join()
        await asyncio.sleep(10)
        cluster.crash("a")
        again = twin_of_a(cluster, "elsewhere", "sim://elsewhere:1")
        start_s = cluster.now_s
        await again.join()
        assert cluster.now_s - start_s <= LEASE_TTL_S + 0.5
        assert [m.info for m in registry.view(0).members] == [again.info]

    simulate(body)


def test_a_process_started_again_at_its_address_has_its_seat_at_once() -> None:
    async def body(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        await Seat(cluster, "a").join()
        cluster.crash("a")
        start_s = cluster.now_s
        await twin_of_a(cluster, "elsewhere", "sim://a:1").join()
        assert cluster.now_s - start_s < 0.1

    simulate(body)


def test_a_process_waits_for_the_seat_of_one_that_drains() -> None:
    async def body(cluster: SimCluster) -> None:
        registry, _ = await start_gateway(cluster)
        old = Seat(cluster, "a")
        old.status = NodeStatus(draining=True)
        await old.join()
        new = twin_of_a(cluster, "elsewhere", "sim://elsewhere:1")
        joining = new.node.spawn(new.join())
        await asyncio.sleep(10)
        assert not joining.done()
        await old.node.run(old.membership.leave())
        await joining
        assert [m.info for m in registry.view(0).members] == [new.info]

    simulate(body)


def test_a_process_whose_seat_another_one_got_while_it_stood_still_does_not_take_it_back() -> None:
    async def body(cluster: SimCluster) -> None:
        registry, _ = await start_gateway(cluster)
        old = Seat(cluster, "a")
        await old.join()
        cluster.pause("a")
        new = twin_of_a(cluster, "elsewhere", "sim://elsewhere:1")
        await new.join()
        cluster.resume("a")
        await cluster.until(lambda: old.membership.superseded, timeout_s=10)
        assert [m.info for m in registry.view(0).members] == [new.info]
        assert new.membership.connected

    simulate(body)


def test_nobody_speaks_for_somebody_else() -> None:
    async def body(cluster: SimCluster) -> None:
        registry, _ = await start_gateway(cluster)
        await Seat(cluster, "a").join()
        (member,) = registry.view(0).members
        liar, victim = cluster.node("liar"), member.info.identity

        async def lie() -> None:
            channel = await liar.network.connect(
                JOIN, Hello(identity=liar.identity(Role.PREFILL)), deadline_s=cluster.now_s + 1
            )
            leave = Leave(node_id=victim.node_id, incarnation=victim.incarnation)
            beat = Heartbeat(
                node_id=victim.node_id, incarnation=victim.incarnation, status=NodeStatus()
            )
            for message in (leave, beat):
                with pytest.raises(RemoteFailed, match="liar speaks for a"):
                    await channel.request(message, Answer, deadline_s=cluster.now_s + 1)
            await channel.close()

        await liar.run(lie())
        assert len(registry.view(0).members) == 1

    simulate(body)


@pytest.mark.parametrize("end", ["leave", "abort"])
def test_a_join_that_waits_ends_when_the_seat_is_given_up(end: str) -> None:
    async def body(cluster: SimCluster) -> None:
        seat = Seat(cluster, "a")

        async def join_and_leave() -> None:
            joining = asyncio.ensure_future(seat.membership.join(seat.info, NodeStatus))
            await asyncio.sleep(1)
            if end == "leave":
                await seat.membership.leave()
            else:
                seat.membership.abort()
            with pytest.raises(PeerClosed):
                await joining

        await seat.node.run(join_and_leave())

    simulate(body)


def test_a_seat_whose_task_died_is_not_connected(caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        a, b = Seat(cluster, "a"), Seat(cluster, "b")
        await a.join()
        calls = itertools.count()

        def broken(view: MembershipView) -> None:
            if next(calls):
                raise RuntimeError("a subscriber that fails")  # not what ends a simulation

        a.membership.subscribe(broken)
        await b.join()
        await cluster.until(lambda: not a.membership.connected, timeout_s=1)
        assert "a is no longer a member" in caplog.text

    simulate(body)


def test_of_several_failures_the_one_is_told_that_says_most() -> None:
    broke, replaced = PeerLost("broke"), Superseded("replaced")
    for errors in ([broke, replaced], [replaced, broke], [broke, ExceptionGroup("", [replaced])]):
        assert first_failure(ExceptionGroup("", errors), Superseded) is replaced
    assert first_failure(ExceptionGroup("", [broke])) is broke


def test_gauges_travel_with_heartbeats_and_draining_is_seen() -> None:
    async def body(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        a, b = Seat(cluster, "a"), Seat(cluster, "b")
        await a.join()
        await b.join()
        views: list[MembershipView] = []
        b.membership.subscribe(views.append)
        start = len(views)
        for step in range(100):
            a.status = NodeStatus(gauges={"num_running": float(step)})
            await asyncio.sleep(0.1)
        assert 10 <= len(views) - start <= 10 / GAUGE_INTERVAL_S + 1
        a.status = NodeStatus(draining=True)
        await cluster.until(
            lambda: len(b.membership.view.with_role(Role.PREFILL)) == 1,
            timeout_s=HEARTBEAT_S + 0.1,
        )
        versions = [view.version for view in views[1:]]
        assert versions == sorted(set(versions))

    simulate(body)


def test_an_observer_watches_and_is_not_listed() -> None:
    async def body(cluster: SimCluster) -> None:
        observer = Seat(cluster, "status", role=Role.OBSERVER)
        with pytest.raises(PeerUnreachable, match="kvferry gateway --join-port 7000"):
            await observer.node.run(observer.membership.watch_only(deadline_s=cluster.now_s + 1))
        await start_gateway(cluster)
        await Seat(cluster, "a").join()
        observer = Seat(cluster, "status", role=Role.OBSERVER)
        await observer.node.run(observer.membership.watch_only())
        assert observer.names() == ["a"]
        await observer.node.run(observer.membership.leave())

    simulate(body)


def test_the_gateway_holds_a_seat_in_its_own_registry() -> None:
    async def body(cluster: SimCluster) -> None:
        registry, local = await start_gateway(cluster)
        node = cluster.node("gateway")
        views: list[MembershipView] = []
        node.call(local.subscribe, views.append)
        info = NodeInfo(identity=node.identity(Role.GATEWAY), address="sim://gateway:7000")
        await node.run(local.join(info, lambda: NodeStatus(gauges={"x": cluster.now_s})))
        a = Seat(cluster, "a")
        await a.join()
        await asyncio.sleep(10)
        assert a.names() == ["a", "gateway"]
        assert [m.node_id for m in views[-1].members] == ["a", "gateway"]
        assert views[-1].get(info.identity.node_id) is not None
        await node.run(local.leave())
        assert registry.num_expired == 0
        await cluster.until(lambda: a.names() == ["a"], timeout_s=0.1)

    simulate(body)


@pytest.mark.parametrize("seed", seeds(15))
def test_after_any_chaos_every_member_sees_every_member(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        await start_gateway(cluster)
        seats = [Seat(cluster, name) for name in "abcd"]

        def strike(cluster: SimCluster) -> None:
            name = cluster.rng.choice("abcd")
            strikes = [
                lambda: cluster.block(name, "gateway"),
                lambda: cluster.block("gateway", name),
                lambda: cluster.fabric.unblock_all(),
                lambda: cluster.pause(name),
                lambda: cluster.resume(name),
            ]
            cluster.rng.choice(strikes)()

        joins = [s.node.spawn(s.membership.join(s.info, lambda: NodeStatus())) for s in seats]
        async with cluster.chaos(strike, every_s=0.7):
            await asyncio.sleep(20)
            cluster.restart("gateway")
            await asyncio.sleep(1)
            await start_gateway(cluster)
            await asyncio.sleep(10)
        cluster.heal()
        await asyncio.gather(*joins)
        await cluster.until(lambda: all(s.names() == list("abcd") for s in seats), timeout_s=10)
        for seat in seats:
            await seat.node.run(seat.membership.leave())
        cluster.crash("gateway")

    run_sim(scenario, seed)
