"""One peer as ucx sees it: an incarnation at an address, with the connection to it.

Owns the connection, the operations that wait for it, and the back-off between failed connects.
Knows no messages. Runs on the ucx loop, or while that is lent (``quiet``, and ``submit`` if so).
A restart of the peer is another ``UcxPeer``.

::

    operation ──submit──▶ waits ──connected──▶ UcxClient        connection lost ──▶ made anew by the
                            └── cannot connect ──▶ fails         next operation
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from transfer.config import TransferConfig
from transfer.errors import PeerUnreachable, TransferError
from transfer.tcp_backoff import Backoff
from transfer.tcp_handshake import NONCE_NBYTES, ClientHandshake
from transfer.tcp_resolver import Resolver
from transfer.ucx_binding import Context, UcxUnavailable
from transfer.ucx_client import UcxClient
from transfer.ucx_farewell import Farewells
from transfer.ucx_meeting import Meeting
from transfer.ucx_operation import UcxOperation


class UcxPeer:
    """Makes the connection when it is needed."""

    def __init__(
        self,
        config: TransferConfig,
        own: str,
        context: Context,
        farewells: Farewells,
        resolver: Resolver,
        address: str,
        incarnation: str,
        *,
        on_done: Callable[[], None],
    ) -> None:
        """Args:
        on_done: called after each operation that has succeeded: the next may come at once.
        """
        self._config = config
        self._own = own
        self._context = context
        self._farewells = farewells
        self._resolver = resolver
        self._address = address
        self._incarnation = incarnation
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._client: UcxClient | None = None
        self._waiting: dict[UcxOperation, None] = {}  # ordered set
        self._connecting: asyncio.Task[None] | None = None
        self._backoff = Backoff()

    @property
    def idle(self) -> bool:
        """True if forgetting this peer loses nothing."""
        busy = self._client is not None or self._connecting is not None
        return not busy and self._backoff.refusal(self._loop.time()) is None

    @property
    def quiet(self) -> bool:
        """True if the connection is open and carries nothing."""
        return self._client is not None and self._client.quiet

    def submit(self, operation: UcxOperation) -> None:
        if self._client is not None:
            self._client.submit(operation)
            return
        refusal = self._backoff.refusal(self._loop.time())
        if refusal is not None:
            operation.finish(refusal)
            return
        self._waiting[operation] = None
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    def withdraw(self, operation: UcxOperation, error: TransferError) -> None:
        """The operation was cancelled or failed: move no more of its bytes."""
        self._waiting.pop(operation, None)
        if self._client is not None:
            self._client.withdraw(operation, error)
        else:
            operation.finish(error)

    async def _connect(self) -> None:
        nonce = secrets.token_bytes(NONCE_NBYTES)
        handshake = ClientHandshake(self._config.secret, self._own, self._incarnation, nonce)
        client = UcxClient(self._config, self._on_gone, self._on_done)
        meeting = Meeting(self._context, self._farewells)
        limit_s = self._config.connect_timeout_s
        failure: TransferError | None = PeerUnreachable(f"connecting to {self._address} was ended")
        try:
            async with asyncio.timeout(limit_s):
                await client.open(handshake, self._address, self._resolver, meeting)
            failure = None
        except PeerUnreachable as error:  # its port may be blocked while that of tcp is not
            failure = UcxUnavailable(str(error))
        except TransferError as error:
            failure = error
        except TimeoutError:
            failure = UcxUnavailable(f"{self._address} did not answer within {limit_s} s")
        finally:
            if self._connecting is asyncio.current_task():  # else it was stopped
                self._connecting = None
                self._on_outcome(client, failure)

    def _on_outcome(self, client: UcxClient, failure: TransferError | None) -> None:
        waiting, self._waiting = self._waiting, {}
        if failure is None:
            self._backoff.succeeded()
            self._client = client
            for operation in waiting:
                client.submit(operation)
        else:
            self._backoff.failed(self._loop.time(), failure)
            for operation in waiting:
                operation.finish(failure)

    def _on_gone(self) -> None:
        self._client = None

    async def finish(self, error: TransferError) -> None:
        """Say goodbye; operations end with ``error``."""
        self._stop_connecting(error)
        if self._client is not None:
            await self._client.link.finish()

    def abort(self, error: TransferError) -> None:
        """Cut the connection; operations end with ``error``."""
        self._stop_connecting(error)
        if self._client is not None:
            self._client.link.close(error)

    def _stop_connecting(self, error: TransferError) -> None:
        waiting, self._waiting = self._waiting, {}
        for operation in waiting:
            operation.finish(error)
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None  # who comes before it has ended must connect anew
