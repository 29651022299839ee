"""Server-sent events: how a running job becomes an HTTP response.

Owns the ASGI response that streams a job, and the one order of events: status only when the first
piece is there (so that refusals keep their status code), then chunks, then ``[DONE]``. An error
after the start is a ``data: {"error": ...}`` event. Knows no field of a chunk: a ``ChunkWriter``
makes those.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import GatewayError, error_headers, error_object
from gateway.openai_wire import SSE_DONE
from gateway.render import Piece
from gateway.serving import ClientGone, JobRun, while_connected

CLIENT_GONE_STATUS = 499  # nginx's number; only seen in metrics
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChunkWriter(Protocol):
    """Makes the events of one kind of stream."""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Events of one piece of choice ``index``."""
        ...

    def last(self) -> bytes:
        """Events after all choices ended: usage, trace; may be empty."""
        ...


class JobStream(Response):
    """Streams ``run``; cancels it when the client leaves."""

    def __init__(self, run: JobRun, writer: ChunkWriter, route: str) -> None:
        super().__init__()
        self._run = run
        self._writer = writer
        self._route = route
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            await while_connected(receive, self._stream(send))
        except ClientGone:
            status = CLIENT_GONE_STATUS
        except GatewayError as error:
            status = error.status
            await self._fail(error, send)
        finally:
            requests = self._run.gateway.metrics.http_requests
            requests.labels(self._route, str(status)).inc()

    async def _stream(self, send: Send) -> None:
        async def on_piece(index: int, piece: Piece) -> None:
            await self._send(send, self._writer.piece(index, piece))

        await self._run.run(on_piece)
        await self._send(send, self._writer.last() + SSE_DONE, more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: GatewayError, send: Send) -> None:
        body = msgspec.json.encode(error_object(error))
        if self._started:
            await self._send(send, b"data: " + body + b"\n\n" + SSE_DONE, more=False)
            return
        headers = [(b"content-type", b"application/json")]
        headers += [(k.encode(), v.encode()) for k, v in error_headers(error).items()]
        start: Message = {
            "type": "http.response.start",
            "status": error.status,
            "headers": headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": False})
