"""One peer as tcp sees it: an incarnation at an address, with the few connections to it.

Owns the operations that are not over, the window they share, the connections and the back-off
between failed connects. Knows no frames. Runs on the I/O loop, or on the application's thread while
that loop is lent (so nothing here asks asyncio for the running loop). A restart of the peer is
another ``TcpPeer``; other peers have windows and connections of their own.

::

    operation ──submit──▶ waits for its turn ──window──▶ requests on the least loaded connection
       │                       └── no connection: one is made; refused while backing off
       └── over when every request is answered; when one fails; when a connection that carries one
           of its requests breaks, or the last connection does
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from transfer.config import TransferConfig
from transfer.errors import PeerUnreachable, TransferError
from transfer.tcp_backoff import Backoff
from transfer.tcp_client import ClientLink
from transfer.tcp_cores import ReceiverCore
from transfer.tcp_handshake import NONCE_NBYTES, ClientHandshake
from transfer.tcp_operation import Request, TcpOperation
from transfer.tcp_resolver import Resolver
from transfer.window import RequestWindow


class TcpPeer:
    """All connections to one incarnation; makes them when they are needed."""

    def __init__(
        self,
        config: TransferConfig,
        own: str,
        loop: asyncio.AbstractEventLoop,
        resolver: Resolver,
        address: str,
        incarnation: str,
        core: ReceiverCore | None = None,
    ) -> None:
        self._config = config
        self._own = own
        self._resolver = resolver
        self._address = address
        self._incarnation = incarnation
        self._core = core
        self._loop = loop
        self._operations: dict[TcpOperation, None] = {}  # ordered set
        self._window: RequestWindow[Request] = RequestWindow(config.window_nbytes)
        self._links: list[ClientLink] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._backoff = Backoff()

    @property
    def idle(self) -> bool:
        """True if forgetting this peer loses nothing."""
        busy = self._links or self._operations or self._connecting
        return not busy and self._backoff.refusal(self._loop.time()) is None

    @property
    def quiet(self) -> bool:
        """True if a connection is there and nothing is under way."""
        return bool(self._links) and not self._operations and self._window.num_requests == 0

    @property
    def only_link(self) -> ClientLink | None:
        """The connection, where there is exactly one."""
        return self._links[0] if len(self._links) == 1 else None

    def submit(self, operation: TcpOperation) -> None:
        refusal = self._backoff.refusal(self._loop.time())
        if refusal is not None and not self._links:
            operation.finish(refusal)
            return
        self._operations[operation] = None
        self._window.add(operation, operation.move.priority)
        if refusal is None:
            self._grow()
        self._advance()

    def forget(self, operation: TcpOperation) -> None:
        """The operation was cancelled or failed: move no more of its bytes."""
        operation.finished = True
        if self._operations.pop(operation, 0) == 0:
            return
        self._window.drop(operation)
        for link in list(self._links):
            link.withdraw(operation)
        self._advance()

    def _advance(self) -> None:
        """Start as many requests as the window allows."""
        while self._links and (request := self._window.next()) is not None:
            self._least_loaded().start(request)

    def _least_loaded(self) -> ClientLink:
        if len(self._links) == 1:
            return self._links[0]
        return min(self._links, key=lambda link: link.load_nbytes)

    def on_answered(self, request: Request, error: TransferError | None) -> None:
        operation = request.operation
        self._window.done(request.nbytes, operation.move.priority)
        if error is None:
            operation.settle(request)
            if operation.finished:
                self._operations.pop(operation, None)
        else:
            operation.finish(error)
            self.forget(operation)
        self._advance()

    def on_withdrawn(self, request: Request) -> None:
        self._window.done(request.nbytes, request.operation.move.priority)
        self._advance()

    def on_link_lost(self, link: ClientLink, requests: list[Request], error: TransferError) -> None:
        with suppress(ValueError):  # lost before its hello was over
            self._links.remove(link)
        for request in requests:
            self._window.done(request.nbytes, request.operation.move.priority)
        struck = {request.operation: None for request in requests}
        if not self._links and not self._connecting:
            struck = dict(self._operations)
        self._fail(struck, error)
        self._advance()

    def _fail(self, operations: dict[TcpOperation, None], error: TransferError) -> None:
        """End all before one is forgotten: that makes room, which the next must not take."""
        for operation in operations:
            operation.finish(error)
        for operation in operations:
            self.forget(operation)

    def _grow(self) -> None:
        """Connect once more if that is allowed and every connection is busy."""
        num_links = len(self._links) + len(self._connecting)
        if num_links >= self._config.connections_per_peer:
            return
        if all(link.load_nbytes for link in self._links):
            task = self._loop.create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self) -> None:
        nonce = secrets.token_bytes(NONCE_NBYTES)
        secret = self._config.secret
        handshake = ClientHandshake(secret, self._own, self._incarnation, nonce)
        link = ClientLink(self._config, handshake, self, self._core)
        limit_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await link.open(self._address, self._resolver)
        except TransferError as error:
            self._on_unreachable(error)
        except TimeoutError:
            self._on_unreachable(
                PeerUnreachable(f"{self._address} did not answer within {limit_s} s")
            )
        else:
            self._backoff.succeeded()
            self._connecting.discard(asyncio.current_task())  # first: the link may be lost at once
            self._links.append(link)
            self._advance()

    def _on_unreachable(self, error: TransferError) -> None:
        self._backoff.failed(self._loop.time(), error)
        if not self._links:
            self._fail(dict(self._operations), error)

    async def finish(self, error: TransferError) -> None:
        """Say goodbye everywhere; operations end with ``error``."""
        self._stop_connecting()
        self._fail(dict(self._operations), error)
        await asyncio.gather(*(link.link.finish() for link in self._links))

    def abort(self, error: TransferError) -> None:
        """Break every connection at once; operations end with ``error``."""
        self._stop_connecting()
        for link in list(self._links):
            link.link.close(error)
        self._fail(dict(self._operations), error)

    def _stop_connecting(self) -> None:
        for task in self._connecting:
            task.cancel()
        self._connecting.clear()  # who comes before they have ended must connect anew
