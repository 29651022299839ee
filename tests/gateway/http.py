"""The HTTP door over a scripted cluster: in process through ASGI, or on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.tokenizer import ByteTokenizer, Tokenizer
from tests.gateway.fakes import FakeCluster

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Door:
    """A client of one app."""

    def __init__(self, cluster: FakeCluster, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.app = app
        self.client = client

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        if isinstance(body, dict) and "model" not in body:
            body = {"model": "fake", **body}
        return await self.client.post(path, json=body, headers=headers)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Any:
        response = await self.post(COMPLETIONS, {"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, content: Any = "hello", **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        response = await self.post(CHAT, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
        """The events of a stream, decoded; the last one is ``"[DONE]"``."""
        response = await self.post(path, {**body, "stream": True}, **headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)


def events_of(text: str) -> list[Any]:
    found: list[Any] = []
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def app_of(cluster: FakeCluster, tokenizer: Tokenizer | None = None, **config: Any) -> FastAPI:
    return create_app(
        GatewayConfig(**{"model": "fake", **config}),
        cluster.dispatcher,
        tokenizer or ByteTokenizer(),
        cluster.membership,
        wall_clock=lambda: 1_700_000_000.0,
    )


@asynccontextmanager
async def door(
    cluster: FakeCluster | None = None, tokenizer: Tokenizer | None = None, **config: Any
) -> AsyncIterator[Door]:
    cluster = cluster or FakeCluster()
    async with cluster.running():
        app = app_of(cluster, tokenizer, **config)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield Door(cluster, app, client)


@asynccontextmanager
async def served(cluster: FakeCluster, **config: Any) -> AsyncIterator[str]:
    """The app on a real socket; yields its base URL."""
    async with cluster.running():
        app = app_of(cluster, **config)
        server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        )
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(10):
                while not server.started:  # noqa: ASYNC110 - uvicorn has a flag, no event
                    await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await task


class RawCall:
    """One ASGI call whose client can leave at any moment."""

    def __init__(self, app: FastAPI, path: str, body: bytes, chunk: int = 1 << 16) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._parts = [body[at : at + chunk] for at in range(0, len(body), chunk)] or [b""]
        self.num_parts_read = 0
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("gateway", 80),
        }

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent[1:]).decode()

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            self.num_parts_read += 1
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
