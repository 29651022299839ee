"""A small client of etcd: requests, one watch stream, several endpoints, errors of our tree.

Owns the HTTP connections (httpx, over etcd's own JSON gateway) and the translation of every foreign
error. Knows no members. ``next_endpoint`` turns to another server of the same etcd cluster.

Proxies of the environment are not used: etcd is a neighbour.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
_AUTH_TEXTS = ("authentication failed", "invalid auth token", "user name is empty")

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


class EtcdClient:
    """Use as an async context manager, which owns the connections.

    Args:
        tls: how to speak to ``https`` endpoints; None where there are none.
    """

    def __init__(
        self, address: EtcdAddress, access: EtcdAccess, tls: ssl.SSLContext | None
    ) -> None:
        self._address = address
        self._access = access
        self._turn = 0
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
        return lambda: cls(address, access, tls)

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
        return self._address.endpoints[self._turn % len(self._address.endpoints)]

    def next_endpoint(self) -> None:
        """Ask another server from now on, if there is one."""
        self._turn += 1

    async def authenticate(self) -> None:
        """Log in, if there is a user; the token is for all requests after it.

        Raises:
            Unauthorized: etcd knows no such user and password.
        """
        self._token = None
        if self._access.user is not None:
            body = {"name": self._access.user, "password": self._access.password or ""}
            self._token = (await self.call("auth/authenticate", body, wire.Authenticated)).token

    async def call(self, path: str, body: dict[str, Any], answer: type[A]) -> A:
        """Send one request.

        Raises:
            PeerUnreachable, PeerLost, DeadlineExceeded: no answer; it may have been done.
            RemoteFailed: etcd refuses; the code is gRPC's.
            Unauthorized: etcd wants another user, or a user at all.
        """
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
                yield self._results(response)

    async def _results(self, response: httpx.Response) -> AsyncIterator[wire.WatchResult]:
        async for text in _lines(response):
            line = wire.decode(text, wire.WatchLine)
            if line.error is not None:
                raise PeerLost(f"{self.endpoint} ended the watch: {line.error.message}")
            if line.result is not None:
                yield line.result
        raise PeerLost(f"{self.endpoint} ended the watch")

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"authorization": self._token}


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; httpx's own have no bound."""
    rest = bytearray()
    async for piece in response.aiter_bytes():
        rest += piece
        *complete, tail = bytes(rest).split(b"\n") if b"\n" in piece else [bytes(rest)]
        for line in complete:
            if line.strip():
                yield line
        rest = bytearray(tail)
        if len(rest) > MAX_WATCH_LINE_NBYTES:
            raise FrameInvalid(f"a line of a watch exceeds {MAX_WATCH_LINE_NBYTES} bytes")


def _refusal(text: bytes, status: int, endpoint: str) -> TransferError:
    try:
        failure = wire.decode(text, wire.Failure)
    except msgspec.DecodeError:
        return FrameInvalid(f"{endpoint} answers {status}, which is not etcd's way: {text[:80]!r}")
    message = failure.message or failure.error
    if failure.code in _NO_RIGHT or any(known in message for known in _AUTH_TEXTS):
        return Unauthorized(
            f"{endpoint} refuses: {message}: set KVFERRY_ETCD_USER and KVFERRY_ETCD_PASSWORD to a "
            "user that may read and write /kvferry/"
        )
    if failure.code == 14 or status in (502, 503, 504):
        return PeerUnreachable(f"{endpoint}: {message}")
    return RemoteFailed(f"etcd-{failure.code}", message)


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
