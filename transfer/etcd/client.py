"""A small client of etcd: requests, one watch stream, several endpoints, errors of our tree.

Owns the HTTP connections (httpx, over etcd's own JSON gateway) and the translation of every foreign
error. Knows no members. ``next_endpoint`` turns to another server of the same etcd cluster.

A token that etcd takes no more (it has expired, or users were changed) is renewed by the way.

Proxies of the environment are not used: etcd is a neighbour.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerLost,
    PeerUnreachable,
    RemoteFailed,
    TransferError,
    Unauthorized,
)
from transfer.etcd import wire
from transfer.etcd.address import EtcdAccess, EtcdAddress

REQUEST_TIMEOUT_S = 2.0
WATCH_SILENCE_S = 15.0  # then the watch is opened anew: a half-open connection says nothing
MAX_WATCH_LINE_NBYTES = 64 << 20

_NO_RIGHT = {7, 16}  # gRPC's PERMISSION_DENIED, UNAUTHENTICATED
_AUTH_TEXTS = ("authentication failed", "user name is empty")
_TOKEN_TEXTS = ("invalid auth token", "revision of auth store is old")

A = TypeVar("A")


def tls_context(access: EtcdAccess) -> ssl.SSLContext:
    """Return how to speak TLS.

    Raises:
        OSError: a file cannot be read, or is no certificate (``ssl.SSLError`` is one).
    """
    context = ssl.create_default_context(cafile=access.cacert)
    if access.cert is not None:
        context.load_cert_chain(access.cert, access.key)
    return context


class TokenEnded(Unauthorized):
    """Log in again: etcd does not take this token any more."""


class Servers:
    """Whom to ask: one of the endpoints, until it does not answer. Shared by a process's clients.

    So the goodbye of a member goes to the server that has answered it until then.
    """

    def __init__(self, endpoints: tuple[str, ...]) -> None:
        self._endpoints = endpoints
        self._turn = 0

    @property
    def present(self) -> str:
        return self._endpoints[self._turn]

    def turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._endpoints)


class EtcdClient:
    """Use as an async context manager, which owns the connections.

    Args:
        tls: how to speak to ``https`` endpoints; None where there are none.
    """

    def __init__(self, servers: Servers, access: EtcdAccess, tls: ssl.SSLContext | None) -> None:
        self._servers = servers
        self._access = access
        self._token: str | None = None
        self._http = httpx.AsyncClient(
            verify=tls or False,  # a context that nobody uses takes tens of milliseconds
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S),
            trust_env=False,
        )

    @classmethod
    def factory(cls, address: EtcdAddress, access: EtcdAccess) -> Callable[[], Self]:
        """Return what makes clients; reads the certificates once.

        Raises:
            OSError: a certificate cannot be read.
        """
        tls = tls_context(access) if address.secure else None
        servers = Servers(address.endpoints)
        return lambda: cls(servers, access, tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    @property
    def endpoint(self) -> str:
        return self._servers.present

    def next_endpoint(self) -> None:
        """Ask another server from now on, if there is one."""
        self._servers.turn()

    async def authenticate(self) -> None:
        """Log in, if there is a user; the token is for all requests after it.

        Raises:
            Unauthorized: etcd knows no such user and password.
        """
        self._token = None
        if self._access.user is not None:
            body = {"name": self._access.user, "password": self._access.password or ""}
            self._token = (await self._ask("auth/authenticate", body, wire.Authenticated)).token

    async def call(self, path: str, body: dict[str, Any], answer: type[A]) -> A:
        """Send one request.

        Raises:
            PeerUnreachable, PeerLost, DeadlineExceeded: no answer; it may have been done.
            RemoteFailed: etcd refuses; the code is gRPC's.
            Unauthorized: etcd wants another user, or a user at all.
        """
        try:
            return await self._ask(path, body, answer)
        except TokenEnded:
            await self.authenticate()
            return await self._ask(path, body, answer)

    async def _ask(self, path: str, body: dict[str, Any], answer: type[A]) -> A:
        with _translated(self.endpoint):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                response = await self._http.post(
                    f"{self.endpoint}/v3/{path}",
                    content=msgspec.json.encode(body),
                    headers=self._headers(),
                )
            if response.status_code != 200:
                raise _refusal(response.content, response.status_code, self.endpoint)
            return wire.decode(response.content, answer)

    @asynccontextmanager
    async def watch(
        self, prefix: bytes, start_revision: int
    ) -> AsyncIterator[AsyncIterator[wire.WatchResult]]:
        """Follow all keys under ``prefix`` from ``start_revision`` on.

        Raises:
            PeerUnreachable, PeerLost: the stream broke.
            DeadlineExceeded: nothing came for ``WATCH_SILENCE_S``; all is well, open it again.
        """
        request = {
            "key": prefix,
            "range_end": wire.prefix_end(prefix),
            "start_revision": str(start_revision),
        }
        content = msgspec.json.encode({"create_request": request})
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=WATCH_SILENCE_S)
        url = f"{self.endpoint}/v3/watch"
        with _translated(self.endpoint):
            async with self._http.stream(
                "POST", url, content=content, headers=self._headers(), timeout=timeout
            ) as response:
                if response.status_code != 200:
                    text = await response.aread()
                    raise _refusal(text, response.status_code, self.endpoint)
                async with aclosing(self._results(response)) as results:
                    yield results

    async def _results(self, response: httpx.Response) -> AsyncGenerator[wire.WatchResult, None]:
        async with aclosing(_lines(response)) as lines:
            async for text in lines:
                line = wire.decode(text, wire.WatchLine)
                if line.error is not None:
                    raise PeerLost(f"{self.endpoint} ended the watch: {line.error.message}")
                if line.result is not None:
                    yield line.result
        raise PeerLost(f"{self.endpoint} ended the watch")

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"authorization": self._token}


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream; httpx's own have no bound.

    A line of many pieces is copied twice, however many they are.
    """
    rest = bytearray()
    async for piece in response.aiter_bytes():
        *ends, tail = piece.split(b"\n")
        for end in ends:
            rest += end
            if rest.strip():
                yield bytes(rest)
            rest.clear()
        rest += tail
        if len(rest) > MAX_WATCH_LINE_NBYTES:
            raise FrameInvalid(f"a line of a watch exceeds {MAX_WATCH_LINE_NBYTES} bytes")


def _refusal(text: bytes, status: int, endpoint: str) -> TransferError:
    try:
        failure = wire.decode(text, wire.Failure)
    except msgspec.DecodeError:
        return FrameInvalid(f"{endpoint} answers {status}, which is not etcd's way: {text[:80]!r}")
    code, message = failure.code, failure.message
    if isinstance(failure.error, wire.StreamFailure):
        code, message = failure.error.grpc_code, failure.error.message
    message = message or str(failure.error)
    if any(known in message for known in _TOKEN_TEXTS):
        return TokenEnded(f"{endpoint}: {message}")
    if code in _NO_RIGHT or any(known in message for known in _AUTH_TEXTS):
        return Unauthorized(
            f"{endpoint} refuses: {message}: set KVFERRY_ETCD_USER and KVFERRY_ETCD_PASSWORD to a "
            "user that may read and write /kvferry/"
        )
    if code == 14 or status in (502, 503, 504):
        return PeerUnreachable(f"{endpoint}: {message}")
    return RemoteFailed(f"etcd-{code}", message)


class _translated:
    """The one place where foreign errors become ours."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        where = self._endpoint
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                raise PeerUnreachable(f"{where}: {error or 'no answer'}") from error
            case httpx.TimeoutException() | TimeoutError():
                raise DeadlineExceeded(f"{where} did not answer in time") from error
            case httpx.HTTPError() | httpx.StreamError():
                raise PeerLost(f"{where}: {error or type(error).__name__}") from error
            case httpx.InvalidURL():
                raise PeerUnreachable(f"{where}: {error}") from error
            case msgspec.DecodeError():
                raise FrameInvalid(f"{where} sent what is not etcd's: {error}") from error
