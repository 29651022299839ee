"""Following one node's KV events: the shell around ``KvEventConsumer``.

Owns the subscription to the node's publisher, the stream that snapshots come by, and one timer.
Decides nothing about order: what arrives is fed to the consumer, and what it wants is asked for.
Knows no routing. Returns only by raising: when the channel breaks, the index keeps what it knows
until the link says otherwise.

::

    node ── PUB ──────▶ live batches ──▶ consumer ──wants a range──▶ replay socket ─┐
      │                                   ▲  ▲  │                                   │
      │                                   │  └──┼───────────────────────────────────┘
      └── channel ◀──── stream ◀──────────┼─────┘ wants a snapshot: subscribe again
                          └── snapshot ───┘

The timer asks for what follows when nothing was heard for a while: soon after a snapshot (the
subscription may not have been up yet), then less and less often; a publisher that does not answer
is not asked sooner for the snapshot that it costs. A node whose snapshots keep
failing is asked less and less often, and logged once: failures are one streak as long as no
subscription ends well or holds for ``RESUBSCRIBE_PAUSE_MAX_S``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import cast

from gateway.prefix_index import PrefixIndex
from kvstore.events import (
    EVENTS_LABEL,
    REPLAY_LABEL,
    EventCounters,
    KvEvent,
    KvEventConsumer,
    KvSnapshotPart,
    Want,
    WatchKvEvents,
)
from kvstore.events.wire import decode_batch, decode_seq, encode_seq, epoch_of, topic_of
from kvstore.page import PageKey
from transfer.channel import Channel, Network
from transfer.errors import DeadlineExceeded, FrameInvalid, PeerClosed, RemoteFailed
from transfer.identity import NodeId
from transfer.interface import deadline_after
from transfer.pubsub import Subscription

logger = logging.getLogger(__name__)

RESUBSCRIBE_PAUSE_S = 0.1  # also bounds what a node with a broken event log can cost us
RESUBSCRIBE_PAUSE_MAX_S = 5.0
PROBE_PAUSE_S = 0.1  # first look after a snapshot
PROBE_PAUSE_MAX_S = 5.0  # how long the loss of the very last batch stays unnoticed
REPLAY_TIMEOUT_S = 1.0  # without any answer
UNANSWERED_PAUSE_MAX_S = 30.0  # between looks at a publisher that does not answer them
SNAPSHOT_KEYS_MAX = 1 << 22  # of one node; what is beyond is not known of


class _IndexSink:
    """What the index knows of one node."""

    def __init__(self, index: PrefixIndex, node: NodeId) -> None:
        self._index = index
        self._node = node

    def replace(self, keys: Sequence[PageKey]) -> None:
        self._index.replace(self._node, keys)

    def apply(self, events: Sequence[KvEvent]) -> None:
        self._index.apply(self._node, events)

    def forget(self) -> None:
        self._index.unsync(self._node)


class KvEventFollower:
    """Keeps the index in step with one incarnation of one node.

    Args:
        labels: of the member; without the addresses of a publisher there are snapshots only.
        watch_s: length of one subscription before it is renewed.
    """

    def __init__(
        self,
        channel: Channel,
        network: Network,
        labels: Mapping[str, str],
        *,
        index: PrefixIndex,
        counters: EventCounters,
        watch_s: float,
    ) -> None:
        self._channel = channel
        self._network = network
        self._node = channel.peer.node_id
        self._addresses = labels.get(EVENTS_LABEL), labels.get(REPLAY_LABEL)
        self._counters = counters
        self._consumer = KvEventConsumer(_IndexSink(index, self._node), counters)
        self._watch_s = watch_s
        self._loop = asyncio.get_running_loop()
        self._subscription: Subscription | None = None
        self._snapshot_wanted = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._probe_pause_s = PROBE_PAUSE_S
        self._tag = 0
        self._asking = False
        self._answers = True  # the publisher answered the last request, as far as is known

    async def run(self) -> None:
        """Follow until the channel closes.

        Raises:
            TransferError: the channel broke or was closed, or the labels name no addresses.
        """
        events, replay = self._addresses
        if events is not None and replay is not None:
            topic = topic_of(self._node, "")
            self._subscription = self._network.subscribe(
                events, replay, topic, on_message=self._on_live, on_replay=self._on_replay
            )
        try:
            await self._subscribe_for_ever()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._subscription is not None:
                self._subscription.close()

    # ── snapshots: the stream on the channel ────────────────────────────────────────────────────

    async def _subscribe_for_ever(self) -> None:
        pause_s: float | None = None  # None: no streak of failures
        while not self._channel.closed:
            opened_s = self._loop.time()
            failure = await self._subscribe_once()
            if failure is None or self._loop.time() - opened_s >= RESUBSCRIBE_PAUSE_MAX_S:
                pause_s = None
            if failure is not None:
                self._consumer.lost()
                if pause_s is None:
                    logger.warning("KV events of %s fail, trying on: %s", self._node, failure)
            await self._pause(pause_s or RESUBSCRIBE_PAUSE_S)
            if failure is not None:
                pause_s = min(2 * (pause_s or RESUBSCRIBE_PAUSE_S), RESUBSCRIBE_PAUSE_MAX_S)
        raise PeerClosed(f"channel to {self._node} is closed")

    async def _pause(self, pause_s: float) -> None:
        """Sleep in short pieces: a channel that closes meanwhile is opened again without delay."""
        end_s = self._loop.time() + pause_s
        while not self._channel.closed and self._loop.time() < end_s:  # noqa: ASYNC110 - no event
            await asyncio.sleep(min(end_s - self._loop.time(), RESUBSCRIBE_PAUSE_S))

    async def _subscribe_once(self) -> RemoteFailed | FrameInvalid | None:
        """Take a snapshot and stay until another is wanted; return why the node failed it."""
        deadline_s = deadline_after(self._watch_s)
        stream = self._channel.stream(WatchKvEvents(), KvSnapshotPart, deadline_s=deadline_s)
        try:
            async with aclosing(cast("AsyncGenerator[KvSnapshotPart, None]", stream)) as parts:
                await self._take_snapshot(parts)
                await self._stay(parts)
        except DeadlineExceeded:
            pass  # the subscription was renewed in time; a dead peer raises PeerLost instead
        except (RemoteFailed, FrameInvalid) as error:
            return error
        return None

    async def _take_snapshot(self, parts: AsyncGenerator[KvSnapshotPart, None]) -> None:
        keys: list[PageKey] = []
        async for part in parts:
            if len(keys) < SNAPSHOT_KEYS_MAX:
                keys += part.unpacked()
            if part.last:
                self._snapshot_wanted.clear()
                if self._answers:
                    self._probe_pause_s = PROBE_PAUSE_S
                self._consumer.snapshot(part.epoch, part.next_seq, keys)
                self._act()
                return
        raise FrameInvalid("the snapshot ended before its last part")

    async def _stay(self, parts: AsyncGenerator[KvSnapshotPart, None]) -> None:
        """Return when the consumer wants another snapshot; raise what ends the stream."""
        more = asyncio.ensure_future(anext(parts, None))
        wanted = asyncio.ensure_future(self._snapshot_wanted.wait())
        try:
            await asyncio.wait([more, wanted], return_when=asyncio.FIRST_COMPLETED)
            if more.done() and not wanted.done():
                more.result()
                raise FrameInvalid("the stream of a snapshot went on, or ended")
        finally:
            for future in (more, wanted):
                future.cancel()
            await asyncio.gather(more, wanted, return_exceptions=True)

    # ── events: the subscription ────────────────────────────────────────────────────────────────

    def _on_live(self, parts: list[bytes]) -> None:
        if not self._asking:
            self._heard_s = self._loop.time()
        try:
            topic, raw_seq, payload = parts
            seq = decode_seq(raw_seq)
            if seq is None:
                raise FrameInvalid("a batch without a number")
            epoch, events = epoch_of(topic), decode_batch(payload)
        except (ValueError, FrameInvalid) as error:
            self._invalid(error)
            return
        self._consumer.live(epoch, seq, events)
        self._act()

    def _on_replay(self, parts: list[bytes]) -> None:
        try:
            raw_seq, payload, epoch, tag = parts
            seq = decode_seq(raw_seq)
            events = decode_batch(payload) if seq is not None else []
        except (ValueError, FrameInvalid) as error:
            self._invalid(error)
            return
        if not self._asking or tag != encode_seq(self._tag):
            return  # of a request that was given up
        self._heard_s = self._loop.time()
        self._answers = True
        if seq is None:
            self._consumer.replay_ended(epoch.decode(errors="replace"))
            self._asking = False
            self._set_timer(None)
            self._probe_pause_s = min(2 * self._probe_pause_s, PROBE_PAUSE_MAX_S)
        else:
            self._consumer.replayed(epoch.decode(errors="replace"), seq, events)
        self._act()

    def _invalid(self, error: Exception) -> None:
        """Not of the format: as good as lost, hence a gap that shows."""
        self._counters.num_invalid += 1
        logger.debug("KV events of %s: %s", self._node, error)

    # ── what is to be done ──────────────────────────────────────────────────────────────────────

    def _act(self) -> None:
        """Ask for what the consumer wants now, once; see that the timer runs."""
        match self._consumer.want:
            case Want.REPLAY:
                if not self._asking:
                    self._ask()
            case Want.SNAPSHOT:
                self._asking = False
                self._set_timer(None)
                self._snapshot_wanted.set()
            case Want.NOTHING:
                if self._asking or self._timer is None:
                    self._asking = False
                    self._set_timer(self._probe_pause_s)

    def _ask(self) -> None:
        if self._subscription is None:
            return
        self._asking = True
        self._tag += 1
        self._heard_s = self._loop.time()
        self._set_timer(REPLAY_TIMEOUT_S)
        self._subscription.ask([encode_seq(self._consumer.next_seq), encode_seq(self._tag)])

    def _set_timer(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if delay_s is not None and self._subscription is not None:
            self._timer = self._loop.call_later(delay_s, self._on_timer, delay_s)

    def _on_timer(self, delay_s: float) -> None:
        """Something was heard meanwhile: wait on from then. Otherwise probe, or give up waiting."""
        self._timer = None
        left_s = self._heard_s + delay_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_timer, delay_s)
        elif self._asking:
            self._probe_pause_s = min(2 * self._probe_pause_s, UNANSWERED_PAUSE_MAX_S)
            self._answers = False
            self._consumer.unanswered()
            self._act()
        else:
            self._consumer.probe()
            self._act()
