"""The control-message contract: typed request/reply and typed streams between two peers.

Owns the interfaces (``Network``, ``Listener``, ``Channel``) and the handler table (``Service``).
One-to-many messages, which a ``Network`` carries as well, are ``transfer/pubsub.py``'s. Knows no
pages, tokens or sockets: ``transfer/zmq_network.py`` carries channels over ZeroMQ, the simulator
over a seeded in-memory network; both run the same protocol (``transfer/rpc*.py``).

Guarantees, on every implementation:

* A request is answered at most once, or raises a ``TransferError`` by its deadline.
* The items of a stream arrive in order, without gaps or repeats, or the stream raises.
* Leaving a stream early (``aclose`` or cancellation) or cancelling a request cancels the handler
  on the peer. A peer that dies or falls silent raises ``PeerLost`` within ``LIVENESS_S``; a peer
  that is merely busy (a handler that takes a minute) does not.
* Messages are msgspec structs. A frame that does not decode is counted and dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec

from transfer.identity import Identity
from transfer.pubsub import PartsCallback, Publisher, ReplaySource, Subscription

PROTOCOL_VERSION = 2  # 2: LATER, and seats that are taken
PING_INTERVAL_S = 0.5  # while anything is outstanding on a channel
LIVENESS_S = 2.0  # silence after which a peer counts as lost

MAX_FACTS = 64  # of one kind that a peer may state of itself; all others keep them

FactName = Annotated[str, msgspec.Meta(max_length=128)]
FactValue = Annotated[str, msgspec.Meta(max_length=1024)]
Facts = Annotated[dict[FactName, FactValue], msgspec.Meta(max_length=MAX_FACTS)]

M = TypeVar("M", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First frame on every channel, in both directions.

    ``contract`` holds facts that must agree where both sides state them (page spec, model
    fingerprint, ...); a difference raises ``HelloRefused`` that prints both sides.
    """

    identity: Identity
    protocol: int = PROTOCOL_VERSION
    contract: Facts = {}


class Caller(NamedTuple):
    """What a handler knows of the request it serves."""

    peer: Identity
    deadline_s: float  # absolute, on this process's loop clock


RequestHandler = Callable[[Any, Caller], Awaitable[msgspec.Struct]]
PromptHandler = Callable[[Any, Caller], msgspec.Struct | Awaitable[msgspec.Struct]]
StreamHandler = Callable[[Any, Caller], AsyncIterator[msgspec.Struct]]


class Service:
    """A table of handlers, by message type. One service can be served by several listeners.

    A handler that raises ``RemoteFailed(code, message)`` answers with exactly that; any other
    exception is logged with its traceback and answered as ``RemoteFailed("internal", ...)``.
    Handlers are cancelled when the caller cancels, disconnects or is lost.
    """

    def __init__(self) -> None:
        self._requests: dict[type[msgspec.Struct], RequestHandler] = {}
        self._streams: dict[type[msgspec.Struct], StreamHandler] = {}
        self._prompt: dict[type[msgspec.Struct], PromptHandler] = {}

    def on(self, message_type: type[M], handler: Callable[[M, Caller], Awaitable[R]]) -> None:
        """Answer messages of ``message_type`` with what ``handler`` returns."""
        self._add(message_type)
        self._requests[message_type] = handler

    def on_prompt(
        self, message_type: type[M], handler: Callable[[M, Caller], R | Awaitable[R]]
    ) -> None:
        """Answer with what ``handler``, a plain function, returns: at once, without a task.

        It runs on the loop and must not keep it (1 ms). Where it cannot answer at once it returns
        an awaitable; that runs as the handlers of ``on`` do.
        """

        async def awaited(message: M, caller: Caller) -> R:
            answer = handler(message, caller)
            return answer if isinstance(answer, msgspec.Struct) else await answer

        self._add(message_type)
        self._requests[message_type] = awaited
        self._prompt[message_type] = handler

    def on_stream(
        self, message_type: type[M], handler: Callable[[M, Caller], AsyncIterator[R]]
    ) -> None:
        """Answer messages of ``message_type`` with the items that ``handler`` yields."""
        self._add(message_type)
        self._streams[message_type] = handler

    def _add(self, message_type: type[msgspec.Struct]) -> None:
        known = self._requests.keys() | self._streams.keys()
        assert message_type not in known, f"{message_type.__name__} has a handler already"

    @property
    def requests(self) -> Mapping[type[msgspec.Struct], RequestHandler]:
        return self._requests

    @property
    def prompt(self) -> Mapping[type[msgspec.Struct], PromptHandler]:
        """Those of ``requests`` that may answer at once."""
        return self._prompt

    @property
    def streams(self) -> Mapping[type[msgspec.Struct], StreamHandler]:
        return self._streams


class Channel(Protocol):
    """An open conversation with one incarnation of one peer."""

    @property
    def peer(self) -> Identity: ...

    @property
    def closed(self) -> bool:
        """True once the peer is lost or closed, or this side closed. Never becomes open again."""
        ...

    async def request(self, message: msgspec.Struct, reply: type[R], *, deadline_s: float) -> R:
        """Send ``message`` and return the reply decoded as ``reply``."""
        ...

    def stream(
        self, message: msgspec.Struct, item: Any, *, deadline_s: float
    ) -> AsyncIterator[Any]:
        """Send ``message``; iterate over items decoded as ``item`` (a struct or a tagged union).

        The result is an async generator: close it with ``contextlib.aclosing``.
        """
        ...

    async def close(self) -> None: ...

    def abort(self) -> None: ...


class Listener(Protocol):
    """A bound address at which a service answers."""

    @property
    def address(self) -> str:
        """The address to connect to, with the real port: ``tcp://127.0.0.1:40123``."""
        ...

    async def close(self) -> None: ...


class Network(Protocol):
    """How one process listens and connects. One per process (or per simulated node)."""

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        """Serve ``service`` at ``bind`` (``tcp://127.0.0.1:0`` takes a free port).

        Raises:
            PeerUnreachable: the address cannot be bound; the message names it and the remedy.
        """
        ...

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        """Open a channel and exchange hellos.

        Raises:
            PeerUnreachable: nobody answered by the deadline.
            HelloRefused: protocol or contract differ.
        """
        ...

    def publish(self, bind: str, replay_bind: str, replay: ReplaySource) -> Publisher:
        """Open a publisher at ``bind``; requests at ``replay_bind`` are answered by ``replay``.

        Raises:
            PeerUnreachable: an address cannot be bound; the message names it and the remedy.
        """
        ...

    def subscribe(
        self,
        address: str,
        replay_address: str,
        topic: bytes,
        *,
        on_message: PartsCallback,
        on_replay: PartsCallback,
    ) -> Subscription:
        """Receive what the publisher at ``address`` sends with topics that begin with ``topic``.

        Returns at once; connects, and connects again, in the background.

        Raises:
            PeerUnreachable: an address is not one.
        """
        ...

    async def close(self) -> None: ...
