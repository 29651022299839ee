"""Claims about publishers and subscriptions over ZeroMQ: who gets what, who waits for nobody."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from transfer.errors import PeerClosed, PeerUnreachable
from transfer.pubsub import Parts
from transfer.zmq_network import ZmqNetwork
from transfer.zmq_pubsub import MAX_PUBLISHED_MESSAGES, MAX_REPLAYS, ZmqPublisher

BIND = "tcp://127.0.0.1:0"
SECRET = "a secret of this cluster"


def echo_three(request: list[bytes]) -> Iterator[Parts]:
    for number in range(3):
        yield [b"%d" % number, *request]


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - sockets of other threads have no event
            await asyncio.sleep(0.002)
    assert condition(), what


class Listening:
    """A subscription, and what came by it."""

    def __init__(self, network: ZmqNetwork, publisher: Any, topic: bytes = b"") -> None:
        self.topic = topic
        self.messages: list[list[bytes]] = []
        self.answers: list[list[bytes]] = []
        self.subscription = network.subscribe(
            publisher.address,
            publisher.replay_address,
            topic,
            on_message=self.messages.append,
            on_replay=self.answers.append,
        )

    async def connected(self, publisher: Any) -> None:
        """Publish until something arrives: nothing else tells that a subscription has begun."""
        async with asyncio.timeout(20):
            while not self.messages:
                publisher.send([self.topic + b"hello", b""])
                await asyncio.sleep(0.005)

    def heard(self) -> list[list[bytes]]:
        """What came, but for what ``connected`` sent: some of that may come late."""
        return [parts for parts in self.messages if not parts[0].endswith(b"hello")]


@asynccontextmanager
async def networks(
    *secrets: str | None,
) -> AsyncIterator[list[ZmqNetwork]]:
    nets = [ZmqNetwork(secret=secret) for secret in secrets]
    try:
        yield nets
    finally:
        for net in nets:
            await net.close()


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_subscribers_get_what_is_published_in_order_and_by_topic(secret: str | None) -> None:
    async with networks(secret, secret) as (one, two):
        publisher = one.publish(BIND, BIND, echo_three)
        every = Listening(two, publisher)
        some = Listening(two, publisher, b"kv@a@")
        await every.connected(publisher)
        await some.connected(publisher)
        sent = [[b"kv@%s@e" % (b"ab"[n % 2 : n % 2 + 1]), b"%d" % n, b"x"] for n in range(200)]
        for parts in sent:
            publisher.send(parts)
            await asyncio.sleep(0)
        publisher.send([b"end"])
        await until(lambda: every.messages[-1:] == [[b"end"]], "all arrived")
        assert every.heard() == [*sent, [b"end"]]
        await until(lambda: some.heard()[-1:] == [sent[-2]], "its own")
        assert some.heard() == [parts for parts in sent if parts[0] == b"kv@a@e"]
        assert publisher.num_dropped == 0


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_a_request_is_answered_by_many_messages(secret: str | None) -> None:
    async with networks(secret, secret) as (one, two):
        publisher = one.publish(BIND, BIND, echo_three)
        asker = Listening(two, publisher)
        asker.subscription.ask([b"from", b"tag"])
        await until(lambda: len(asker.answers) == 3, "three answers")
        assert asker.answers == [[b"%d" % n, b"from", b"tag"] for n in range(3)]
        assert publisher.num_requests == 1


async def test_without_the_secret_nothing_is_heard_and_nothing_is_answered() -> None:
    async with networks(SECRET, "another secret", None) as (one, two, three):
        publisher = one.publish(BIND, BIND, echo_three)
        strangers = [Listening(net, publisher) for net in (two, three)]
        friend = Listening(one, publisher)
        await friend.connected(publisher)
        for listening in [*strangers, friend]:
            listening.subscription.ask([b"q"])
        publisher.send([b"kv", b"secret"])
        await until(lambda: len(friend.answers) == 3, "the friend is answered")
        await until(lambda: [b"kv", b"secret"] in friend.messages, "and hears")
        assert [s.messages + s.answers for s in strangers] == [[], []]
        assert publisher.num_requests == 1


class FullSocket:
    """A PUB socket whose queue to one subscriber is full, and empties never."""

    def __init__(self) -> None:
        self.nodrop = 1
        self.sent: list[list[bytes]] = []

    def setsockopt(self, option: int, value: int) -> None:
        assert option == zmq.XPUB_NODROP
        self.nodrop = value

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK, "a send that may wait"
        if self.nodrop:
            raise zmq.Again
        self.sent.append(parts)

    def close(self, linger: int) -> None: ...


async def test_every_send_is_one_that_cannot_wait_and_a_full_queue_is_counted() -> None:
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    full: Any = FullSocket()
    publisher = ZmqPublisher(
        full, router, echo_three, addresses=("a", "b"), on_closed=lambda _: None
    )
    for number in range(3):
        publisher.send([b"%d" % number])
        assert full.nodrop == 1
    assert publisher.num_dropped == 3
    assert full.sent == [[b"0"], [b"1"], [b"2"]], "those that have room get it all the same"
    publisher.close()
    publisher.send([b"late"])
    assert len(full.sent) == 3
    context.term()


@pytest.mark.net
async def test_a_subscriber_that_reads_nothing_takes_nothing_from_the_others() -> None:
    """It falls a queue's length behind, whatever the buffers of the kernel hold."""
    async with networks(None, None) as (one, two):
        publisher = one.publish(BIND, BIND, echo_three)
        context: zmq.Context[Any] = zmq.Context()
        stalled = context.socket(zmq.SUB)
        stalled.setsockopt(zmq.RCVHWM, 1)
        stalled.setsockopt(zmq.RCVBUF, 4096)
        stalled.setsockopt(zmq.SUBSCRIBE, b"")
        stalled.connect(publisher.address)
        reader = Listening(two, publisher, b"kv")
        async with asyncio.timeout(20):
            while not stalled.poll(0):
                publisher.send([b"hello"])
                await asyncio.sleep(0.005)
            while not reader.messages:
                publisher.send([b"kv", b"", b""])
                await asyncio.sleep(0.005)
        numbers: list[bytes] = []
        while not publisher.num_dropped:
            numbers.append(b"%d" % len(numbers))
            publisher.send([b"kv", numbers[-1], bytes(16_384)])
            await until(lambda: reader.messages[-1][1] == numbers[-1], "the reader has it")
            assert len(numbers) < 100 * MAX_PUBLISHED_MESSAGES, "nothing is ever dropped"
        assert [m[1] for m in reader.messages if m[1]] == numbers, "the reader lost something"
        stalled.close(linger=0)
        context.term()


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
async def test_programs_with_plain_sockets_can_subscribe_and_ask(kind: int) -> None:
    async with networks(None) as (one,):
        publisher = one.publish(BIND, BIND, echo_three)
        context = zmq.asyncio.Context()
        sub, ask = context.socket(zmq.SUB), context.socket(kind)
        sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        sub.connect(publisher.address)
        ask.connect(publisher.replay_address)
        await ask.send(b"start")
        expected = [[b"0", b"start"], [b"1", b"start"], [b"2", b"start"]]
        async with asyncio.timeout(20):
            answers = [await ask.recv_multipart() for _ in range(1 if kind == zmq.REQ else 3)]
            while not await sub.poll(5):
                publisher.send([b"kv@a@e", b"1", b"payload"])
            assert await sub.recv_multipart() == [b"kv@a@e", b"1", b"payload"]
        assert answers == expected[: len(answers)]
        for socket in (sub, ask):
            socket.close(linger=0)
        context.term()


async def test_long_replays_are_shared_fairly_and_bounded_in_number() -> None:
    def source(request: list[bytes]) -> Iterator[Parts]:
        return itertools.repeat([b"more"]) if request == [b"endless"] else echo_three(request)

    async with networks(None, None) as (one, two):
        publisher = one.publish(BIND, BIND, source)
        assert isinstance(publisher, ZmqPublisher)
        running = publisher._replays
        greedy = [Listening(two, publisher) for _ in range(MAX_REPLAYS - 1)]
        for listening in greedy:
            listening.subscription.ask([b"endless"])
        await until(lambda: len(running) == MAX_REPLAYS - 1, "all endless replays run")
        other = Listening(two, publisher)
        other.subscription.ask([b"short"])
        await until(lambda: len(other.answers) == 3, "another one is answered meanwhile")
        await until(lambda: all(listening.answers for listening in greedy), "none is starved")
        late = [Listening(two, publisher) for _ in range(3)]
        for listening in late:
            listening.subscription.ask([b"endless"])
        await until(lambda: publisher.num_requests == MAX_REPLAYS + 3, "all have asked")
        assert len(running) == MAX_REPLAYS, "there was room for one"
        for listening in [*greedy, *late]:
            listening.subscription.close()
        await until(lambda: not running, "a replay ends when its asker has gone")


async def test_answers_to_an_asker_that_does_not_read_are_not_made_and_none_is_missing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbytes, num_made = 16_384, 0

    def source(request: list[bytes]) -> Iterator[Parts]:
        nonlocal num_made
        for number in itertools.count():
            num_made += 1
            yield [b"%d" % number, bytes(nbytes)]

    async with networks(None) as (one,):
        publisher = one.publish(BIND, BIND, source)
        assert isinstance(publisher, ZmqPublisher)
        context: zmq.Context[Any] = zmq.Context()
        slow = context.socket(zmq.DEALER)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.RCVBUF, 4096)
        slow.connect(publisher.replay_address)
        slow.send(b"everything")
        replays = publisher._replays
        await until(lambda: any(r.waiting is not None for r in replays.values()), "it is full")
        assert num_made * nbytes < 32 << 20, "more than the queue and the kernel's buffers hold"
        for number in range(num_made + 100):
            await until(lambda: bool(slow.poll(0)), "it goes on")
            assert slow.recv_multipart()[0] == b"%d" % number
        monkeypatch.setattr("transfer.zmq_pubsub.REPLAY_STALL_S", 0.05)
        await until(lambda: not replays, "who takes nothing is given up")
        slow.close(linger=0)
        context.term()


async def test_a_subscription_outlives_the_publisher_and_finds_the_next_one() -> None:
    async with networks(None, None) as (one, two):
        first = one.publish(BIND, BIND, echo_three)
        listening = Listening(two, first)
        await listening.connected(first)
        address, replay_address = first.address, first.replay_address
        first.close()
        first.close()
        second: Any = None
        async with asyncio.timeout(20):
            while second is None:
                try:
                    second = one.publish(address, replay_address, echo_three)
                except PeerUnreachable:  # the port is given back by ZeroMQ's thread
                    await asyncio.sleep(0.005)
        await listening.connected(second)
        async with asyncio.timeout(20):
            while not listening.answers:  # what is asked on the old connection is lost
                listening.subscription.ask([b"q"])
                await asyncio.sleep(0.05)
        await until(lambda: len(listening.answers) >= 3, "the next one answers in full")


async def test_addresses_beyond_this_machine_and_taken_ones_are_refused_with_the_remedy() -> None:
    async with networks(None) as (one,):
        with pytest.raises(PeerUnreachable, match="secret"):
            one.publish("tcp://0.0.0.0:0", BIND, echo_three)
        publisher = one.publish(BIND, BIND, echo_three)
        with pytest.raises(PeerUnreachable, match="choose another"):
            one.publish(BIND, publisher.address, echo_three)
        with pytest.raises(PeerUnreachable, match="cannot connect"):
            Listening(one, type("Nowhere", (), {"address": "nowhere", "replay_address": ""}))


async def test_a_closed_network_has_closed_its_publishers_and_subscriptions() -> None:
    one = ZmqNetwork()
    publisher = one.publish(BIND, BIND, echo_three)
    listening = Listening(one, publisher)
    await one.close()
    publisher.send([b"late"])
    listening.subscription.ask([b"late"])
    with pytest.raises(PeerClosed):
        one.publish(BIND, BIND, echo_three)
