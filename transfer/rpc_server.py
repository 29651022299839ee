"""The answering side of one control connection, as a state machine without clock or socket.

Owns which calls of one client are running, how far their streams may go, and when the client
counts as gone. The shell (``rpc_handlers.py``) runs the handlers. Every method takes the time
where it matters, appends frames to ``outbox`` and returns events.

::

             Hello fits                       Goodbye, silence, wire lost
    silent ──────────────▶ greeted ────────────────────────────────────▶ gone
       │ Hello does not fit: HelloRefused                                  ▲
       └───────────────────────────────────────────────────────────────────┘

Invariants: an id runs at most once, whatever is delivered twice; a stream is never more than
``STREAM_WINDOW`` items ahead, whatever the client grants; each id that leaves ``running``
other than by ``reply``, ``end`` or ``fail`` gives one ``Dropped``; no timer is wanted while nothing
runs.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from transfer.channel import LIVENESS_S, PING_INTERVAL_S, Hello
from transfer.decoding import Data
from transfer.errors import FrameInvalid
from transfer.identity import Identity
from transfer.rpc_frames import (
    MAX_HELLO_NBYTES,
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
    clip,
    decode_frame,
    encode_frame,
    hello_conflict,
)


class Called(NamedTuple):
    """Run the handler of the message type ``name``."""

    id: int
    name: str
    payload: Data
    timeout_s: float
    is_stream: bool


class Dropped(NamedTuple):
    """Cancel the handler of ``id``: nobody waits for it any more."""

    id: int


class Credited(NamedTuple):
    """The stream ``id`` may send again."""

    id: int


class Gone(NamedTuple):
    """The client left or was lost; a ``Dropped`` for each running call came before."""

    reason: str


ServerEvent = Called | Dropped | Credited | Gone


@dataclass(slots=True)
class _Running:
    is_stream: bool
    granted: int
    num_sent: int = 0


class ServerCore:
    """State of one client's connection."""

    def __init__(self, hello: Hello) -> None:
        self.peer: Identity | None = None
        self.gone = False
        self.outbox: list[bytes] = []
        self.counters: Counter[str] = Counter()
        self.heard_s = 0.0
        self._hello = hello
        self._running: dict[int, _Running] = {}
        self._last_id = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def on_frame(self, now_s: float, data: Data) -> list[ServerEvent]:
        """Take one frame from the client."""
        if self.gone:
            self.counters["after_close"] += 1
            return []
        if self.peer is None and len(data) > MAX_HELLO_NBYTES:
            self.counters["invalid"] += 1
            return []
        try:
            frame = decode_frame(data)
        except FrameInvalid:
            self.counters["invalid"] += 1
            return []
        self.heard_s = now_s
        if isinstance(frame, HelloFrame):
            return self._on_hello(frame.hello)
        if self.peer is None:
            self._send(Goodbye("no hello was exchanged with this process", orderly=False))
            return self.leave("spoke before its hello")
        return self._on_order(frame)

    def _on_hello(self, theirs: Hello) -> list[ServerEvent]:
        conflict = hello_conflict(self._hello, theirs)
        if conflict is not None:
            self._send(HelloRefusedFrame(conflict))
            return self.leave("refused")
        if self.peer is not None:
            self.counters["duplicate_hello"] += 1
            if self.peer != theirs.identity:
                goodbye = Goodbye("a channel keeps the identity of its first hello", orderly=False)
                return self.leave("changed its identity", goodbye)
        self.peer = theirs.identity
        self._send(HelloAccepted(self._hello))
        return []

    def _on_order(self, frame: AnyFrame) -> list[ServerEvent]:
        match frame:
            case Request():
                return self._on_request(frame)
            case Cancel():
                return self._drop(frame.id)
            case Credit():
                return self._grant(frame.id, frame.granted)
            case Ping():
                return self._on_ping(frame)
            case Goodbye():
                return self.leave(frame.reason)
            case _:
                self.counters["unexpected"] += 1
                return []

    def _on_request(self, frame: Request) -> list[ServerEvent]:
        if frame.id <= self._last_id:  # ids rise and the wire keeps the order: seen before
            self.counters["duplicate_request"] += 1
            return []
        self._last_id = frame.id
        if not math.isfinite(frame.timeout_s):  # would make timers that cannot be ordered
            self._send(Failed(frame.id, "bad_message", f"a timeout of {frame.timeout_s} s"))
            return []
        if len(self._running) >= MAX_OUTSTANDING:
            self._send(Failed(frame.id, "overloaded", f"{MAX_OUTSTANDING} calls are running"))
            return []
        self._running[frame.id] = _Running(frame.window > 0, min(frame.window, STREAM_WINDOW))
        return [Called(frame.id, frame.name, frame.payload, frame.timeout_s, frame.window > 0)]

    def _on_ping(self, frame: Ping) -> list[ServerEvent]:
        wanted = dict(frame.outstanding)
        forgotten = [id_ for id_ in self._running if id_ not in wanted]
        self.counters["lost_cancel"] += len(forgotten)
        events = [event for id_ in forgotten for event in self._drop(id_)]
        for id_, granted in frame.outstanding:
            events += self._grant(id_, granted)
        unknown = [id_ for id_ in wanted if id_ not in self._running]
        self._send(Pong(frame.nonce, unknown))
        return events

    def _grant(self, id_: int, granted: int) -> list[ServerEvent]:
        call = self._running.get(id_)
        if call is None:
            return []
        granted = min(granted, call.num_sent + STREAM_WINDOW)  # nobody has consumed what is unsent
        if granted <= call.granted:
            return []
        call.granted = granted
        return [Credited(id_)]

    def _drop(self, id_: int) -> list[ServerEvent]:
        if self._running.pop(id_, None) is None:
            self.counters["late_cancel"] += 1
            return []
        return [Dropped(id_)]

    def may_send(self, id_: int) -> bool:
        """Return whether the stream ``id_`` has a grant for its next item."""
        call = self._running.get(id_)
        return call is None or call.num_sent < call.granted

    def item(self, id_: int, payload: bytes) -> None:
        """Send the next item; needs ``may_send``. A call that was dropped sends nothing.

        Raises:
            FrameInvalid: the item is too long.
        """
        call = self._running.get(id_)
        if call is None:
            return
        assert call.is_stream, "items belong to streams"
        assert call.num_sent < call.granted, "an item was sent without a grant"
        self._send(Item(id_, call.num_sent, payload))
        call.num_sent += 1

    def reply(self, id_: int, payload: bytes) -> None:
        """Answer a request; FrameInvalid when the answer is too long."""
        if id_ in self._running:
            self._send(Reply(id_, payload))
            del self._running[id_]

    def end(self, id_: int) -> None:
        """End a stream in order."""
        call = self._running.pop(id_, None)
        if call is not None:
            self._send(End(id_, call.num_sent))

    def fail(self, id_: int, code: str, message: str) -> None:
        """Answer a request, or end a stream, with an error."""
        if self._running.pop(id_, None) is not None:
            self._send(Failed(id_, clip(code), clip(message)))

    def probe(self) -> None:
        """Send a frame that means nothing, to find out whether the wire still has a far end."""
        self._send(Pong(0, []))

    def leave(self, reason: str, goodbye: Goodbye | None = None) -> list[ServerEvent]:
        """Drop everything and forget the client; idempotent."""
        if self.gone:
            return []
        if goodbye is not None:
            self._send(goodbye)
        self.gone = True
        events: list[ServerEvent] = [Dropped(id_) for id_ in sorted(self._running)]
        self._running.clear()
        events.append(Gone(reason))
        return events

    def next_timer_s(self) -> float | None:
        """Return when ``tick`` wants to be called, or None while nothing runs."""
        return self.heard_s + LIVENESS_S if self._running and not self.gone else None

    def tick(self, now_s: float) -> list[ServerEvent]:
        """Drop everything when the client has been silent for too long."""
        due_s = self.next_timer_s()
        if due_s is None or now_s < due_s:
            return []
        if now_s - due_s > OWN_PAUSE_S:  # we stood still: pings may be waiting to be read
            self.heard_s = now_s - LIVENESS_S + 2 * PING_INTERVAL_S
            return []
        reason = f"no ping for {now_s - self.heard_s:.1f} s"
        return self.leave(reason, Goodbye(reason, orderly=False))

    def _send(self, frame: Frame) -> None:
        self.outbox.append(encode_frame(frame))
