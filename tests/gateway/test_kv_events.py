"""Claims about following a node's KV events, in virtual time: what is asked, and how often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.events import (
    PROBE_PAUSE_MAX_S,
    PROBE_PAUSE_S,
    REPLAY_TIMEOUT_S,
    RESUBSCRIBE_PAUSE_MAX_S,
    RESUBSCRIBE_PAUSE_S,
    KvEventFollower,
)
from gateway.prefix_index import PrefixIndex
from kvstore.events import (
    EventCounters,
    KvEventLog,
    KvEventPublisher,
    KvSnapshotPart,
    WatchKvEvents,
)
from kvstore.page import PageKey
from tests.gateway.fakes import wait_for
from tests.hub import Hub, HubNetwork
from tests.sim.harness import SimCluster, run_sim
from transfer.channel import Caller, Hello, Service
from transfer.errors import (
    DeadlineExceeded,
    PeerClosed,
    PeerLost,
    PeerUnreachable,
    RemoteFailed,
)
from transfer.identity import Identity, NodeId, Role, new_identity
from transfer.interface import deadline_after
from transfer.zmq_network import ZmqNetwork

LOCAL = "tcp://127.0.0.1:0"
NODE = NodeId("a")
WATCH_S = 3600.0
CALM_S = 4 * PROBE_PAUSE_MAX_S  # long enough for every probe that is under way to end


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


class Node:
    """A node that publishes, and the channel to it."""

    def __init__(self, hub: Hub) -> None:
        self.peer: Identity = new_identity(Role.PREFILL, NODE)
        self.closed = False
        self.num_subscriptions = 0
        self.log = KvEventLog()
        self.events = KvEventPublisher(self.log)
        network = HubNetwork(hub)
        bind = "tcp://127.0.0.1:0"
        self.labels = self.events.open(network, self.peer, bind=bind, wall_clock=lambda: 0.0)

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.log.stored([key(number)], parent=None, tokens=bytes(64))
            self.events.flush()

    async def stream(self, message: Any, item: Any, *, deadline_s: float) -> AsyncIterator[Any]:
        self.num_subscriptions += 1
        parts: Any = self.events.watch(message, Caller(peer=self.peer, deadline_s=deadline_s))
        try:
            while True:
                left_s = deadline_s - asyncio.get_running_loop().time()
                yield await asyncio.wait_for(anext(parts), left_s)
        except TimeoutError:
            raise DeadlineExceeded("the subscription is over") from None
        finally:
            await parts.aclose()


class Bench:
    """One follower of one node, over a hub."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.node = Node(self.hub)
        self.index = PrefixIndex(1000)
        self.counters = EventCounters()

    def follow(self) -> asyncio.Task[None]:
        channel: Any = self.node
        follower = KvEventFollower(
            channel,
            HubNetwork(self.hub),
            self.node.labels,
            index=self.index,
            counters=self.counters,
            watch_s=WATCH_S,
        )
        return asyncio.get_running_loop().create_task(follower.run())

    def known(self) -> list[int]:
        return [n for n in range(1000) if self.index.match(NODE, [key(n)])]

    @property
    def asked(self) -> int:
        return next(iter(self.hub.publishers.values())).num_requests


def play(script: Callable[[Bench], AsyncIterator[float]], *, labels: bool = True) -> Bench:
    """Run ``script`` beside a follower; it yields how long to let virtual time pass."""
    benches: list[Bench] = []

    async def scenario(cluster: SimCluster) -> None:
        bench = Bench()
        benches.append(bench)
        if not labels:
            bench.node.labels = {}
            bench.node.store(1)
        task = bench.follow()
        await asyncio.sleep(0.01)
        async for seconds in script(bench):
            await asyncio.sleep(seconds)
        bench.node.closed = True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not bench.hub.subscriptions, "the subscription stays behind"

    run_sim(scenario, 1)
    return benches[0]


def test_events_reach_the_index() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        bench.node.store(1, 2)
        yield 0.01
        assert bench.known() == [1, 2]
        bench.node.log.removed([key(1)])
        bench.node.events.flush()
        yield 0.01
        assert bench.known() == [2]

    counters = play(script).counters
    assert (counters.num_batches, counters.num_gaps, counters.num_snapshots) == (3, 0, 1)


def test_a_gap_is_asked_for_once_and_takes_no_snapshot() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        yield CALM_S
        bench.node.store(1)
        bench.hub.drops = 3
        bench.node.store(2, 3, 4)
        asked = bench.asked
        bench.node.store(5, 6, 7)  # all of them show the gap before it is mended
        assert bench.asked == asked
        yield 0.01
        assert bench.known() == [1, 2, 3, 4, 5, 6, 7]
        assert bench.asked == asked + 1

    bench = play(script)
    assert (bench.counters.num_gaps, bench.counters.num_snapshots) == (1, 1)
    assert bench.node.num_subscriptions == 1


def test_the_loss_of_the_last_batch_is_noticed_though_nothing_follows() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        yield CALM_S
        bench.hub.drops = 1
        bench.node.store(1)
        yield 2 * PROBE_PAUSE_MAX_S
        assert bench.known() == [1]

    assert play(script).counters.num_snapshots == 1


def test_a_range_that_is_gone_brings_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.events.log.WINDOW_BATCHES_MAX", 4)

    async def script(bench: Bench) -> AsyncIterator[float]:
        yield CALM_S
        bench.hub.drops = 10
        bench.node.store(*range(11))
        yield 0.5
        assert bench.known() == list(range(11))
        bench.node.store(11)
        yield 0.01
        assert bench.known() == list(range(12))

    counters = play(script).counters
    assert (counters.num_gaps, counters.num_snapshots) == (1, 2)


def test_soon_after_every_snapshot_a_loss_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only after the first one: whatever broke may have broken the subscription too."""
    monkeypatch.setattr("kvstore.events.log.WINDOW_BATCHES_MAX", 4)

    async def script(bench: Bench) -> AsyncIterator[float]:
        yield CALM_S
        bench.hub.drops = 10
        bench.node.store(*range(11))
        while bench.counters.num_snapshots < 2:
            yield 0.01
        bench.hub.drops = 1
        bench.node.store(11)
        yield 2 * PROBE_PAUSE_S
        assert bench.known() == list(range(12))

    assert play(script).counters.num_gaps == 1


def test_a_replay_that_is_not_answered_brings_one_snapshot() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        yield CALM_S
        bench.hub.answers = False
        bench.hub.drops = 1
        bench.node.store(1, 2)
        yield REPLAY_TIMEOUT_S + 2 * RESUBSCRIBE_PAUSE_S
        assert bench.known() == [1, 2]
        assert bench.counters.num_snapshots == 2

    assert play(script).counters.num_gaps == 1


def test_a_publisher_that_answers_nothing_is_asked_less_and_less() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        bench.hub.answers = False
        yield 600.0

    bench = play(script)
    assert 600 / 35 <= bench.counters.num_unanswered <= 35
    assert bench.counters.num_snapshots == bench.counters.num_unanswered + 1


def test_what_is_no_batch_is_counted_and_mended_as_a_gap() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        yield CALM_S
        bench.node.store(1)
        (subscription,) = bench.hub.subscriptions
        for parts in ([], [b"kv@a@x"], [b"\xff", bytes(8), b"\xc1"], [b"kv@a@x", b"1", b""]):
            subscription.on_message(list(parts))
        yield 0.01
        bench.node.store(2)
        yield 0.01
        assert bench.known() == [1, 2]

    assert play(script).counters.num_invalid == 4


def test_another_life_on_the_same_addresses_forgets_what_the_old_one_held() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        bench.node.store(1, 2, 3)
        yield CALM_S
        assert bench.known() == [1, 2, 3]
        (subscription,) = bench.hub.subscriptions
        successor = Node(bench.hub)
        bench.node.events, bench.node.log = successor.events, successor.log
        subscription.address, subscription.replay_address = successor.labels.values()
        successor.store(9)  # number 0 again
        yield 0.0
        assert 1 not in bench.known()
        yield 0.5
        assert bench.known() == [9]

    counters = play(script).counters
    assert (counters.num_restarts, counters.num_snapshots) == (1, 2)


def test_a_node_without_a_publisher_is_known_by_its_snapshot() -> None:
    async def script(bench: Bench) -> AsyncIterator[float]:
        yield 60.0
        assert bench.known() == [1]
        bench.node.store(2)
        yield WATCH_S
        assert bench.known() == [1, 2]

    assert play(script, labels=False).counters.num_snapshots == 2


# ── snapshots that fail ─────────────────────────────────────────────────────────────────────────


class FailingChannel:
    """Every subscription gives a snapshot, holds for ``hold_s`` and fails, but for ``healthy``."""

    def __init__(self) -> None:
        self.peer = new_identity(Role.PREFILL, NODE)
        self.closed = False
        self.hold_s = 0.0
        self.num_subscriptions = 0
        self.healthy: set[int] = set()
        self.error: Exception = RemoteFailed("broken", "the event log is broken")

    async def stream(self, message: Any, item: Any, *, deadline_s: float) -> AsyncIterator[Any]:
        self.num_subscriptions += 1
        number = self.num_subscriptions
        yield KvSnapshotPart(epoch="e", next_seq=0, keys=b"", last=True)
        await asyncio.sleep(self.hold_s)
        if number not in self.healthy:
            raise self.error
        await asyncio.sleep(WATCH_S)


def follower_of(channel: Any) -> KvEventFollower:
    return KvEventFollower(
        channel,
        HubNetwork(),
        {},
        index=PrefixIndex(10),
        counters=EventCounters(),
        watch_s=WATCH_S,
    )


def watch_for(seconds: float, channel: FailingChannel) -> None:
    """Watch ``channel`` for so long in virtual time, then close it."""

    async def scenario(cluster: SimCluster) -> None:
        task = asyncio.get_running_loop().create_task(follower_of(channel).run())
        await asyncio.sleep(seconds)
        channel.closed = True
        closed_s = cluster.now_s
        with pytest.raises(PeerClosed):
            await task
        assert cluster.now_s - closed_s <= RESUBSCRIBE_PAUSE_S + channel.hold_s + 1e-6

    run_sim(scenario, 1)


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(r.name == "gateway.events" and r.levelno >= logging.WARNING for r in caplog.records)


def test_a_node_that_keeps_failing_is_logged_once_and_asked_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = FailingChannel()
    watch_for(100.0, channel)
    assert warnings(caplog) == 1
    assert 100 / RESUBSCRIBE_PAUSE_MAX_S <= channel.num_subscriptions <= 30


def test_a_failure_after_a_long_calm_is_a_streak_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = FailingChannel()
    channel.hold_s = 2 * RESUBSCRIBE_PAUSE_MAX_S
    watch_for(35.0, channel)
    assert warnings(caplog) == channel.num_subscriptions == 4


def test_a_channel_that_breaks_ends_the_following() -> None:
    async def scenario(cluster: SimCluster) -> None:
        channel = FailingChannel()
        channel.error = PeerLost("gone")
        with pytest.raises(PeerLost):
            await follower_of(channel).run()

    run_sim(scenario, 1)


# ── real sockets ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("secret", [None, "a secret of this cluster"])
async def test_over_zeromq_the_index_equals_the_cache_through_losses_and_a_restart(
    secret: str | None,
) -> None:
    def hello(role: Role) -> Hello:
        return Hello(identity=new_identity(role, NODE))

    def publish(*ports: int) -> tuple[KvEventPublisher, dict[str, str]]:
        events = KvEventPublisher(KvEventLog())
        identity = new_identity(Role.PREFILL, NODE)
        return events, events.open(theirs, identity, bind=LOCAL, ports=(ports[0], ports[1]))

    ours, theirs = ZmqNetwork(secret=secret), ZmqNetwork(secret=secret)
    events, labels = publish(0, 0)
    log, current = events.log, [events]
    service = Service()
    service.on_stream(WatchKvEvents, lambda message, caller: current[0].watch(message, caller))
    listener = await theirs.listen(service, hello(Role.PREFILL), LOCAL)
    channel = await ours.connect(
        listener.address, hello(Role.GATEWAY), deadline_s=deadline_after(20.0)
    )
    index, counters = PrefixIndex(1000), EventCounters()
    follower = KvEventFollower(
        channel, ours, labels, index=index, counters=counters, watch_s=WATCH_S
    )
    task = asyncio.create_task(follower.run())

    def holds(*numbers: int) -> bool:
        return index.num_pages(NODE) == index.match(NODE, [key(n) for n in numbers]) == len(numbers)

    try:
        await wait_for(lambda: index.in_sync(NODE), 20.0)
        log.stored([key(1)], parent=None, tokens=bytes(64))
        events.flush()
        await wait_for(lambda: holds(1), 20.0)
        log.stored([key(2)], parent=key(1), tokens=bytes(64))
        log.flush(0.0)  # numbered, and never sent
        log.stored([key(3)], parent=key(2), tokens=bytes(64))
        events.flush()
        await wait_for(lambda: holds(1, 2, 3), 20.0)
        assert counters.num_snapshots == 1
        events.close()
        ports = [int(address.rpartition(":")[2]) for address in labels.values()]
        async with asyncio.timeout(20):
            while current[0] is events:
                try:
                    current[0], _ = publish(*ports)
                except PeerUnreachable:  # ZeroMQ's thread gives the ports back
                    await asyncio.sleep(0.005)
        current[0].log.stored([key(9)], parent=None, tokens=bytes(64))
        current[0].flush()
        await wait_for(lambda: holds(9), 20.0)
        assert (counters.num_restarts, counters.num_snapshots) == (1, 2)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ours.close()
        await theirs.close()
