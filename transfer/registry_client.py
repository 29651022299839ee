"""A node's seat in the cluster: ``RegistryMembership`` by channel, ``LocalMembership`` in process.

Owns joining, heart-beating, watching and coming back: after a lost lease, a lost channel or a
restart of the registry the node registers again by itself. Knows no roles' work.

::

    ┌──────────▶ connecting ──▶ registering ──▶ seated (heartbeats + watch stream)
    │ back-off      │               │ refused at first: join raises; later: logged, retried
    └───────────────┴───────────────┴──────────── any TransferError
                                          │ superseded: another process has this node id
                                          ▼
                                         ended, for good

Whose node id another process has is told so at ``join`` once that one is known to be alive; one
that was killed has the seat until its lease ends. The last view stays readable while the registry
is away; what it is after a restart of the registry decides ``registry_view.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast
from urllib.parse import urlsplit

from transfer.channel import LIVENESS_S, Channel, Hello, Network
from transfer.errors import (
    HelloRefused,
    PeerLost,
    RemoteFailed,
    TransferError,
)
from transfer.identity import Identity
from transfer.kept_seat import KeptSeat, first_failure
from transfer.lazy_timer import LazyTimer
from transfer.membership import (
    TAKEN_RETRY_S,
    MembershipView,
    NodeInfo,
    NodeStatus,
    SeatHolder,
    SeatQuery,
    SeatTaken,
    Subscribers,
    Superseded,
    ViewCallback,
)
from transfer.registry import (
    HEARTBEAT_S,
    OWN_PAUSE_S,
    REFUSED,
    Answer,
    Heartbeat,
    Leave,
    Register,
    Registry,
    Watch,
)
from transfer.registry_view import RegistryView

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = LIVENESS_S
BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 1.0
LOG_EVERY_S = 5.0  # while waiting for a registry
LEAVE_TIMEOUT_S = 1.0
WATCH_S = 30 * 24 * 3600.0  # streams need a deadline; a watch is simply renewed


class RegistryMembership(KeptSeat):
    """``transfer.membership.Membership`` at a registry that listens at ``join_address``."""

    def __init__(self, network: Network, join_address: str, identity: Identity) -> None:
        super().__init__(identity, f"registry answered at {join_address}")
        self._network = network
        self._address = join_address
        self._info: NodeInfo | None = None
        self._status: Callable[[], NodeStatus] = NodeStatus
        self._channel: Channel | None = None
        self._seen = RegistryView()
        self._hold_timer = LazyTimer(self._hold_due)

    @property
    def view(self) -> MembershipView:
        return self._subscribers.view

    def subscribe(self, callback: ViewCallback) -> None:
        self._subscribers.add(callback)

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        assert info.identity == self._identity, "a seat belongs to one process life"
        self._info = info
        self._status = status
        await self._start()

    async def leave(self) -> None:
        self._left = True
        await self._stop()
        channel, self._channel = self._channel, None
        if channel is None:
            return
        if self._info is not None and not channel.closed:
            deadline_s = asyncio.get_running_loop().time() + LEAVE_TIMEOUT_S
            leave = Leave(node_id=self._identity.node_id, incarnation=self._identity.incarnation)
            try:
                await channel.request(leave, Answer, deadline_s=deadline_s)
            except TransferError as error:
                logger.info("left without the registry's answer: %s", error)
        await channel.close()

    def abort(self) -> None:
        super().abort()
        if self._channel is not None:
            self._channel.abort()

    async def _run(self) -> None:
        """Keep the seat until ``_stopping``.

        A task group whose child fails in the same turn of the loop in which its owner is cancelled
        raises the failure: the cancellation is lost (CPython before 3.13).
        """
        loop = asyncio.get_running_loop()
        backoff_s = BACKOFF_MIN_S
        next_log_s = loop.time()
        while not self._stopping:
            try:
                await self._connect()
                await self._keep_seat()
            except HelloRefused as error:
                if self._give_up(error):
                    self._drop_channel()
                    return
                backoff_s = BACKOFF_MAX_S
            except TransferError as error:
                if self._connected:  # it had a seat: start over
                    backoff_s, next_log_s = BACKOFF_MIN_S, loop.time()
                if loop.time() >= next_log_s:
                    next_log_s = loop.time() + LOG_EVERY_S
                    text = "%s waits for the registry at %s (%s); %s"
                    args = (self._identity.node_id, self._address, error, self._remedy())
                    logger.warning(text, *args)
            self._connected = False
            if self._stopping:
                return
            self._drop_channel()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.abort()
            self._channel = None

    async def _connect(self) -> None:
        deadline_s = asyncio.get_running_loop().time() + CONNECT_TIMEOUT_S
        hello = Hello(identity=self._identity)
        self._channel = await self._network.connect(self._address, hello, deadline_s=deadline_s)
        await self._register()

    async def _register(self) -> None:
        """Take the seat; while another process has it, find out whether that one is alive.

        Raises:
            SeatTaken: it is.
            Superseded: it is, and has the seat that was ours.
            HelloRefused: the contract differs.
        """
        query = SeatQuery(self._identity.node_id)
        try:
            while not query.is_free(await self._taken_by()):  # noqa: ASYNC110 (it is asked)
                await asyncio.sleep(TAKEN_RETRY_S)
        except SeatTaken as error:
            if self._was_seated():
                raise Superseded(str(error)) from error
            raise

    async def _taken_by(self) -> SeatHolder | None:
        """Ask for the seat; return who has it instead."""
        if self._info is None:
            return None
        try:
            return (await self._request(Register(info=self._info, status=self._status()))).holder
        except RemoteFailed as error:
            if error.code == REFUSED:
                raise HelloRefused(error.message) from error
            raise

    async def _keep_seat(self) -> None:
        """Heartbeat and watch side by side; the first failure of one ends both."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="membership watch")
                if self._info is not None:
                    group.create_task(self._heartbeats(), name="membership heartbeats")
        except* TransferError as errors:
            failure = first_failure(errors, Superseded)
        raise failure

    async def _watch(self) -> None:
        assert self._channel is not None
        deadline_s = asyncio.get_running_loop().time() + WATCH_S
        stream = self._channel.stream(Watch(), MembershipView, deadline_s=deadline_s)
        try:
            async with aclosing(cast("AsyncGenerator[MembershipView, None]", stream)) as views:
                async for view in views:
                    self._connected = True
                    self._take_in(view, self._channel.peer)
                    self._seat_taken()
        finally:
            self._hold_timer.cancel()  # while the registry is away nobody can come back
        raise PeerLost(f"the registry at {self._address} ended the watch")

    def _take_in(self, view: MembershipView, registry: Identity) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._seen.take(now_s, registry.incarnation, view) and self._seen.num_held:
            text = "%s: the registry at %s has started anew; %d members are held till they register"
            logger.info(text, self._identity.node_id, self._address, self._seen.num_held)
        self._release(now_s)

    def _release(self, now_s: float) -> None:
        """Publish what is new, and see to whom is still held."""
        for node_id in self._seen.tick(now_s):
            logger.warning("%s did not come back after the registry did; removed", node_id)
        if self._seen.version != self._subscribers.view.version:
            self._subscribers.publish(self._seen.view(now_s))
        next_s = self._seen.next_timer_s()
        if next_s is not None:
            self._hold_timer.arm(next_s)

    def _hold_due(self, now_s: float, late_s: float) -> None:
        if late_s > OWN_PAUSE_S:
            self._seen.forgive(now_s)  # what the registry said meanwhile is not read yet
        self._release(now_s)

    async def _heartbeats(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time() + HEARTBEAT_S
        while True:
            await asyncio.sleep(next_s - loop.time())
            next_s = max(next_s + HEARTBEAT_S, loop.time())
            beat = Heartbeat(
                node_id=self._identity.node_id,
                incarnation=self._identity.incarnation,
                status=self._status(),
            )
            outcome = (await self._request(beat)).outcome
            if outcome == "superseded":
                raise Superseded(
                    f"another process has joined as {self._identity.node_id}; this one is no "
                    "longer listed. Give each process its own node id"
                )
            if outcome == "unknown":
                logger.warning("%s lost its lease, registering again", self._identity.node_id)
                await self._register()

    async def _request(self, message: Register | Heartbeat) -> Answer:
        assert self._channel is not None
        deadline_s = asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S
        return await self._channel.request(message, Answer, deadline_s=deadline_s)

    def _remedy(self) -> str:
        port = urlsplit(self._address).port
        return f"start it with: kvferry gateway --join-port {port}" if port else "start the gateway"


class LocalMembership:
    """``Membership`` of the process that hosts the registry (the gateway)."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._subscribers = Subscribers()
        self._info: NodeInfo | None = None
        self._status: Callable[[], NodeStatus] = NodeStatus
        self._timer: asyncio.TimerHandle | None = None
        registry.on_change(self._changed)

    @property
    def view(self) -> MembershipView:
        return self._registry.view(self._now_s())

    @property
    def connected(self) -> bool:
        return True

    @property
    def superseded(self) -> bool:
        return False  # who holds the registry takes its seat back, see ``_beat``

    def subscribe(self, callback: ViewCallback) -> None:
        self._subscribers.view = self.view
        self._subscribers.add(callback)

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        assert self._info is None, "a membership is joined once"
        self._registry.register(self._now_s(), info, status())
        self._info, self._status = info, status
        self._beat_later()

    async def watch_only(self) -> None:
        """Follow the cluster without being listed in it."""

    async def leave(self) -> None:
        self.abort()
        info, self._info = self._info, None
        if info is not None:
            identity = info.identity
            self._registry.leave(self._now_s(), identity.node_id, identity.incarnation)

    def abort(self) -> None:
        """Stop heart-beating at once. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        assert self._info is not None
        now_s, status = self._now_s(), self._status()
        identity = self._info.identity
        outcome = self._registry.heartbeat(now_s, identity.node_id, identity.incarnation, status)
        if outcome != "ok":  # the loop stood still for longer than the lease
            self._registry.register(now_s, self._info, status)
        self._beat_later()

    def _changed(self) -> None:
        if self._registry.version != self._subscribers.view.version:
            self._subscribers.publish(self.view)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
