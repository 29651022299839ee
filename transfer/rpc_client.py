"""The calling side of a control channel, as a state machine without clock, socket or await.

Owns the outstanding requests and streams of one channel, its hello, its liveness. Every method
takes the time, appends the frames to send to ``outbox`` and returns events for the shell
(``rpc.py``). Deadlines belong to the shell: it calls ``cancel``.

::

                  HelloAccepted                      Goodbye, silence, wire lost, close
    connecting ───────────────────▶ open ───────────────────────────────────────▶ closed
        │   HelloRefused                                                            ▲
        └───────────────────────────────────────────────────────────────────────────┘

Invariants: an id is answered at most once; every id outstanding when the channel closes gets one
``Errored``; nothing is sent and no timer is wanted while nothing is outstanding on an open channel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from transfer.channel import LIVENESS_S, PING_INTERVAL_S, Hello
from transfer.decoding import Data
from transfer.errors import (
    FrameInvalid,
    HelloRefused,
    PeerClosed,
    PeerLost,
    RemoteFailed,
    TransferError,
)
from transfer.rpc_frames import (
    HELLO_RETRY_MAX_S,
    HELLO_RETRY_S,
    MAX_OUTSTANDING,
    OWN_PAUSE_S,
    STREAM_WINDOW,
    AnyFrame,
    Cancel,
    Credit,
    End,
    Failed,
    Frame,
    Goodbye,
    HelloAccepted,
    HelloFrame,
    HelloRefusedFrame,
    Item,
    Ping,
    Pong,
    Reply,
    Request,
    decode_frame,
    encode_frame,
    encode_message,
    hello_conflict,
    type_name,
)


class Opened(NamedTuple):
    hello: Hello


class Replied(NamedTuple):
    id: int
    payload: Data


class ItemArrived(NamedTuple):
    id: int
    payload: bytes


class Ended(NamedTuple):
    id: int


class Errored(NamedTuple):
    id: int
    error: TransferError


class Closed(NamedTuple):
    """The channel is closed for good; the ``Errored`` of each outstanding id came before."""

    error: TransferError


ClientEvent = Opened | Replied | ItemArrived | Ended | Errored | Closed


@dataclass(slots=True)
class _Open:
    is_stream: bool
    num_arrived: int = 0
    num_consumed: int = 0
    granted: int = 0


class ClientCore:
    """State of one channel, seen from the side that opened it."""

    def __init__(self, hello: Hello, label: str) -> None:
        self.hello = hello
        self.peer: Hello | None = None
        self.closed_by: TransferError | None = None
        self.said_goodbye = False
        self.outbox: list[bytes] = []
        self.counters: Counter[str] = Counter()
        self._label = label
        self._open: dict[int, _Open] = {}
        self._last_id = 0
        self._nonce = 0
        self._heard_s = 0.0
        self._next_ping_s = 0.0
        self._next_hello_s = 0.0
        self._hello_retry_s = HELLO_RETRY_S

    @property
    def num_outstanding(self) -> int:
        return len(self._open)

    def start(self, now_s: float) -> None:
        """Send the first hello."""
        self._next_hello_s = now_s
        self.tick(now_s)

    def open(
        self, now_s: float, message: msgspec.Struct, *, timeout_s: float, is_stream: bool
    ) -> int:
        """Send a request and return its id.

        Raises:
            FrameInvalid: the message is too long.
            RemoteFailed: ``overloaded``, ``MAX_OUTSTANDING`` are outstanding already.
            PeerClosed, PeerLost: the channel is closed.
        """
        if self.closed_by is not None:
            raise type(self.closed_by)(*self.closed_by.args)
        assert self.peer is not None, "requests need an open channel"
        if len(self._open) >= MAX_OUTSTANDING:
            raise RemoteFailed(
                "overloaded", f"{MAX_OUTSTANDING} requests are outstanding to {self._label}"
            )
        window = STREAM_WINDOW if is_stream else 0
        request = Request(
            self._last_id + 1, type_name(type(message)), encode_message(message), timeout_s, window
        )
        self._send(request)
        self._last_id += 1
        if not self._open:  # waking from idle: silence counts from here
            self._heard_s = now_s
            self._next_ping_s = now_s + PING_INTERVAL_S
        self._open[self._last_id] = _Open(is_stream, granted=window)
        return self._last_id

    def cancel(self, id_: int) -> None:
        """Forget ``id_`` and tell the peer; nothing happens when it has ended."""
        if self._open.pop(id_, None) is not None:
            self._send(Cancel(id_))

    def consume(self, id_: int) -> None:
        """Note that the reader took one item, and grant more when half of the window is used."""
        call = self._open.get(id_)
        if call is None:
            return
        call.num_consumed += 1
        if call.num_consumed + STREAM_WINDOW - call.granted >= STREAM_WINDOW // 2:
            call.granted = call.num_consumed + STREAM_WINDOW
            self._send(Credit(id_, call.granted))

    def close(self, error: TransferError, *, goodbye: bool) -> list[ClientEvent]:
        """Fail everything outstanding with ``error`` and close for good; idempotent."""
        if self.closed_by is not None:
            return []
        if goodbye and self.peer is not None:
            self._send(Goodbye("the caller closed the channel", orderly=True))
            self.said_goodbye = True
        self.closed_by = error
        events: list[ClientEvent] = [
            Errored(id_, type(error)(*error.args)) for id_ in sorted(self._open)
        ]
        self._open.clear()
        events.append(Closed(error))
        return events

    def next_timer_s(self) -> float | None:
        """Return when ``tick`` wants to be called, or None while the channel is idle."""
        if self.closed_by is not None:
            return None
        if self.peer is None:
            return self._next_hello_s
        if not self._open:
            return None
        return min(self._next_ping_s, self._heard_s + LIVENESS_S)

    def tick(self, now_s: float) -> list[ClientEvent]:
        """Send what is due; close the channel when the peer has been silent for too long."""
        due_s = self.next_timer_s()
        if due_s is None or now_s < due_s:
            return []
        if self.peer is None:
            self._send(HelloFrame(self.hello))
            self._next_hello_s = now_s + self._hello_retry_s
            self._hello_retry_s = min(2 * self._hello_retry_s, HELLO_RETRY_MAX_S)
            return []
        if now_s - due_s > OWN_PAUSE_S:  # we stood still: frames may be waiting to be read
            self._heard_s = max(self._heard_s, now_s - LIVENESS_S + 2 * PING_INTERVAL_S)
        if now_s >= self._heard_s + LIVENESS_S:
            silent_s = now_s - self._heard_s
            error = PeerLost(f"{self._label} has been silent for {silent_s:.1f} s")
            return self.close(error, goodbye=True)
        if now_s >= self._next_ping_s:
            self._nonce += 1
            outstanding = [(id_, call.granted) for id_, call in self._open.items()]
            self._send(Ping(self._nonce, outstanding))
            self._next_ping_s = now_s + PING_INTERVAL_S
        return []

    def on_frame(self, now_s: float, data: Data) -> list[ClientEvent]:
        """Take one frame from the peer."""
        if self.closed_by is not None:
            self.counters["after_close"] += 1
            return []
        try:
            frame = decode_frame(data)
        except FrameInvalid:
            self.counters["invalid"] += 1
            return []
        self._heard_s = now_s
        if self.peer is None:
            return self._on_greeting(frame)
        return self._on_answer(frame)

    def _on_greeting(self, frame: AnyFrame) -> list[ClientEvent]:
        if isinstance(frame, HelloRefusedFrame):
            return self.close(HelloRefused(frame.message), goodbye=False)
        if not isinstance(frame, HelloAccepted):
            self.counters["unexpected"] += 1
            return []
        conflict = hello_conflict(self.hello, frame.hello)
        if conflict is not None:
            return self.close(HelloRefused(conflict), goodbye=True)
        self.peer = frame.hello
        return [Opened(frame.hello)]

    def _on_answer(self, frame: AnyFrame) -> list[ClientEvent]:
        match frame:
            case Item():
                return self._on_item(frame)
            case Reply() | End() | Failed():
                return self._on_completion(frame)
            case Pong():
                lost = [id_ for id_ in frame.unknown if self._open.pop(id_, None) is not None]
                self.counters["lost_on_the_way"] += len(lost)
                text = f"the request to {self._label}, or its answer, was lost on the way"
                return [Errored(id_, PeerLost(text)) for id_ in lost]
            case Goodbye(orderly=True):
                error: TransferError = PeerClosed(f"{self._label} closed: {frame.reason}")
                return self.close(error, goodbye=False)
            case Goodbye():
                error = PeerLost(f"{self._label} does not know this channel: {frame.reason}")
                return self.close(error, goodbye=False)
            case HelloAccepted() if frame.hello.identity != self._peer_hello().identity:
                error = PeerLost(f"{self._label} was restarted")
                return self.close(error, goodbye=False)
            case _:
                self.counters["unexpected"] += 1
                return []

    def _on_item(self, frame: Item) -> list[ClientEvent]:
        call = self._open.get(frame.id)
        if call is None:
            self.counters["unknown_completion"] += 1
            return []
        if frame.seq < call.num_arrived:
            self.counters["duplicate_item"] += 1
            return []
        if not call.is_stream or frame.seq >= call.granted:
            return self._fail(frame.id, FrameInvalid(f"{self._label} sent items without a grant"))
        if frame.seq > call.num_arrived:
            self.counters["item_gap"] += 1
            return self._fail(frame.id, PeerLost(f"items from {self._label} were lost on the way"))
        call.num_arrived += 1
        return [ItemArrived(frame.id, frame.payload)]

    def _on_completion(self, frame: Reply | End | Failed) -> list[ClientEvent]:
        call = self._open.get(frame.id)
        if call is None:
            self.counters["unknown_completion"] += 1
            return []
        if isinstance(frame, Failed):
            del self._open[frame.id]
            return [Errored(frame.id, RemoteFailed(frame.code, frame.message))]
        if isinstance(frame, End) != call.is_stream:
            return self._fail(frame.id, FrameInvalid(f"{self._label} answered in the wrong form"))
        if isinstance(frame, End):
            if frame.num_items != call.num_arrived:
                self.counters["item_gap"] += 1
                error = PeerLost(f"the last items from {self._label} were lost on the way")
                return self._fail(frame.id, error)
            del self._open[frame.id]
            return [Ended(frame.id)]
        del self._open[frame.id]
        return [Replied(frame.id, frame.payload)]

    def _fail(self, id_: int, error: TransferError) -> list[ClientEvent]:
        self.cancel(id_)
        return [Errored(id_, error)]

    def _peer_hello(self) -> Hello:
        assert self.peer is not None
        return self.peer

    def _send(self, frame: Frame) -> None:
        self.outbox.append(encode_frame(frame))
