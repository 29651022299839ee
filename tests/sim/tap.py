"""Looks at what the handlers of a service are asked and answer, and changes neither.

Owns the wrapping of handlers, and the hooks that hold a message back for a scenario. A handler that
answers at once goes on to do so: it makes no task, watched or not. Knows no messages, no verdicts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol, cast

from tests.sim.loop import OUR_ERRORS
from transfer.channel import Caller, Service

Handler = Callable[[Any, Caller], Any]  # its answer, an awaitable of it, or its items
Hook = Callable[[str, Any], Awaitable[None]]


class Witness(Protocol):
    """Who looks."""

    name: str

    def asked(self, message: Any) -> None: ...

    def answered(self, message: Any, caller: Caller, reply: Any, started_s: float) -> None:
        """``reply`` is what it was answered, or one item of a stream."""
        ...

    def failed(self, message: Any, error: BaseException) -> None:
        """A handler failed by an error of its own; it would be answered as an internal one."""
        ...


def tap(service: Service, witness: Witness, hooks: Mapping[type, Hook]) -> None:
    """Show ``witness`` what the handlers of ``service`` are asked and answer, from now on.

    Args:
        hooks: awaited before a message of their type is handled.
    """
    requests = cast("dict[type, Handler]", service.requests)
    prompt = cast("dict[type, Handler]", service.prompt)
    streams = cast("dict[type, Handler]", service.streams)
    for kind, handler in requests.items():
        requests[kind] = _Tap(handler, witness, hooks).in_time
    for kind, handler in prompt.items():
        prompt[kind] = _Tap(handler, witness, hooks).at_once
    for kind, handler in streams.items():
        streams[kind] = _Tap(handler, witness, hooks).in_pieces


class _Tap:
    """One handler."""

    def __init__(self, handler: Handler, witness: Witness, hooks: Mapping[type, Hook]) -> None:
        self._handler = handler
        self._witness = witness
        self._hooks = hooks

    async def in_time(self, message: Any, caller: Caller) -> Any:
        hook = self._hooks.get(type(message))
        if hook is not None:
            await hook(self._witness.name, message)
        answer = self._ask(message, caller)
        return await answer if isinstance(answer, Coroutine) else answer

    def at_once(self, message: Any, caller: Caller) -> Any:
        if type(message) in self._hooks:
            return self.in_time(message, caller)
        return self._ask(message, caller)

    async def in_pieces(self, message: Any, caller: Caller) -> AsyncIterator[Any]:
        """Closed early, it closes the handler's own items before it is closed itself."""
        hook = self._hooks.get(type(message))
        if hook is not None:
            await hook(self._witness.name, message)
        started_s = asyncio.get_running_loop().time()
        self._witness.asked(message)
        try:
            async with AsyncExitStack() as stack:
                items = self._handler(message, caller)
                if (aclose := getattr(items, "aclose", None)) is not None:
                    stack.push_async_callback(aclose)
                async for item in items:
                    self._witness.answered(message, caller, item, started_s)
                    yield item
        except OUR_ERRORS as error:
            self._witness.failed(message, error)
            raise

    def _ask(self, message: Any, caller: Caller) -> Any:
        started_s = asyncio.get_running_loop().time()
        self._witness.asked(message)
        try:
            answer = self._handler(message, caller)
        except OUR_ERRORS as error:
            self._witness.failed(message, error)
            raise
        if isinstance(answer, Coroutine):
            return _Watched(answer, self._later(message, caller, answer, started_s))
        self._witness.answered(message, caller, answer, started_s)
        return answer

    async def _later(
        self, message: Any, caller: Caller, answer: Coroutine[Any, Any, Any], started_s: float
    ) -> Any:
        try:
            reply = await answer
        except OUR_ERRORS as error:
            self._witness.failed(message, error)
            raise
        self._witness.answered(message, caller, reply, started_s)
        return reply


class _Watched(Coroutine[Any, Any, Any]):
    """An answer under way and who waits for it. A caller may close it before it has begun."""

    def __init__(self, answer: Coroutine[Any, Any, Any], waiting: Coroutine[Any, Any, Any]) -> None:
        self._answer = answer
        self._waiting = waiting

    def send(self, value: Any) -> Any:
        return self._waiting.send(value)

    def throw(self, *error: Any) -> Any:
        return self._waiting.throw(*error)

    def close(self) -> None:
        self._waiting.close()
        self._answer.close()

    def __await__(self) -> Any:
        return self._waiting.__await__()
