"""The answering half of the asyncio shell: ``RpcServer`` runs a service's handlers.

Owns the handler tasks and one connection state per client; decides nothing (``rpc_server.py``
does). Knows no sockets: it is told frames by connection key and sends through a function.

A handler registered with ``on_prompt`` is called, and answers, in the turn of the loop in which its
request arrives; every other one is a task.

Who ends what: a dropped call cancels its task; ``close`` drops all calls and awaits their tasks.
Invariant: a key that has left is remembered (bounded), so that frames repeated by the wire
cannot revive it and run a handler a second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from msgspec import structs

from transfer.channel import (
    Caller,
    Hello,
    PromptHandler,
    RequestHandler,
    Service,
    StreamHandler,
)
from transfer.decoding import Data, decode_foreign
from transfer.errors import FrameInvalid, RemoteFailed
from transfer.identity import Identity
from transfer.lazy_timer import LazyTimer
from transfer.rpc_frames import (
    MAX_CONNECTIONS,
    Goodbye,
    encode_frame,
    encode_message,
    message_decoder,
    type_name,
)
from transfer.rpc_server import Called, Credited, Dropped, Gone, ServerCore, ServerEvent

logger = logging.getLogger(__name__)


class _Connection:
    """One client of an ``RpcServer``: its core, its handler tasks, its timer."""

    __slots__ = ("core", "credit", "key", "tasks", "timer")

    def __init__(
        self, key: bytes, hello: Hello, tick: Callable[[_Connection, float], None]
    ) -> None:
        self.key = key
        self.core = ServerCore(hello)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.credit: dict[int, asyncio.Event] = {}
        self.timer = LazyTimer(lambda now_s, _: tick(self, now_s))


class RpcServer:
    """Runs a service's handlers for any number of clients, each named by a wire's ``key``.

    ``send(key, frame)`` must not block; the wire's owner calls ``on_frame`` and ``on_gone``.
    ``on_call`` is told of each request or stream that somebody known has sent.
    """

    def __init__(
        self,
        service: Service,
        hello: Hello,
        send: Callable[[bytes, bytes], None],
        *,
        on_call: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = service
        self._hello = hello
        self._send = send
        self._on_call = on_call
        self._connections: dict[bytes, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._types: dict[str, type[msgspec.Struct]] = {}
        self._gone: dict[bytes, None] = {}  # the last MAX_CONNECTIONS keys that left, oldest first
        self._closed = False
        self.counters: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Handlers that run at this moment."""
        return len(self._tasks)

    def renew(self, identity: Identity) -> None:
        """Answer new hellos as ``identity``; channels that are open keep the old one."""
        self._hello = structs.replace(self._hello, identity=identity)

    def on_frame(self, key: bytes, frame: Data) -> None:
        """Take one frame of the client ``key``."""
        if self._closed:
            return
        connection = self._connections.get(key)
        if connection is None:
            if key in self._gone:
                self._send(key, encode_frame(Goodbye("this channel has ended", orderly=False)))
                return
            self._make_room()
            connection = self._connections[key] = _Connection(key, self._hello, self._tick)
        self._after(connection, connection.core.on_frame(self._loop.time(), frame))
        if connection.core.peer is None:  # nothing but a hello makes a connection worth keeping
            self._forget(connection)

    def on_gone(self, key: bytes, reason: str) -> None:
        """Take the news that the wire of ``key`` has no far end any more."""
        connection = self._connections.get(key)
        if connection is not None:
            self._after(connection, connection.core.leave(reason))

    def probe(self) -> None:
        """Send every client a frame without meaning; the wire reports who has gone."""
        for connection in list(self._connections.values()):
            connection.core.probe()
            self._after(connection, [])

    def shutdown(self) -> None:
        """Say goodbye to every client and cancel all handlers; idempotent."""
        goodbye = Goodbye("the peer shuts down", orderly=True)
        for connection in list(self._connections.values()):
            self._after(connection, connection.core.leave("shutdown", goodbye))
        self._closed = True

    async def close(self) -> None:
        """Shut down and wait for the end of all handlers; idempotent."""
        self.shutdown()
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        if tasks:
            await asyncio.wait(tasks)

    def abort(self) -> None:
        """Cancel all handlers at once, without goodbye; idempotent."""
        for connection in list(self._connections.values()):
            connection.core.outbox.clear()
            self._after(connection, connection.core.leave("aborted"))
        self._closed = True

    def _make_room(self) -> None:
        if len(self._connections) < MAX_CONNECTIONS:
            return
        idle = (c for c in self._connections.values() if c.core.num_running == 0)
        oldest = min(idle, key=lambda c: c.core.heard_s, default=None)
        if oldest is None:
            oldest = min(self._connections.values(), key=lambda c: c.core.heard_s)
        self.counters["evicted_connection"] += 1
        goodbye = Goodbye("too many connections", orderly=False)
        self._after(oldest, oldest.core.leave("too many connections", goodbye))

    def _after(self, connection: _Connection, events: list[ServerEvent]) -> None:
        for event in events:
            self._perform(connection, event)
        core = connection.core
        if core.outbox:
            frames, core.outbox = core.outbox, []
            for frame in frames:
                self._send(connection.key, frame)
        next_s = core.next_timer_s()
        if next_s is not None:
            connection.timer.arm(next_s)

    def _tick(self, connection: _Connection, now_s: float) -> None:
        self._after(connection, connection.core.tick(now_s))

    def _perform(self, connection: _Connection, event: ServerEvent) -> None:
        match event:
            case Called():
                self._call(connection, event)
            case Dropped():
                if (task := connection.tasks.get(event.id)) is not None:
                    task.cancel()
            case Credited():
                if (credit := connection.credit.get(event.id)) is not None:
                    credit.set()
            case Gone():
                self._forget(connection)
                self._gone[connection.key] = None
                if len(self._gone) > MAX_CONNECTIONS:
                    del self._gone[next(iter(self._gone))]

    def _forget(self, connection: _Connection) -> None:
        self.counters.update(connection.core.counters)
        connection.core.counters.clear()
        self._connections.pop(connection.key, None)
        connection.timer.cancel()

    def _call(self, connection: _Connection, call: Called) -> None:
        peer = connection.core.peer
        assert peer is not None, "calls come after the hello"
        if self._on_call is not None:
            self._on_call()
        message_type = self._type(call.name)
        if message_type is None or (message_type in self._service.streams) != call.is_stream:
            kind = "stream" if call.is_stream else "request"
            text = f"{self._hello.identity.node_id} has no {kind} handler for {call.name!r}"
            connection.core.fail(call.id, "unknown_message", text)
            return
        try:
            decode = message_decoder(message_type).decode
            message = decode_foreign(call.payload, decode, call.name)
        except FrameInvalid as error:
            connection.core.fail(call.id, "bad_message", str(error))
            return
        caller = Caller(peer, self._loop.time() + call.timeout_s)
        if call.is_stream:
            stream = self._run_stream(
                connection, call.id, self._service.streams[message_type], message, caller
            )
            self._spawn(connection, call, stream)
            return
        prompt = self._service.prompt.get(message_type)
        if prompt is not None:
            self._call_prompt(connection, call, prompt, message, caller)
            return
        handler = self._service.requests[message_type]
        request = self._run_request(connection, call.id, handler, message, caller)
        self._spawn(connection, call, request)

    def _type(self, name: str) -> type[msgspec.Struct] | None:
        if name not in self._types:  # a service may grow after it is served
            known = [*self._service.requests, *self._service.streams]
            self._types = {type_name(t): t for t in known}
            assert len(self._types) == len(known), "two message types share one name"
        return self._types.get(name)

    def _spawn(
        self, connection: _Connection, call: Called, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(coroutine, name=f"rpc {call.name}")
        connection.tasks[call.id] = task
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            del connection.tasks[call.id]
            if not task.cancelled():
                task.result()  # only our own bugs get here: handlers' errors were answered
                return
            connection.core.fail(call.id, "internal", f"the handler of {call.name} was cancelled")
            self._after(connection, [])

        task.add_done_callback(done)
        return task

    def _call_prompt(
        self,
        connection: _Connection,
        call: Called,
        handler: PromptHandler,
        message: Any,
        caller: Caller,
    ) -> None:
        """Answer in this turn of the loop, or run what the answer has to be waited for."""
        try:
            answer = handler(message, caller)
            if isinstance(answer, msgspec.Struct):
                connection.core.reply(call.id, encode_message(answer))
                return
        except Exception as error:  # noqa: BLE001 - logged with its traceback and answered
            self._fail(connection, call.id, message, error)
            return
        waited: Awaitable[msgspec.Struct] = answer
        request = self._run_request(connection, call.id, lambda *_: waited, message, caller)
        task = self._spawn(connection, call, request)
        if isinstance(answer, Coroutine):  # a task that is cancelled at once never awaits it
            task.add_done_callback(lambda _: answer.close())

    async def _run_request(
        self,
        connection: _Connection,
        id_: int,
        handler: RequestHandler,
        message: Any,
        caller: Caller,
    ) -> None:
        try:
            reply = await handler(message, caller)
            connection.core.reply(id_, encode_message(reply))
        except Exception as error:  # noqa: BLE001 - logged with its traceback and answered
            self._fail(connection, id_, message, error)
        self._after(connection, [])

    async def _run_stream(
        self,
        connection: _Connection,
        id_: int,
        handler: StreamHandler,
        message: Any,
        caller: Caller,
    ) -> None:
        core = connection.core
        credit = connection.credit[id_] = asyncio.Event()
        try:
            items = handler(message, caller)
            async with AsyncExitStack() as stack:
                if (aclose := getattr(items, "aclose", None)) is not None:
                    stack.push_async_callback(aclose)
                async for item in items:
                    while not core.may_send(id_):
                        credit.clear()
                        await credit.wait()
                    core.item(id_, encode_message(item))
                    self._after(connection, [])
            core.end(id_)
        except Exception as error:  # noqa: BLE001 - logged with its traceback and answered
            self._fail(connection, id_, message, error)
        finally:
            del connection.credit[id_]
        self._after(connection, [])

    def _fail(self, connection: _Connection, id_: int, message: Any, error: Exception) -> None:
        """Answer with the handler's own error; what it did not mean to raise is logged."""
        if isinstance(error, RemoteFailed):
            connection.core.fail(id_, error.code, error.message)
            return
        name = type(message).__name__
        logger.exception("handler of %s failed", name, exc_info=error)
        connection.core.fail(id_, "internal", f"{name}: {type(error).__name__}: {error}")
