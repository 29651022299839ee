"""A node's KV events on the network: the thin shell around ``KvEventLog``.

Owns the publisher's sockets (through ``transfer.pubsub``), the answers to replay requests and the
snapshots for subscribers. ``flush`` never waits: a subscriber that stalls loses messages, which is
counted, and slows nobody.

Replay requests are vLLM's, ``[start]``, answered by ``[seq, payload]`` and at the end
``[-1, empty]``. One with a second part, ``[start, tag]``, comes from a consumer of ours: its
answers go on with the epoch and the tag, so that it can tell another life and another request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

from kvstore.events.control import KvSnapshotPart, WatchKvEvents
from kvstore.events.log import KvEventLog
from kvstore.events.wire import END_OF_REPLAY, decode_seq, encode_seq, topic_of
from transfer.channel import Caller, Network
from transfer.errors import FrameInvalid, RemoteFailed
from transfer.identity import Identity
from transfer.pubsub import Parts, Publisher

WATCHERS_MAX = 64
FLUSH_BATCHES = 2  # encoded in one turn of the loop: about a millisecond
TAG_NBYTES_MAX = 16
EVENTS_LABEL = "kv_events"  # of a member: where it publishes
REPLAY_LABEL = "kv_events_replay"  # where it answers requests for old batches


def beside(bind: str, port: int) -> str:
    """Return ``bind`` with another port of the same host."""
    if urlsplit(bind).port is None:
        return bind
    return f"{bind.rsplit(':', 1)[0]}:{port}"


class KvEventPublisher:
    """Publishes one log. ``open`` it when the node starts, ``flush`` it once per step."""

    def __init__(self, log: KvEventLog) -> None:
        self.log = log
        self.num_batches = 0
        self.num_snapshots = 0
        self.num_invalid = 0
        self._identity: Identity | None = None
        self._topic = b""
        self._clock: Callable[[], float] | None = None
        self._publisher: Publisher | None = None
        self._num_watchers = 0
        self._flushing = False  # the rest is sent in the next turn of the loop
        self._closed = False

    def open(
        self,
        network: Network,
        identity: Identity,
        *,
        bind: str,
        ports: tuple[int, int] = (0, 0),
        wall_clock: Callable[[], float] | None = None,
    ) -> dict[str, str]:
        """Publish on the host of ``bind``; return the labels that say where.

        ``ports`` are those of events and of replay; 0 takes a free one. The epoch is the identity's
        incarnation. ``wall_clock`` gives the time that batches carry; by default the loop's clock
        does.

        Raises:
            PeerUnreachable: a port of that host cannot be bound.
        """
        assert self._publisher is None, "opened twice"
        own, replay = (beside(bind, port) for port in ports)
        self.renew(identity)
        self._clock = wall_clock or asyncio.get_running_loop().time
        self._publisher = network.publish(own, replay, self._replay)
        return {
            EVENTS_LABEL: self._publisher.address,
            REPLAY_LABEL: self._publisher.replay_address,
        }

    def flush(self) -> None:
        """Send what the log has gained, much of it in several turns of the loop.

        Never waits for anybody.
        """
        if self._publisher is None or self._clock is None or self._closed:
            return
        for batch in self.log.flush(self._clock(), FLUSH_BATCHES):
            self.num_batches += 1
            self._publisher.send([self._topic, encode_seq(batch.seq), batch.payload])
        if self.log.pending and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush_on)

    def _flush_on(self) -> None:
        self._flushing = False
        self.flush()

    def renew(self, identity: Identity) -> None:
        """Go on as another incarnation: another epoch, on the same addresses."""
        self._identity = identity
        self._topic = topic_of(identity.node_id, identity.incarnation)

    def close(self) -> None:
        """Stop at once; idempotent."""
        self._closed = True
        if self._publisher is not None:
            self._publisher.close()

    @property
    def num_watchers(self) -> int:
        return self._num_watchers

    def counters(self) -> dict[str, int]:
        """What there is to count, by name without ``num_``."""
        publisher = self._publisher
        return {
            "event_batches": self.num_batches,
            "event_drops": publisher.num_dropped if publisher else 0,
            "event_overflows": self.log.num_overflows,
            "event_replays": publisher.num_requests if publisher else 0,
            "event_snapshots": self.num_snapshots,
        }

    async def watch(self, message: WatchKvEvents, caller: Caller) -> AsyncIterator[KvSnapshotPart]:
        """Yield a snapshot, then nothing until the caller leaves."""
        assert self._identity is not None, "open() first"
        if self._num_watchers >= WATCHERS_MAX:
            raise RemoteFailed("overloaded", f"{WATCHERS_MAX} subscribers watch this node already")
        self._num_watchers += 1
        self.num_snapshots += 1
        try:
            self.flush()
            epoch, next_seq = self._identity.incarnation, self.log.next_seq
            for packed in self.log.snapshot():
                yield KvSnapshotPart(epoch=epoch, next_seq=next_seq, keys=packed, last=False)
            yield KvSnapshotPart(epoch=epoch, next_seq=next_seq, keys=b"", last=True)
            await asyncio.get_running_loop().create_future()
        finally:
            self._num_watchers -= 1

    def _replay(self, request: list[bytes]) -> Iterator[Parts]:
        """Answer one request; nothing at all when it makes no sense."""
        assert self._identity is not None
        try:
            start = decode_seq(request[0]) if request else None
        except FrameInvalid:
            start = None
        tag = request[1:2]
        if start is None or len(request) > 2 or any(len(t) > TAG_NBYTES_MAX for t in tag):
            self.num_invalid += 1
            return
        ours = [self._identity.incarnation.encode(), *tag] if tag else []
        for batch in self.log.replay(start):
            yield [encode_seq(batch.seq), batch.payload, *ours]
        yield [END_OF_REPLAY, b"", *ours]
