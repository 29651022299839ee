"""Claims about following a node's KV events when its handler fails, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.events import RESUBSCRIBE_PAUSE_MAX_S, RESUBSCRIBE_PAUSE_S, watch_kv_events
from gateway.prefix_index import PrefixIndex
from kvstore.events import KvEventBatch
from tests.sim.harness import SimCluster, run_sim
from transfer.errors import PeerClosed, RemoteFailed
from transfer.identity import NodeId

NODE = NodeId("a")
WATCH_S = 3600.0


class FailingChannel:
    """Every subscription gives a snapshot, holds for ``hold_s`` and fails, but for ``healthy``."""

    def __init__(self) -> None:
        self.closed = False
        self.hold_s = 0.0
        self.num_subscriptions = 0
        self.healthy: set[int] = set()

    async def stream(self, message: Any, item: Any, *, deadline_s: float) -> AsyncIterator[Any]:
        self.num_subscriptions += 1
        number = self.num_subscriptions
        yield KvEventBatch(seq=0, events=(), snapshot=True)
        await asyncio.sleep(self.hold_s)
        if number not in self.healthy:
            raise RemoteFailed("broken", "the event log is broken")


def watch_for(seconds: float, channel: FailingChannel) -> None:
    """Watch ``channel`` for so long in virtual time, then close it."""

    async def scenario(cluster: SimCluster) -> None:
        like_a_channel: Any = channel
        following = watch_kv_events(like_a_channel, PrefixIndex(10), NODE, WATCH_S)
        task = asyncio.get_running_loop().create_task(following)
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


def test_a_subscription_that_ends_well_ends_the_streak(caplog: pytest.LogCaptureFixture) -> None:
    channel = FailingChannel()
    channel.healthy = {4}
    watch_for(100.0, channel)
    assert warnings(caplog) == 2


def test_a_failure_after_a_long_calm_is_a_streak_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = FailingChannel()
    channel.hold_s = 2 * RESUBSCRIBE_PAUSE_MAX_S
    watch_for(35.0, channel)
    assert warnings(caplog) == channel.num_subscriptions == 4
