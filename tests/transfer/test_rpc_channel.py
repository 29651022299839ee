"""The channel shell in virtual time: the contract suite, and everything that takes seconds."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, SimNode, run_sim, seeds
from tests.transfer.channel_contract import (
    ANY,
    CHECKS,
    Ask,
    Check,
    Count,
    Hang,
    TestService,
    Told,
    hello,
    soon,
)
from transfer.channel import LIVENESS_S, Channel, Listener
from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.identity import Role

CALM = FaultPlan(silent_crash=1.0)
LOUD = FaultPlan(silent_crash=0.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
@pytest.mark.parametrize("skew_s", [0.0, 1000.0])
def test_the_simulated_network_keeps_the_contract(check: Check, skew_s: float) -> None:
    async def scenario(cluster: SimCluster) -> None:
        node = cluster.node("a")
        await node.run(check(node.network, node.network))  # type: ignore[arg-type]
        await node.run(node.network.close())

    run_sim(scenario, 1, FaultPlan(clock_skew_s=skew_s))


class Pair:
    """A server node and a client node with one channel between them."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.server: SimNode = cluster.node("server")
        self.client: SimNode = cluster.node("client")
        self.listener: Listener
        self.channel: Channel
        self.service: TestService

    async def open(self) -> None:
        self.service = TestService()
        listening = self.server.network.listen(self.service, hello(Role.STORE), ANY)
        self.listener = await self.server.run(listening)
        self.channel = await self.client.run(self._connect())

    async def _connect(self) -> Channel:
        return await self.client.network.connect(
            self.listener.address, hello(Role.DECODE), deadline_s=soon()
        )

    def hang(self) -> asyncio.Task[BaseException | None]:
        """Start a request that never ends; the task returns the error it ended with."""

        async def call() -> BaseException | None:
            try:
                await self.channel.request(Hang(), Told, deadline_s=soon(600))
            except TransferError as error:
                return error
            return None

        return self.client.spawn(call())

    async def ask(self) -> str:
        async def call() -> str:
            return (await self.channel.request(Ask("x"), Told, deadline_s=soon())).text

        return await self.client.run(call())


def simulate(body: Any, plan: FaultPlan = CALM, seed: int = 1) -> None:
    async def scenario(cluster: SimCluster) -> None:
        pair = Pair(cluster)
        await pair.open()
        await body(pair, cluster)
        cluster.crash_all()

    run_sim(scenario, seed, plan)


def test_a_handler_that_takes_minutes_is_not_lost() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        task = pair.hang()
        await asyncio.sleep(300)
        assert not task.done()
        assert not pair.channel.closed

    simulate(body)


def test_an_idle_channel_sends_nothing_and_wakes_again() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        await pair.ask()
        await asyncio.sleep(5)
        before = cluster.trace.num_lines
        await asyncio.sleep(3600)
        assert cluster.trace.num_lines == before
        assert await pair.ask() == "x"

    simulate(body)


@pytest.mark.parametrize(
    ("source", "target"), [("client", "server"), ("server", "client"), ("both", "both")]
)
def test_a_silent_peer_is_lost_on_both_sides_within_the_limit(source: str, target: str) -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        task = pair.hang()
        await asyncio.sleep(10)
        if source == "both":
            cluster.partition(["client"], ["server"])
        else:
            cluster.block(source, target)
        start_s = cluster.now_s
        assert isinstance(await task, PeerLost)
        assert cluster.now_s - start_s <= LIVENESS_S + 0.05
        await cluster.until(pair.service.cancelled.is_set, timeout_s=LIVENESS_S + 0.05)
        assert pair.channel.closed

    simulate(body)


def test_a_reset_connection_is_noticed_at_once() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        task = pair.hang()
        await asyncio.sleep(1)
        start_s = cluster.now_s
        cluster.crash("server")
        assert isinstance(await task, PeerLost)
        assert cluster.now_s - start_s < 0.1

    simulate(body, LOUD)


def test_a_client_that_vanishes_has_its_handlers_cancelled() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        pair.hang()
        await cluster.until(pair.service.started.is_set, timeout_s=1)
        cluster.crash("client")
        await cluster.until(pair.service.cancelled.is_set, timeout_s=LIVENESS_S + 0.6)

    simulate(body)


def test_a_restarted_peer_fails_the_old_channel() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        port = int(pair.listener.address.rsplit(":", 1)[1])
        server = cluster.restart("server")
        listening = server.network.listen(
            TestService(), hello(Role.STORE), f"tcp://127.0.0.1:{port}"
        )
        await server.run(listening)
        with pytest.raises(PeerLost):
            await pair.ask()
        pair.channel = await pair.client.run(pair._connect())
        assert await pair.ask() == "x"

    simulate(body)


def test_a_stopped_server_is_lost_and_a_stopped_client_loses_nobody() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        task = pair.hang()
        await asyncio.sleep(1)
        cluster.pause("client")
        await asyncio.sleep(1.5)
        cluster.resume("client")
        await asyncio.sleep(5)
        assert not task.done(), "our own pause condemned a healthy peer"
        cluster.pause("server")
        start_s = cluster.now_s
        assert isinstance(await task, PeerLost)
        assert cluster.now_s - start_s <= LIVENESS_S + 0.05

    simulate(body)


def test_a_client_stopped_for_long_finds_its_channel_gone() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        task = pair.hang()
        await asyncio.sleep(1)
        cluster.pause("client")
        await cluster.until(pair.service.cancelled.is_set, timeout_s=LIVENESS_S + 0.6)
        await asyncio.sleep(10)
        cluster.resume("client")
        start_s = cluster.now_s
        assert isinstance(await task, PeerLost)
        assert cluster.now_s - start_s < 1.1

    simulate(body)


def test_closing_twice_and_aborting_afterwards_is_harmless() -> None:
    async def body(pair: Pair, cluster: SimCluster) -> None:
        await pair.client.run(pair.channel.close())
        pair.client.call(pair.channel.abort)
        await pair.client.run(pair.channel.close())
        with pytest.raises(PeerClosed):
            await pair.ask()
        await pair.server.run(pair.listener.close())
        await pair.server.run(pair.listener.close())

    simulate(body)


@pytest.mark.parametrize("seed", seeds(60))
def test_lossy_wires_never_give_wrong_or_repeated_answers(seed: int) -> None:
    """Against a naive model: every answer is the right one; every failure has a name and comes
    in time; no handler ever runs twice for one request."""
    runs: dict[str, int] = {}

    class Counting(TestService):
        async def tell(self, message: Ask, caller: Any) -> Told:
            runs[message.text] = runs.get(message.text, 0) + 1
            return await super().tell(message, caller)

    async def client(pair: Pair, cluster: SimCluster, number: int) -> None:
        channel: Channel | None = None
        for step in range(12):
            start_s = cluster.now_s
            text = f"{number}/{step}"
            num_items = cluster.rng.choice([0, 1, 70, 200])
            try:
                if channel is None or channel.closed:
                    channel = await pair._connect()
                told = await channel.request(Ask(text), Told, deadline_s=soon(5))
                assert told.text == text
                stream = channel.stream(Count(num_items), Told, deadline_s=soon(20))
                async with aclosing(stream) as items:
                    got = [told.text async for told in items]
                assert got == [str(n) for n in range(num_items)]
            except TransferError:
                assert cluster.now_s - start_s <= 30.5

    async def scenario(cluster: SimCluster) -> None:
        pair = Pair(cluster)
        pair.service = Counting()
        listening = pair.server.network.listen(pair.service, hello(Role.STORE), ANY)
        pair.listener = await pair.server.run(listening)
        tasks = [pair.client.spawn(client(pair, cluster, number)) for number in range(4)]
        await asyncio.gather(*tasks)
        cluster.heal()
        pair.channel = await pair.client.run(pair._connect())
        assert await pair.ask() == "x"
        del runs["x"]
        assert set(runs.values()) <= {1}, "a handler ran twice"
        server = pair.listener.server  # type: ignore[attr-defined]
        await cluster.until(lambda: server.num_running == 0, timeout_s=LIVENESS_S + 1)
        cluster.crash_all()

    run_sim(scenario, seed)
