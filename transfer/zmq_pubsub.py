"""One-to-many messages over ZeroMQ: PUB and ROUTER on one side, SUB and DEALER on the other.

Owns the sockets of one publisher or one subscription once ``ZmqNetwork`` has made, secured and
bound them. Knows no formats. The frames are those of plain ZeroMQ, so that other programs can
subscribe (SUB) and ask (REQ, or DEALER with or without the empty delimiter).

A PUB socket drops what a subscriber has no room for and tells nobody. So the first attempt to send
is made with ``XPUB_NODROP``, which refuses the message while *any* queue is full; then it is
counted, and sent again without: those that have room get it, the others lose it.

Answers to requests leave in bursts, a few in each turn of the loop, and wait where an asker takes
them slowly: the socket queues few, the rest is not made yet. Who takes none for ``REPLAY_STALL_S``
is given up, and finds out by its own timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from transfer.pubsub import Parts, PartsCallback, ReplaySource
from transfer.zmq_socket import LoopSocket

MAX_PUBLISHED_MESSAGES = 1024  # that one subscriber may be behind, before it loses some
MAX_REPLAYS = 64  # requests being answered at one time; one more goes unanswered
REPLAY_BURST = 64  # answers per turn of the loop
MAX_QUEUED_ANSWERS = 64  # to one asker, beside what the kernel's buffers hold
REPLAY_PAUSE_S = 0.005  # while no asker has room
REPLAY_STALL_S = 5.0


class _Replay:
    """The answers to one request: what is left of them, and when one was last taken."""

    def __init__(self, envelope: list[bytes], answers: Iterator[Parts], now_s: float) -> None:
        self.envelope = envelope
        self.answers = answers
        self.waiting: Parts | None = None  # made, and there was no room for it
        self.taken_s = now_s


class ZmqPublisher:
    """``transfer.pubsub.Publisher``. The sockets are bound."""

    def __init__(
        self,
        pub: zmq.Socket[Any],
        router: zmq.Socket[Any],
        replay: ReplaySource,
        *,
        addresses: tuple[str, str],
        on_closed: Callable[[ZmqPublisher], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pub = pub
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        self._router = LoopSocket(router, self._on_request, _nothing)
        self._replay = replay
        self._addresses = addresses
        self._on_closed = on_closed
        self._replays: dict[bytes, _Replay] = {}
        self._pumping = False
        self._closed = False
        self._num_dropped = 0
        self._num_requests = 0

    @property
    def address(self) -> str:
        return self._addresses[0]

    @property
    def replay_address(self) -> str:
        return self._addresses[1]

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def send(self, parts: Parts) -> None:
        """Give ``parts`` to every subscriber that has room; count it if one had none."""
        if self._closed:
            return
        try:
            self._pub.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            self._num_dropped += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(parts, zmq.NOBLOCK)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._replays.clear()
        self._router.close(linger_ms=0)
        self._pub.close(linger=0)
        self._on_closed(self)

    def _on_request(self, parts: list[bytes]) -> None:
        """``[asker, (empty,) request ...]``; an asker that asks again means the new request."""
        self._num_requests += 1
        asker = parts[0]
        if asker not in self._replays and len(self._replays) >= MAX_REPLAYS:
            return
        envelope = parts[: 2 if parts[1:2] == [b""] else 1]
        answers = self._replay(parts[len(envelope) :])
        self._replays[asker] = _Replay(envelope, answers, self._loop.time())
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send one burst, shared fairly by those who asked."""
        self._pumping = False
        share = max(1, REPLAY_BURST // max(1, len(self._replays)))
        for asker, replay in list(self._replays.items()):
            if not self._advance(replay, share):
                del self._replays[asker]
        if not self._replays:
            return
        self._pumping = True
        if all(replay.waiting is not None for replay in self._replays.values()):
            self._loop.call_later(REPLAY_PAUSE_S, self._pump)
        else:
            self._loop.call_soon(self._pump)

    def _advance(self, replay: _Replay, share: int) -> bool:
        """Send up to ``share`` answers; False when nothing more is to be sent."""
        for _ in range(share):
            parts = replay.waiting or next(replay.answers, None)
            if parts is None:
                return False
            try:
                self._router.send([*replay.envelope, *parts])
            except zmq.Again:
                replay.waiting = parts
                return self._loop.time() - replay.taken_s < REPLAY_STALL_S
            except zmq.ZMQError:  # it has gone: it asks again, or not
                return False
            replay.waiting = None
            replay.taken_s = self._loop.time()
        return True


class ZmqSubscription:
    """``transfer.pubsub.Subscription``. The sockets are connected."""

    def __init__(
        self,
        sub: zmq.Socket[Any],
        dealer: zmq.Socket[Any],
        *,
        on_message: PartsCallback,
        on_replay: PartsCallback,
        on_closed: Callable[[ZmqSubscription], None],
    ) -> None:
        self._on_replay = on_replay
        self._on_closed = on_closed
        self._closed = False
        self._sub = LoopSocket(sub, on_message, _nothing)
        self._dealer = LoopSocket(dealer, self._on_answer, _nothing)

    def ask(self, parts: Parts) -> None:
        try:
            self._dealer.send([b"", *parts])
        except zmq.Again:  # too much was asked that nobody answered: one more is no different
            return

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._sub.close(linger_ms=0)
        self._dealer.close(linger_ms=0)
        self._on_closed(self)

    def _on_answer(self, parts: list[bytes]) -> None:
        self._on_replay(parts[1:] if parts[:1] == [b""] else parts)


def _nothing() -> None:
    """Breaks are not news here: ZeroMQ connects again, and the numbers tell what was lost."""
