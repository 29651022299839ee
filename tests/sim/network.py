"""Control channels between simulated nodes: the real protocol core over a seeded wire.

Owns ``SimFabric`` (the one wire of a simulation: delays, faults, partitions, who listens where)
and ``SimNetwork`` (what one life of one node holds; implements ``transfer.channel.Network``).
Knows nothing of what the frames say.

A wire behaves like TCP with losses: the order on one channel and direction is kept; frames may be
dropped, corrupted, or repeated (a repetition may come late). ``block`` cuts one direction of a
link. Any ``bind`` address works; the node's own address is ``sim://NODE:PORT``.
"""

from __future__ import annotations

import contextvars
import math
import random
from collections.abc import Callable
from urllib.parse import urlsplit

from tests.sim.faults import FaultPlan, Trace
from tests.sim.loop import CURRENT_LIFE, Life, SimLoop
from tests.sim.pubsub import SimPublisher, SimSubscription, own_place, place_of
from transfer.channel import Channel, Hello, Listener, Service
from transfer.errors import PeerClosed, PeerUnreachable
from transfer.pubsub import PartsCallback, Publisher, ReplaySource, Subscription
from transfer.rpc import RpcChannel
from transfer.rpc_handlers import RpcServer

FIRST_FREE_PORT = 40_000
FIFO_GAP_S = 1e-9
LATE_DUPLICATE_S = 0.05

Place = tuple[str, int]  # node name, port


def life_context(life: Life) -> contextvars.Context:
    """Return a context in which everything belongs to ``life``."""
    context = contextvars.copy_context()
    context.run(CURRENT_LIFE.set, life)
    return context


class SimFabric:
    """The world between the nodes."""

    def __init__(self, loop: SimLoop, rng: random.Random, plan: FaultPlan, trace: Trace) -> None:
        self.loop = loop
        self.rng = rng
        self.plan = plan
        self.trace = trace
        self.checkers: list[Callable[[], None]] = []
        self.check_every = 1  # of so many deliveries and pieces, one is followed by the checkers
        self._num_arrived = 0
        self.listeners: dict[Place, SimListener] = {}
        self.wires: dict[bytes, _ClientWire] = {}
        self.publishers: dict[Place, SimPublisher] = {}
        self.subscriptions: list[SimSubscription] = []
        self.bulk_limits: dict[str, float] = {}  # bytes per second by node
        self._blocked: dict[tuple[str, str], None] = {}
        self._next_port: dict[str, int] = {}
        self._next_key = 0
        self._nowhere = contextvars.Context()  # of what happens between the nodes

    def block(self, source: str, target: str) -> None:
        """Drop everything from ``source`` to ``target``, silently."""
        self._blocked[source, target] = None

    def unblock(self, source: str, target: str) -> None:
        self._blocked.pop((source, target), None)

    def is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self._blocked

    def unblock_all(self) -> None:
        self._blocked.clear()

    def bulk_bytes_per_s(self, source: str, target: str) -> float:
        """Speed of bulk transfers between two nodes: the slowest part of the way."""
        limits = (self.bulk_limits.get(node, math.inf) for node in (source, target))
        return min(self.plan.bulk_bytes_per_s, *limits)

    def delay_s(self) -> float:
        return self.plan.delay_s_min + self.rng.expovariate(1 / self.plan.delay_s_mean)

    def free_port(self, node: str) -> int:
        port = self._next_port.get(node, FIRST_FREE_PORT)
        self._next_port[node] = port + 1
        return port

    def next_key(self, node: str) -> bytes:
        self._next_key += 1
        return f"{node}#{self._next_key}".encode()

    def arrived(self) -> None:
        """Something got to its place; the checkers run behind who takes it."""
        self._num_arrived += 1
        if not self._num_arrived % self.check_every:
            self.loop.call_soon(self._run_checkers, context=self._nowhere)

    def _run_checkers(self) -> None:
        for checker in self.checkers:
            checker()

    def after(self, link: _Link, callback: Callable[[], None]) -> None:
        """Call ``callback`` after a delay, behind everything that travels on ``link``."""
        link.last_s = max(self.loop.now_s + self.delay_s(), link.last_s + FIFO_GAP_S)
        self.loop.call_at_true_time(link.last_s, callback, context=contextvars.Context())

    def carry(
        self, link: _Link, source: str, target: str, frame: bytes, arrive: Callable[[bytes], None]
    ) -> None:
        """Take a frame; ``arrive`` is called for each copy that gets through."""
        at_s = max(self.loop.now_s + self.delay_s(), link.last_s + FIFO_GAP_S)
        link.last_s = at_s
        self._schedule(at_s, source, target, frame, arrive)
        if self.rng.random() < self.plan.duplicate:
            late_s = at_s + self.rng.uniform(0.0, LATE_DUPLICATE_S)
            self._schedule(late_s, source, target, frame, arrive)

    def _schedule(
        self,
        at_s: float,
        source: str,
        target: str,
        frame: bytes,
        arrive: Callable[[bytes], None],
    ) -> None:
        dropped = self.rng.random() < self.plan.drop
        if self.rng.random() < self.plan.corrupt:
            index = self.rng.randrange(len(frame))
            flipped = frame[index] ^ (1 << self.rng.randrange(8))
            frame = frame[:index] + bytes([flipped]) + frame[index + 1 :]

        def deliver() -> None:
            lost = dropped or self.is_blocked(source, target)
            what = "drop" if lost else "deliver"
            self.trace.add(self.loop.now_s, f"{what} {source}>{target}", frame)
            if not lost:
                arrive(frame)  # schedules the receiver
                self.arrived()

        self.loop.call_at_true_time(at_s, deliver, context=self._nowhere)

    def cut_off(self, life: Life, *, silent: bool) -> None:
        """A process has died. Unless ``silent``, its peers' connections are reset a little later.

        Frames that it had already sent still arrive.
        """
        for place, listener in list(self.listeners.items()):
            if listener.life is life:
                del self.listeners[place]
        for publisher in list(self.publishers.values()):
            if publisher.life is life:
                publisher.close()
        if silent:
            return
        for wire in list(self.wires.values()):
            if wire.life is life:
                wire.reset_server()
            elif wire.server_life is life:
                wire.reset_client()


class _Link:
    """One direction of one channel."""

    def __init__(self) -> None:
        self.last_s = 0.0


class _ClientWire:
    """The wire of one channel; both directions."""

    def __init__(self, network: SimNetwork, place: Place, hello: Hello, address: str) -> None:
        self.life = network.life
        self.key = network.fabric.next_key(network.node)
        self.server_life: Life | None = None
        self._node = network.node
        self._fabric = network.fabric
        self._place = place
        self._up = _Link()
        self._down = _Link()
        self._context = life_context(network.life)
        self.channel = RpcChannel(hello, self, address, on_closed=network.forget_channel)
        self._fabric.wires[self.key] = self

    def send(self, frame: bytes) -> None:
        if self.life.alive:
            self._fabric.carry(self._up, self._node, self._place[0], frame, self._arrive_up)

    def _arrive_up(self, frame: bytes) -> None:
        listener = self._fabric.listeners.get(self._place)
        if listener is None:
            return
        if self.server_life is not None and listener.life is not self.server_life:
            self.reset_client()  # a connection does not survive the process at its far end
            return
        self.server_life = listener.life
        listener.receive(self, frame)

    def send_down(self, source: str, frame: bytes) -> None:
        self._fabric.carry(self._down, source, self._node, frame, self._arrive_down)

    def _arrive_down(self, frame: bytes) -> None:
        if self.life.alive:
            self._fabric.loop.call_soon(self.channel.on_frame, frame, context=self._context)

    def reset_client(self) -> None:
        """Tell the client, after a delay and behind what was sent, that the connection broke."""

        def arrive() -> None:
            if self.life.alive and not self._fabric.is_blocked(self._place[0], self._node):
                loop = self._fabric.loop
                loop.call_soon(self.channel.on_lost, "connection reset", context=self._context)

        self._fabric.after(self._down, arrive)

    def reset_server(self) -> None:
        """Tell the server, after a delay and behind what was sent, that the connection broke."""

        def arrive() -> None:
            listener = self._fabric.listeners.get(self._place)
            blocked = self._fabric.is_blocked(self._node, self._place[0])
            if listener is not None and listener.life is self.server_life and not blocked:
                listener.reset(self.key)

        self._fabric.after(self._up, arrive)

    def close(self, *, flush: bool) -> None:
        if self._fabric.wires.pop(self.key, None) is not None and self.life.alive:
            self.reset_server()


class SimListener:
    """``transfer.channel.Listener`` of one life at one port."""

    def __init__(self, network: SimNetwork, place: Place, service: Service, hello: Hello) -> None:
        self.life = network.life
        self._network = network
        self._fabric = network.fabric
        self._place = place
        self._context = life_context(network.life)
        self._wires: dict[bytes, _ClientWire] = {}
        self.server = RpcServer(service, hello, self._send)

    @property
    def address(self) -> str:
        return f"sim://{self._place[0]}:{self._place[1]}"

    def receive(self, wire: _ClientWire, frame: bytes) -> None:
        self._wires[wire.key] = wire
        loop = self._fabric.loop
        loop.call_soon(self.server.on_frame, wire.key, frame, context=self._context)

    def reset(self, key: bytes) -> None:
        loop = self._fabric.loop
        loop.call_soon(self.server.on_gone, key, "connection reset", context=self._context)

    def _send(self, key: bytes, frame: bytes) -> None:
        if self.life.alive and key in self._wires:
            self._wires[key].send_down(self._place[0], frame)

    async def close(self) -> None:
        self._fabric.listeners.pop(self._place, None)
        self._network.forget_listener(self)
        await self.server.close()
        self._reset_clients()

    def abort(self) -> None:
        self._fabric.listeners.pop(self._place, None)
        self._network.forget_listener(self)
        self.server.abort()
        self._reset_clients()

    def _reset_clients(self) -> None:
        if self.life.alive:
            for wire in self._wires.values():
                wire.reset_client()
        self._wires.clear()


class SimNetwork:
    """``transfer.channel.Network`` of one life of one node."""

    def __init__(self, fabric: SimFabric, node: str, life: Life) -> None:
        self.fabric = fabric
        self.node = node
        self.life = life
        self._channels: dict[RpcChannel, None] = {}
        self._listeners: dict[SimListener, None] = {}
        self._casts: list[SimPublisher | SimSubscription] = []
        self._closed = False

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        self._check_open()
        port = urlsplit(bind).port or self.fabric.free_port(self.node)
        place = (self.node, port)
        if place in self.fabric.listeners:
            raise PeerUnreachable(f"cannot listen at {bind}: address in use; choose another port")
        listener = SimListener(self, place, service, hello)
        self.fabric.listeners[place] = listener
        self._listeners[listener] = None
        return listener

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        self._check_open()
        parts = urlsplit(address)
        if not parts.hostname or not parts.port:
            raise PeerUnreachable(f"cannot connect to {address!r}: expected sim://node:port")
        host = self.node if parts.hostname in {"127.0.0.1", "localhost"} else parts.hostname
        channel = _ClientWire(self, (host, parts.port), hello, address).channel
        self._channels[channel] = None
        try:
            await channel.open(deadline_s)
        except BaseException:
            channel.abort()
            raise
        return channel

    def publish(self, bind: str, replay_bind: str, replay: ReplaySource) -> Publisher:
        self._check_open()
        places = [own_place(self, bind), own_place(self, replay_bind)]
        publisher = SimPublisher(self, places, replay)
        self._casts.append(publisher)
        return publisher

    def subscribe(
        self,
        address: str,
        replay_address: str,
        topic: bytes,
        *,
        on_message: PartsCallback,
        on_replay: PartsCallback,
    ) -> Subscription:
        self._check_open()
        places = place_of(address), place_of(replay_address)
        subscription = SimSubscription(self, places, topic, on_message, on_replay)
        self._casts.append(subscription)
        return subscription

    async def close(self) -> None:
        self._closed = True
        self._close_casts()
        for channel in list(self._channels):
            await channel.close()
        for listener in list(self._listeners):
            await listener.close()

    def abort(self) -> None:
        self._closed = True
        self._close_casts()
        for channel in list(self._channels):
            channel.abort()
        for listener in list(self._listeners):
            listener.abort()

    def _close_casts(self) -> None:
        for cast in self._casts:
            cast.close()
        self._casts.clear()

    def forget_channel(self, channel: RpcChannel) -> None:
        self._channels.pop(channel, None)

    def forget_listener(self, listener: SimListener) -> None:
        self._listeners.pop(listener, None)

    def _check_open(self) -> None:
        if self._closed or not self.life.alive:
            raise PeerClosed("the network of this process is closed")
        assert CURRENT_LIFE.get() is self.life, "use node.run(...) or node.spawn(...)"
