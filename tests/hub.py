"""One-to-many messages within one process: ``transfer.pubsub`` for fakes of a ``Network``.

A network of a test inherits ``HubNetwork`` and is given a ``Hub``, or has one of its own. Messages
are delivered in the next turn of the loop, in order; ``drops`` makes subscribers miss some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from transfer.errors import PeerUnreachable
from transfer.pubsub import Parts, PartsCallback, Publisher, ReplaySource, Subscription


class Hub:
    """The wire between publishers and subscribers."""

    def __init__(self) -> None:
        self.publishers: dict[str, HubPublisher] = {}
        self.subscriptions: list[HubSubscription] = []
        self.drops = 0  # messages that are lost from now on
        self.answers = True  # requests for old messages are answered
        self._numbers: Iterator[int] = iter(range(1_000_000))

    def address(self) -> str:
        return f"hub://{next(self._numbers)}"


class HubPublisher:
    """Keeps what it was given, in ``sent``."""

    def __init__(self, hub: Hub, replay: ReplaySource) -> None:
        self.address = hub.address()
        self.replay_address = hub.address()
        self.num_dropped = 0
        self.num_requests = 0
        self.sent: list[list[bytes]] = []
        self.replay = replay
        self._hub = hub
        hub.publishers[self.address] = hub.publishers[self.replay_address] = self

    def send(self, parts: Parts) -> None:
        self.sent.append(list(parts))
        if self._hub.drops:
            self._hub.drops -= 1
            self.num_dropped += 1
            return
        for subscription in self._hub.subscriptions:
            if subscription.address == self.address and parts[0].startswith(subscription.topic):
                subscription.deliver(subscription.on_message, parts)

    def close(self) -> None:
        for address in (self.address, self.replay_address):
            self._hub.publishers.pop(address, None)


class HubSubscription:
    def __init__(
        self,
        hub: Hub,
        addresses: tuple[str, str],
        topic: bytes,
        on_message: PartsCallback,
        on_replay: PartsCallback,
    ) -> None:
        self.address, self.replay_address = addresses
        self.topic = topic
        self.on_message = on_message
        self._on_replay = on_replay
        self._hub = hub
        hub.subscriptions.append(self)

    def deliver(self, callback: PartsCallback, parts: Parts) -> None:
        def arrive() -> None:
            if self in self._hub.subscriptions:
                callback(list(parts))

        asyncio.get_running_loop().call_soon(arrive)

    def ask(self, parts: Parts) -> None:
        publisher = self._hub.publishers.get(self.replay_address)
        if publisher is None:
            return
        publisher.num_requests += 1
        if self._hub.answers:
            for answer in publisher.replay(list(parts)):
                self.deliver(self._on_replay, answer)

    def close(self) -> None:
        if self in self._hub.subscriptions:
            self._hub.subscriptions.remove(self)


class HubNetwork:
    """The two methods of a ``Network`` that publish and subscribe."""

    def __init__(self, hub: Hub | None = None) -> None:
        self.hub = hub or Hub()

    def publisher(self) -> HubPublisher:
        """The first one."""
        return next(iter(self.hub.publishers.values()))

    def publish(self, bind: str, replay_bind: str, replay: ReplaySource) -> Publisher:
        return HubPublisher(self.hub, replay)

    def subscribe(
        self,
        address: str,
        replay_address: str,
        topic: bytes,
        *,
        on_message: PartsCallback,
        on_replay: PartsCallback,
    ) -> Subscription:
        if not address.startswith("hub://"):
            raise PeerUnreachable(f"cannot connect to {address!r}: expected hub://number")
        addresses = (address, replay_address)
        return HubSubscription(self.hub, addresses, topic, on_message, on_replay)
