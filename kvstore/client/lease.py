"""Keeps a promise of a store node alive while a transfer needs it, and ends the transfer with it.

Owns the end of one read lease or of the reservations of one batch, as the client counts it: from
the moment of the request (and as long after it as the node says that it waited with the grant), so
that the node's own count ends later. The promise is renewed at
half-life; when it cannot be, transfers under it are cancelled before the node may reuse the memory.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvstore.client.link import StoreLink
from kvstore.config import StoreClientConfig
from kvstore.messages import LeasesRenewed, PageGrant, RenewLeases
from transfer.errors import DeadlineExceeded, TransferError

RENEW_AT = 0.5  # of a lease's time
RENEW_RETRY_AT = 0.75  # a renewal that got no answer is tried again here, once
RESERVE = 0.25  # no batch starts in the last quarter of a lease


class Lease:
    """One promise of one node.

    Args:
        sent_s: when it was asked for.
        lease_ids, writes: what to renew.
    """

    def __init__(
        self,
        link: StoreLink,
        config: StoreClientConfig,
        *,
        incarnation: str,
        sent_s: float,
        lease_s: float,
        lease_ids: tuple[int, ...] = (),
        writes: tuple[PageGrant, ...] = (),
    ) -> None:
        self._link = link
        self._config = config
        self._message = RenewLeases(incarnation=incarnation, lease_ids=lease_ids, writes=writes)
        self._lease_s = lease_s
        self._started_s = sent_s
        self._scopes: dict[asyncio.Timeout, None] = {}  # of transfers under this promise
        self._timer: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None

    @property
    def end_s(self) -> float:
        return self._started_s + self._lease_s

    @property
    def short(self) -> bool:
        """Too little is left to begin another transfer."""
        return _now_s() >= self.end_s - RESERVE * self._lease_s

    def hold(self) -> _Hold:
        """``async with lease.hold()`` runs the body until it ends, or until the promise does.

        Raises:
            DeadlineExceeded: the promise ended first; the body was cancelled.
        """
        return _Hold(self)

    async def __aenter__(self) -> Lease:
        """Renew the promise at half-life while the body runs."""
        self._renew_later(RENEW_AT)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])

    def _renew_later(self, at: float) -> None:
        """A timer costs next to nothing; a task only what really needs renewing."""
        when_s = self._started_s + at * self._lease_s
        self._timer = asyncio.get_running_loop().call_at(when_s, self._begin_to_renew, at)

    def _begin_to_renew(self, at: float) -> None:
        name = f"renew at {self._link.node_id}"
        self._renewing = asyncio.create_task(self._renew(at), name=name)

    async def _renew(self, at: float) -> None:
        sent_s = _now_s()
        try:
            limit_s = min(self.end_s, sent_s + self._config.op_timeout_s)
            reply = await self._link.call(self._message, LeasesRenewed, deadline_s=limit_s)
        except TransferError:
            if at < RENEW_RETRY_AT:
                self._renew_later(RENEW_RETRY_AT)
            return
        if not all((*reply.leases, *reply.writes)):
            return  # the former promise is all there is
        self._started_s, self._lease_s = sent_s, reply.lease_s
        for scope in self._scopes:
            scope.reschedule(self.end_s)
        self._renew_later(RENEW_AT)


class _Hold:
    """One transfer under a promise."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._scope = asyncio.timeout_at(lease.end_s)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._lease._scopes[self._scope] = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._lease._scopes[self._scope]
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise DeadlineExceeded("the node's promise has ended") from None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
