"""One-to-many messages between simulated nodes, over the seeded wire.

Owns the simulated ``transfer.pubsub``: a subscription takes effect after a delay and holds across
restarts of the publisher on the same address; messages are delayed, dropped, and lost when they
arrive corrupted (a real connection has checksums); the order is kept and nothing comes twice.
"""

from __future__ import annotations

import contextvars
import zlib
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from transfer.errors import PeerUnreachable
from transfer.pubsub import Parts, PartsCallback, ReplaySource

if TYPE_CHECKING:
    from tests.sim.network import SimNetwork

Place = tuple[str, int]


class _Link:
    """One direction between one publisher and one subscriber."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self.sent = count(1)
        self.last_arrived = 0


def _pack(link: _Link, parts: Parts) -> bytes:
    body = msgspec.msgpack.encode((next(link.sent), list(parts)))
    return zlib.crc32(body).to_bytes(4, "big") + body


def _unpack(link: _Link, frame: bytes) -> list[bytes] | None:
    """The parts; None for what a real connection would not have let through."""
    body = frame[4:]
    if zlib.crc32(body).to_bytes(4, "big") != frame[:4]:
        return None
    number, parts = msgspec.msgpack.decode(body, type=tuple[int, list[bytes]])
    if number <= link.last_arrived:
        return None
    link.last_arrived = number
    return parts


class SimPublisher:
    """``transfer.pubsub.Publisher`` of one life."""

    num_dropped = 0

    def __init__(self, network: SimNetwork, places: Sequence[Place], replay: ReplaySource) -> None:
        self.num_requests = 0
        self.life = network.life
        self._fabric = network.fabric
        self._places = list(places)
        self._replay = replay
        self._context = contextvars.copy_context()
        for place in self._places:
            if place in self._fabric.publishers:
                raise PeerUnreachable(f"cannot publish at {place}: address in use")
            self._fabric.publishers[place] = self

    @property
    def address(self) -> str:
        return "sim://{}:{}".format(*self._places[0])

    @property
    def replay_address(self) -> str:
        return "sim://{}:{}".format(*self._places[1])

    def send(self, parts: Parts) -> None:
        for subscription in self._fabric.subscriptions:
            subscription.offer(self._places[0], parts)

    def answer(self, subscription: SimSubscription, request: list[bytes]) -> None:
        """Called in the loop's context, as an I/O thread would."""
        self.num_requests += 1

        def answer() -> None:
            for parts in self._replay(request):
                subscription.answered(self._places[1], parts)

        self._fabric.loop.call_soon(answer, context=self._context)

    def close(self) -> None:
        for place in self._places:
            if self._fabric.publishers.get(place) is self:
                del self._fabric.publishers[place]


class SimSubscription:
    """``transfer.pubsub.Subscription`` of one life."""

    def __init__(
        self,
        network: SimNetwork,
        places: tuple[Place, Place],
        topic: bytes,
        on_message: PartsCallback,
        on_replay: PartsCallback,
    ) -> None:
        self._network = network
        self._fabric = network.fabric
        self._place, self._replay_place = places
        self._topic = topic
        self._on_message = on_message
        self._on_replay = on_replay
        self._context = contextvars.copy_context()
        self._live, self._up, self._down = _Link(), _Link(), _Link()
        self._closed = False
        self._fabric.after(self._live, self._subscribed)

    def _subscribed(self) -> None:
        if not self._closed:
            self._fabric.subscriptions.append(self)

    def offer(self, place: Place, parts: Parts) -> None:
        if place == self._place and parts[0].startswith(self._topic):
            frame = _pack(self._live, parts)
            self._fabric.carry(self._live, place[0], self._network.node, frame, self._arrive_live)

    def ask(self, parts: Parts) -> None:
        source, target = self._network.node, self._replay_place[0]
        frame = _pack(self._up, parts)
        self._fabric.carry(self._up, source, target, frame, self._arrive_request)

    def answered(self, place: Place, parts: Parts) -> None:
        frame = _pack(self._down, parts)
        self._fabric.carry(self._down, place[0], self._network.node, frame, self._arrive_answer)

    def close(self) -> None:
        self._closed = True
        if self in self._fabric.subscriptions:
            self._fabric.subscriptions.remove(self)

    def _arrive_request(self, frame: bytes) -> None:
        request = _unpack(self._up, frame)
        publisher = self._fabric.publishers.get(self._replay_place)
        if request is not None and publisher is not None and publisher.life.alive:
            publisher.answer(self, request)

    def _arrive_live(self, frame: bytes) -> None:
        self._hand_over(self._live, frame, self._on_message)

    def _arrive_answer(self, frame: bytes) -> None:
        self._hand_over(self._down, frame, self._on_replay)

    def _hand_over(self, link: _Link, frame: bytes, callback: PartsCallback) -> None:
        parts = _unpack(link, frame)
        if parts is None or self._closed or not self._network.life.alive:
            return

        def arrive() -> None:
            if not self._closed:
                callback(parts)

        self._fabric.loop.call_soon(arrive, context=self._context)


def place_of(address: str) -> Place:
    parts = urlsplit(address)
    if not parts.hostname or not parts.port:
        raise PeerUnreachable(f"cannot connect to {address!r}: expected sim://node:port")
    return parts.hostname, parts.port


def own_place(network: SimNetwork, bind: str) -> Place:
    return network.node, urlsplit(bind).port or network.fabric.free_port(network.node)
