"""The calling half of the asyncio shell: ``RpcChannel``, and the ``Wire`` that carries its frames.

Owns the futures of waiting callers and one timer; decides nothing (``rpc_client.py`` does), runs
no task. Knows no sockets: a ``Wire`` carries frames, in order, and may lose them. Used unchanged
by ``zmq_network.py`` and by the simulator; the answering half is ``rpc_handlers.py``.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from transfer.channel import Hello
from transfer.decoding import Data, decode_foreign
from transfer.errors import (
    DeadlineExceeded,
    PeerClosed,
    PeerLost,
    PeerUnreachable,
    TransferError,
)
from transfer.identity import Identity
from transfer.lazy_timer import LazyTimer
from transfer.loop_vigil import Answers
from transfer.rpc_client import (
    ClientCore,
    ClientEvent,
    Closed,
    Ended,
    Errored,
    ItemArrived,
    Opened,
    Replied,
)
from transfer.rpc_frames import message_decoder

R = TypeVar("R", bound=msgspec.Struct)


class Wire(Protocol):
    """Carries frames to one peer, in order. May lose, repeat or corrupt; never blocks."""

    def send(self, frame: bytes) -> None: ...

    def close(self, *, flush: bool) -> None:
        """Release the wire; with ``flush``, frames already sent should still go out."""
        ...


class _Call:
    """One outstanding request or stream: what has arrived, and the future of who waits."""

    __slots__ = ("_waiter", "done", "error", "id", "payloads", "timer")

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.payloads: deque[Data] = deque()  # at most STREAM_WINDOW, the core sees to it
        self.error: TransferError | None = None
        self.done = False
        self.timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Data | None:
        """Return the next payload, or None at the end; what arrived comes before an error."""
        while not self.payloads:
            if self.error is not None:
                raise self.error
            if self.done:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.payloads.popleft()

    def put(self, payload: Data) -> None:
        self.payloads.append(payload)
        self.wake()

    def finish(self, error: TransferError | None = None) -> None:
        self.done = True
        self.error = self.error or error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RpcChannel:
    """``transfer.channel.Channel`` over any wire, whose owner calls ``on_frame``, ``on_lost``."""

    def __init__(
        self,
        hello: Hello,
        wire: Wire,
        address: str,
        *,
        answers: Answers | None = None,
        on_closed: Callable[[RpcChannel], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._core = ClientCore(hello, address)
        self._wire = wire
        self._address = address
        self._answers = answers  # None: the loop sleeps whenever it can
        self._on_closed = on_closed
        self._calls: dict[int, _Call] = {}
        self._timer = LazyTimer(self._tick)
        self._opened: asyncio.Future[None] = self._loop.create_future()

    @property
    def peer(self) -> Identity:
        assert self._core.peer is not None, "the channel was never open"
        return self._core.peer.identity

    @property
    def closed(self) -> bool:
        return self._core.closed_by is not None

    @property
    def counters(self) -> Counter[str]:
        """Frames that were ignored, by reason."""
        return self._core.counters

    @property
    def num_outstanding(self) -> int:
        return self._core.num_outstanding

    async def open(self, deadline_s: float) -> None:
        """Exchange hellos.

        Raises:
            PeerUnreachable: no answer by the deadline.
            HelloRefused: the peers do not fit together.
        """
        self._core.start(self._loop.time())
        self._after([])
        timer = self._loop.call_at(deadline_s, self._not_opened)
        try:
            await self._opened
        finally:
            timer.cancel()

    def _not_opened(self) -> None:
        text = f"nobody answered at {self._address} before the deadline; is the node running?"
        self._after(self._core.close(PeerUnreachable(text), goodbye=False))

    async def request(self, message: msgspec.Struct, reply: type[R], *, deadline_s: float) -> R:
        call = self._start(message, deadline_s, is_stream=False)
        try:
            payload = await call.next()
        finally:
            self._finish(call)
        assert payload is not None, "a request ends with a payload or an error"
        answer: R = self._decode(payload, reply)
        return answer

    async def stream(
        self, message: msgspec.Struct, item: Any, *, deadline_s: float
    ) -> AsyncIterator[Any]:
        call = self._start(message, deadline_s, is_stream=True)
        try:
            while (payload := await call.next()) is not None:
                self._core.consume(call.id)
                self._after([])
                yield self._decode(payload, item)
        finally:
            self._finish(call)

    async def close(self) -> None:
        self._after(self._core.close(PeerClosed("this side closed the channel"), goodbye=True))

    def abort(self) -> None:
        self._after(self._core.close(PeerClosed("this side closed the channel"), goodbye=False))

    def on_frame(self, frame: Data) -> None:
        """Take one frame from the wire."""
        self._after(self._core.on_frame(self._loop.time(), frame))

    def on_lost(self, reason: str) -> None:
        """Take the news that the wire broke. Before the channel is open it may still mend."""
        if self._core.peer is not None:
            error = PeerLost(f"connection to {self._address} lost: {reason}")
            self._after(self._core.close(error, goodbye=False))

    def _start(self, message: msgspec.Struct, deadline_s: float, *, is_stream: bool) -> _Call:
        now_s = self._loop.time()
        timeout_s = deadline_s - now_s
        if timeout_s <= 0:
            raise DeadlineExceeded(f"deadline passed before the request to {self._address}")
        id_ = self._core.open(now_s, message, timeout_s=timeout_s, is_stream=is_stream)
        call = self._calls[id_] = _Call(id_)
        call.timer = self._loop.call_at(deadline_s, self._expire, id_)
        self._after([])
        if self._answers is not None and not is_stream:
            self._answers.asked()
        return call

    def _expire(self, id_: int) -> None:
        self._core.cancel(id_)
        error = DeadlineExceeded(f"no answer from {self._address} before the deadline")
        self._after([Errored(id_, error)])

    def _finish(self, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        self._calls.pop(call.id, None)
        self._core.cancel(call.id)
        if self._core.outbox:  # it had not ended
            self._after([])
            self._expect_no_answer()

    def _expect_no_answer(self) -> None:
        if self._answers is not None:
            self._answers.given_up()

    def _decode(self, payload: Data, type_: Any) -> Any:
        return decode_foreign(payload, message_decoder(type_).decode, self._address)

    def _after(self, events: list[ClientEvent]) -> None:
        """Perform what the core decided: frames out, events in, timer set."""
        for event in events:
            self._perform(event)
        if self._core.outbox:
            frames, self._core.outbox = self._core.outbox, []
            for frame in frames:
                self._wire.send(frame)
        if events and isinstance(events[-1], Closed):
            self._wire.close(flush=self._core.said_goodbye)
            if self._on_closed is not None:
                self._on_closed(self)
        self._arm()

    def _perform(self, event: ClientEvent) -> None:
        match event:
            case Opened():
                if not self._opened.done():
                    self._opened.set_result(None)
            case Replied():
                if self._answers is not None:
                    self._answers.answered()
                if (call := self._calls.get(event.id)) is not None:
                    call.put(event.payload)
            case ItemArrived():
                if (call := self._calls.get(event.id)) is not None:
                    call.put(event.payload)
            case Ended():
                if (call := self._calls.get(event.id)) is not None:
                    call.finish()
            case Errored():
                self._expect_no_answer()
                if (call := self._calls.get(event.id)) is not None:
                    call.finish(event.error)
            case Closed():
                if not self._opened.done():
                    self._opened.set_exception(event.error)
                    self._opened.exception()  # seen, also when nobody awaits ``open`` any more

    def _arm(self) -> None:
        next_s = self._core.next_timer_s()
        if next_s is not None:
            self._timer.arm(next_s)
        elif self.closed:
            self._timer.cancel()

    def _tick(self, now_s: float, late_s: float) -> None:
        self._after(self._core.tick(now_s))
