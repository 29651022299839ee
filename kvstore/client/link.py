"""One store node as one client sees it: a channel, the segment's tokens, and a back-off.

Owns connecting (one attempt at a time, shared by all callers), the two tokens, and the verdict on
errors. Knows no pages.

::

    idle ──call──▶ connecting ──hello, OpenStore──▶ open ──lost, stale──▶ backing off
                        └──────── unreachable ─────────────────────────────▲    │
      ▲                                                                         │
      └──────────────────────────── back-off over ◀─────────────────────────────┘

While a link backs off every call fails at once, so that a dead node costs one timeout per back-off
period, not one per request.

The verdict on a node is its control channel's. A bulk operation that fails says little: connections
are reset, and the next operation makes a new one. Only ``BULK_INCIDENTS_MAX`` of them in a row,
each begun after the one before had failed, count as a failure of the node.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple, TypeVar

import msgspec

from kvstore.config import StoreClientConfig
from kvstore.messages import HoldSession, OpenStore, StoreDone, StoreOpened
from transfer.channel import Channel, Hello, Network
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerUnreachable,
    RegionRevoked,
    RemoteFailed,
    Stale,
    TransferError,
    Unauthorized,
)
from transfer.identity import NodeId
from transfer.membership import NodeInfo

log = logging.getLogger(__name__)

SESSION_S_MAX = 1e8  # three years
SLOW_S = 0.5  # an unanswered call of this age counts as a failure of the node
NO_OFFERS_S = 10.0  # after the node could not read from here, before it is asked to again
BULK_INCIDENTS_MAX = 4  # failed bulk operations in a row that count as a failure of the node
OUR_MISTAKES = ("bad_message", "bad_page", "bad_keys")  # codes: asked again it fails again

R = TypeVar("R", bound=msgspec.Struct)


def check_count(answers: Sequence[object], num_asked: int) -> None:
    """Check that a node answered for each page it was asked about.

    Raises:
        FrameInvalid: it did not.
    """
    if len(answers) != num_asked:
        raise FrameInvalid(f"{len(answers)} answers for {num_asked} pages")


class _Session(NamedTuple):
    channel: Channel
    opened: StoreOpened


class StoreLink:
    """See the module's docstring. One link serves one incarnation of a member."""

    def __init__(
        self,
        info: NodeInfo,
        *,
        network: Network,
        hello: Hello,
        config: StoreClientConfig,
        counters: Counter[str],
    ) -> None:
        self.info = info
        self._network = network
        self._hello = hello
        self._config = config
        self._counters = counters
        self._session: _Session | None = None
        self._connecting: asyncio.Task[TransferError | None] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._retry_s = 0.0
        self._num_failures = 0
        self._num_incidents = 0
        self._incident_s = 0.0
        self._offers_from_s = 0.0
        self._mistakes: set[str] = set()  # codes that were logged
        self._closed = False

    @property
    def node_id(self) -> NodeId:
        return self.info.identity.node_id

    @property
    def backs_off_s(self) -> float:
        """Seconds until the node is asked again; 0 when it is asked now."""
        return max(0.0, self._retry_s - _now_s())

    @property
    def usable(self) -> bool:
        """A call would be tried, not refused at once."""
        return not self._closed and not self.backs_off_s

    async def call(
        self, message: msgspec.Struct, reply: type[R], *, deadline_s: float, wait_s: float = 0.0
    ) -> R:
        """Ask the node; bounded by ``deadline_s`` and by the op timeout plus ``wait_s``.

        Raises:
            TransferError: as the channel does; ``PeerUnreachable`` at once while backing off.
        """
        session = await self._open(deadline_s)
        started_s = _now_s()
        limit_s = min(deadline_s, started_s + wait_s + self._config.op_timeout_s)
        try:
            answer = await session.channel.request(message, reply, deadline_s=limit_s)
        except TransferError as error:
            self.judge(error, waited_s=_now_s() - started_s - wait_s)
            raise
        self._num_failures = 0
        return answer

    @property
    def incarnation(self) -> str | None:
        """Of the node's process, as far as is known."""
        return None if self._session is None else self._session.opened.incarnation

    def tokens(self, incarnation: str) -> StoreOpened:
        """The tokens of the incarnation that made a grant.

        Raises:
            Stale: the node has been replaced since.
        """
        if self._session is None or self._session.opened.incarnation != incarnation:
            raise Stale(f"{self.node_id}: incarnation {incarnation} is gone")
        return self._session.opened

    def judge(self, error: TransferError, *, waited_s: float) -> None:
        """Take note of a failed call: back off, reconnect, or neither."""
        if isinstance(error, RemoteFailed):
            if error.code in OUR_MISTAKES and error.code not in self._mistakes:
                self._mistakes.add(error.code)
                log.warning("%s takes no such request from here: %s", self.node_id, error)
            if error.code in ("stale_incarnation", "closed"):
                self._drop_session()
            if error.code == "closed":
                self._back_off()
            return
        if isinstance(error, DeadlineExceeded):
            if waited_s >= SLOW_S:
                self._back_off()
            return
        self._drop_session()
        self._back_off()

    def judge_bulk(self, error: TransferError, *, started_s: float) -> None:
        """Take note of a failed bulk operation that was begun at ``started_s``.

        Operations that were under way together fail together: they are one incident.
        """
        self._counters["bulk_failures"] += 1
        if isinstance(error, RegionRevoked | Stale | Unauthorized):
            self._drop_session()  # the tokens are void: the next call fetches new ones
        if started_s < self._incident_s:
            return
        self._incident_s = _now_s()
        self._num_incidents += 1
        if self._num_incidents >= BULK_INCIDENTS_MAX:
            self._num_incidents = 0
            self._back_off()

    @property
    def takes_offers(self) -> bool:
        """As far as is known, the node can read from this process's memory."""
        return not self._offers_from_s or _now_s() >= self._offers_from_s

    def cannot_read(self) -> None:
        """The node could not read what it was offered."""
        self._offers_from_s = _now_s() + NO_OFFERS_S

    def bulk_done(self) -> None:
        """A bulk operation has succeeded."""
        self._num_incidents = 0

    def _back_off(self) -> None:
        delay_s = self._config.backoff_s * 2**self._num_failures
        self._retry_s = _now_s() + min(delay_s, self._config.backoff_max_s)
        self._num_failures = min(self._num_failures + 1, 16)
        self._counters["backoffs"] += 1

    # ---- connecting

    def connect(self) -> asyncio.Task[TransferError | None]:
        """Start connecting unless that is under way; the link owns the task.

        Called when the node appears, so that the first request finds an open channel.
        """
        if self._connecting is None or self._connecting.done():
            name = f"connect {self.node_id}"
            self._connecting = asyncio.create_task(self._connect(), name=name)
        return self._connecting

    async def _open(self, deadline_s: float) -> _Session:
        if _now_s() < self._retry_s:
            raise PeerUnreachable(f"{self.node_id} at {self.info.address} is skipped for now")
        if self._session is not None and not self._session.channel.closed:
            return self._session
        if self._closed:
            raise PeerUnreachable(f"{self.node_id} has left the cluster")
        try:
            connecting = self.connect()
            async with asyncio.timeout_at(deadline_s):
                await asyncio.wait([connecting])  # its cancellation is not the caller's
        except TimeoutError:
            raise DeadlineExceeded(f"connecting to {self.info.address}") from None
        if not connecting.cancelled() and (error := connecting.result()) is not None:
            raise error
        if self._session is None:
            raise PeerUnreachable(f"{self.node_id} has left the cluster")
        return self._session

    async def _connect(self) -> TransferError | None:
        """Connect and fetch the tokens; an error is a result, as many callers may await it."""
        self._drop_session()
        self._counters["connects"] += 1
        deadline_s = _now_s() + self._config.op_timeout_s
        channel: Channel | None = None
        try:
            address, hello = self.info.address, self._hello
            channel = await self._network.connect(address, hello, deadline_s=deadline_s)
            if channel.peer.node_id != self.node_id:
                raise Stale(f"{address} is {channel.peer.node_id} now, not {self.node_id}")
            opened = await channel.request(OpenStore(), StoreOpened, deadline_s=deadline_s)
        except TransferError as error:
            if channel is not None:
                channel.abort()
            self._back_off()
            return error
        except BaseException:
            if channel is not None:
                channel.abort()
            raise
        self._session = _Session(channel, opened)
        self._holding = asyncio.create_task(_hold(channel), name=f"hold {self.node_id}")
        if self._closed:
            self._drop_session()
        return None

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.channel.abort()
            self._session = None
        if self._holding is not None:
            self._holding.cancel()

    async def close(self) -> None:
        """Close the channel in order; idempotent."""
        session, connecting = self._session, self._connecting
        self._session = None
        self.abort()
        if session is not None:
            await session.channel.close()
        waiting = [task for task in (connecting, self._holding) if task is not None]
        await asyncio.gather(*waiting, return_exceptions=True)

    def abort(self) -> None:
        """Drop the channel at once; calls in flight fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        self._drop_session()


async def _hold(channel: Channel) -> None:
    """Let the node notice when this process is gone: it gives up then what we were writing."""
    stream = channel.stream(HoldSession(), StoreDone, deadline_s=_now_s() + SESSION_S_MAX)
    try:
        async with aclosing(stream) as items:  # type: ignore[type-var]
            async for _ in items:
                pass
    except TransferError:
        return  # the next call finds out what is wrong with the channel


def _now_s() -> float:
    return asyncio.get_running_loop().time()
