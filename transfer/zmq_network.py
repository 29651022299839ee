"""Control channels over ZeroMQ: one ROUTER socket per listener, one DEALER per channel.

Owns sockets, their options and the translation of ZeroMQ's errors; also those of publishers and
subscriptions (``zmq_pubsub.py``). Knows no protocol: frames go to ``rpc.py`` and
``rpc_handlers.py``. Never blocks the loop: sends are non-blocking (a full queue
counts as a lost peer), names are resolved and connections made on ZeroMQ's own thread.

A broken connection is noticed at once: a DEALER's monitor reports it; a ROUTER's monitor makes
the listener send every client an empty frame, and those that have gone are refused by the socket
(``ROUTER_MANDATORY``). Silence without a break is noticed by the protocol's own liveness. However
often strangers connect and leave, clients are asked at most once every ``RECHECK_S``.

Security: only addresses of this machine are bound unless ``allow_remote``, which needs a secret.
With a ``secret``, CURVE encrypts every channel; the server's key pair is derived from the secret,
and CURVE never shows a server's public key, so only holders of the secret complete the handshake.
Who has not completed it within ``HANDSHAKE_LIMIT_MS`` is cut off. One bound is not ours to set:
ZeroMQ limits a frame, not the number of frames in one message that never ends, so a peer that
*has* completed it and speaks the wire protocol by hand can make this process buffer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket as stdlib_socket
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from transfer.channel import Channel, Hello, Listener, Service
from transfer.config import is_local_host
from transfer.decoding import Data
from transfer.errors import PeerClosed, PeerUnreachable
from transfer.identity import Identity
from transfer.loop_vigil import Answers, LoopVigil
from transfer.pubsub import PartsCallback, Publisher, ReplaySource, Subscription
from transfer.rpc import RpcChannel
from transfer.rpc_frames import MAX_CONNECTIONS, MAX_FRAME_NBYTES
from transfer.rpc_handlers import RpcServer
from transfer.zmq_pubsub import (
    MAX_PUBLISHED_MESSAGES,
    MAX_QUEUED_ANSWERS,
    ZmqPublisher,
    ZmqSubscription,
)
from transfer.zmq_socket import LoopSocket

logger = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 8192  # to one peer: all answers to MAX_OUTSTANDING requests, and as many again
MAX_UNREAD_FRAMES = 64  # of one peer, while the loop is busy; then its own queue fills
HANDSHAKE_LIMIT_MS = 5000  # for a connection to become one of ours
GOODBYE_LINGER_MS = 50  # how long an orderly close may still flush
RECONNECT_MS = 50  # while a listener is not up yet
RECONNECT_MAX_MS = 500
RECHECK_S = 0.05  # second look at a listener's clients after a break
LOCAL_SCHEMES = ("ipc", "inproc")


def _curve_keys(secret: str) -> tuple[bytes, bytes]:
    """Return the server's (public, secret) CURVE keys that belong to a cluster secret."""
    seed = hashlib.sha256(b"kvferry/curve/1\0" + secret.encode()).digest()
    server_secret = z85.encode(seed)
    return zmq.curve_public(server_secret), server_secret


def _is_local(address: str) -> bool:
    """True if ``address`` can only be reached from this machine."""
    parts = urlsplit(address)
    return parts.scheme in LOCAL_SCHEMES or is_local_host(parts.hostname or "")


def _outward_host() -> str:
    """Return this machine's address as others see it; sends nothing (a UDP connect only routes)."""
    with stdlib_socket.socket(stdlib_socket.AF_INET, stdlib_socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, never answered
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _bound_address(socket: zmq.Socket[Any]) -> tuple[str, str]:
    """Return the endpoint of a bound socket, as ZeroMQ names it and as others reach it."""
    endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    if urlsplit(endpoint).hostname == "0.0.0.0":
        return endpoint, endpoint.replace("0.0.0.0", _outward_host(), 1)
    return endpoint, endpoint


class _DealerWire:
    """The wire of one channel."""

    def __init__(
        self, socket: zmq.Socket[Any], hello: Hello, address: str, net: ZmqNetwork
    ) -> None:
        answers = Answers(net.vigil())
        self.channel = RpcChannel(
            hello, self, address, answers=answers, on_closed=net.forget_channel
        )
        self._socket = LoopSocket(socket, self._on_message, self._on_break, views=True)

    def send(self, frame: bytes) -> None:
        try:
            self._socket.send([frame])
        except zmq.ZMQError as error:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.channel.on_lost, f"cannot send: {error.strerror}")

    def close(self, *, flush: bool) -> None:
        self._socket.close(linger_ms=GOODBYE_LINGER_MS if flush else 0)

    def _on_message(self, parts: list[Data]) -> None:
        self.channel.on_frame(parts[-1])

    def _on_break(self) -> None:
        self.channel.on_lost("the connection broke")


class ZmqListener:
    """``transfer.channel.Listener`` at one ROUTER socket."""

    def __init__(
        self, socket: zmq.Socket[Any], service: Service, hello: Hello, net: ZmqNetwork
    ) -> None:
        self._network = net
        self._loop = asyncio.get_running_loop()
        self._raw = socket
        self._endpoint, self._address = _bound_address(socket)
        self.server = RpcServer(service, hello, self._send, on_call=net.vigil().arrived)
        self._socket = LoopSocket(socket, self._on_message, self._on_break, views=True)
        self._recheck: asyncio.TimerHandle | None = None
        self._broke = False  # since the clients were last asked
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    def _send(self, key: bytes, frame: bytes) -> None:
        try:
            self._socket.send([key, frame])
        except zmq.ZMQError as error:
            self._loop.call_soon(self.server.on_gone, key, f"cannot send: {error.strerror}")

    def _on_message(self, parts: list[Data]) -> None:
        if len(parts) == 2:
            self.server.on_frame(bytes(parts[0]), parts[1])
        else:
            self.server.counters["invalid"] += 1

    def _on_break(self) -> None:
        self._broke = True
        if self._recheck is None:
            self._probe()

    def _probe(self) -> None:
        """Ask now, and a second time: the socket may learn of a break a little later."""
        broke, self._broke = self._broke, False
        self._recheck = self._loop.call_later(RECHECK_S, self._probe) if broke else None
        self.server.probe()

    async def close(self) -> None:
        """Stop accepting, say goodbye, cancel handlers and await them; idempotent."""
        if not self._closed:
            self.server.shutdown()
            self._release_port()
        await self.server.close()
        self._release_socket(GOODBYE_LINGER_MS)

    def abort(self) -> None:
        """Stop at once; idempotent."""
        if not self._closed:
            self._release_port()
        self.server.abort()
        self._release_socket(0)

    def _release_socket(self, linger_ms: int) -> None:
        """Close the socket, then be forgotten: the network waits for every socket it forgot."""
        self._socket.close(linger_ms=linger_ms)
        self._network.forget_listener(self)

    def _release_port(self) -> None:
        self._closed = True
        if self._recheck is not None:
            self._recheck.cancel()
        self._raw.unbind(self._endpoint)  # before close, so that the port is free at once


class ZmqNetwork:
    """``transfer.channel.Network`` over ZeroMQ and TCP (or ``ipc://``).

    Args:
        allow_remote: permit to listen on addresses that other machines reach; needs ``secret``.
        secret: cluster secret; both sides of every channel need the same one.

    Raises:
        ValueError: ``allow_remote`` without a secret, or an empty secret.
    """

    def __init__(self, *, allow_remote: bool = False, secret: str | None = None) -> None:
        if secret == "":
            raise ValueError("the cluster secret is empty: set one, or pass None for this machine")
        if allow_remote and secret is None:
            raise ValueError(
                "refusing allow_remote without a cluster secret: everyone who reaches a listener "
                "could use it. Set secret, or listen on 127.0.0.1 only"
            )
        self._allow_remote = allow_remote
        self._curve = None if secret is None else _curve_keys(secret)
        self._context: zmq.Context[Any] | None = None
        self._channels: dict[RpcChannel, None] = {}
        self._listeners: dict[ZmqListener, None] = {}
        self._casts: dict[ZmqPublisher | ZmqSubscription, None] = {}
        self._vigil: LoopVigil | None = None
        self._closed = False

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        socket = self._bound_socket(zmq.ROUTER, bind)
        socket.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)  # unbind cuts connections: goodbye first
        listener = ZmqListener(socket, service, hello, self)
        self._listeners[listener] = None
        return listener

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        socket = self._connected_socket(zmq.DEALER, address)
        channel = _DealerWire(socket, hello, address, self).channel
        self._channels[channel] = None
        try:
            await channel.open(deadline_s)
        except BaseException:
            channel.abort()
            raise
        return channel

    def publish(self, bind: str, replay_bind: str, replay: ReplaySource) -> Publisher:
        pub = self._bound_socket(zmq.PUB, bind, MAX_PUBLISHED_MESSAGES)
        try:
            router = self._bound_socket(zmq.ROUTER, replay_bind, MAX_QUEUED_ANSWERS)
        except PeerUnreachable:
            pub.close(linger=0)
            raise
        addresses = (_bound_address(pub)[1], _bound_address(router)[1])
        forget = self._casts.pop
        publisher = ZmqPublisher(pub, router, replay, addresses=addresses, on_closed=forget)
        self._casts[publisher] = None
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
        sub = self._connected_socket(zmq.SUB, address)
        sub.setsockopt(zmq.SUBSCRIBE, topic)
        try:
            dealer = self._connected_socket(zmq.DEALER, replay_address)
        except PeerUnreachable:
            sub.close(linger=0)
            raise
        subscription = ZmqSubscription(
            sub, dealer, on_message=on_message, on_replay=on_replay, on_closed=self._casts.pop
        )
        self._casts[subscription] = None
        return subscription

    async def close(self) -> None:
        """Close every channel, listener, publisher and subscription; idempotent."""
        self._closed = True
        self._close_casts()
        for channel in list(self._channels):
            await channel.close()
        for listener in list(self._listeners):
            await listener.close()
        self._terminate()

    def abort(self) -> None:
        """Close everything at once, without goodbye; idempotent."""
        self._closed = True
        self._close_casts()
        for channel in list(self._channels):
            channel.abort()
        for listener in list(self._listeners):
            listener.abort()
        self._terminate()

    def renew(self, identity: Identity) -> None:
        """Answer to new channels as another incarnation of this process from now on."""
        for listener in self._listeners:
            listener.server.renew(identity)

    def vigil(self) -> LoopVigil:
        """What keeps this loop awake for all of this network's sockets."""
        if self._vigil is None:
            self._vigil = LoopVigil()
        return self._vigil

    def forget_channel(self, channel: RpcChannel) -> None:
        self._channels.pop(channel, None)

    def forget_listener(self, listener: ZmqListener) -> None:
        self._listeners.pop(listener, None)

    def _close_casts(self) -> None:
        for cast in list(self._casts):
            cast.close()

    def _terminate(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.term()  # all sockets are closed: waits for the goodbyes, at most their linger

    def _check_bind(self, bind: str) -> None:
        if self._allow_remote or _is_local(bind):
            return
        raise PeerUnreachable(
            f"will not listen at {bind}: it is reachable from other machines; bind to "
            "tcp://127.0.0.1:0, or set a cluster secret and allow remote peers"
        )

    def _bound_socket(
        self, kind: int, bind: str, max_queued: int = MAX_QUEUED_FRAMES
    ) -> zmq.Socket[Any]:
        """Return a new socket that listens at ``bind``; where there is a secret, as CURVE server.

        It queues up to ``max_queued`` messages for each peer.

        Raises:
            PeerUnreachable: the address is not allowed, or cannot be bound.
        """
        self._check_bind(bind)
        socket = self._socket(kind)
        socket.setsockopt(zmq.BACKLOG, min(MAX_CONNECTIONS, 1024))
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, max_queued)
        if self._curve is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve[1])
        try:
            socket.bind(bind)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise PeerUnreachable(
                f"cannot listen at {bind}: {error.strerror}; stop the process that holds the "
                "address or choose another one (port 0 takes a free port)"
            ) from error
        return socket

    def _connected_socket(self, kind: int, address: str) -> zmq.Socket[Any]:
        """Return a new socket that connects to ``address`` in the background, again and again."""
        socket = self._socket(kind)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if self._curve is not None:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._curve[0])
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise PeerUnreachable(
                f"cannot connect to {address!r}: {error.strerror}; expected tcp://host:port"
            ) from error
        return socket

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        if self._closed:
            raise PeerClosed("the network of this process is closed")
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
            self._context.set(zmq.MAX_SOCKETS, 2 * MAX_CONNECTIONS)
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_FRAMES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        return socket
