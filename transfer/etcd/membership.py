"""``Membership`` on etcd: the asyncio shell.

Owns the task that holds the seat (``seat.py``), the watch that feeds the view (``table.py``), the
back-off, and what is said of it all. Decisions are the cores'.

::

    ┌──────────▶ connecting ──▶ taking the seat ──▶ seated (keep-alives + watch)
    │ back-off      │               │ refused at first: join raises; later: logged, retried
    └───────────────┴───────────────┴──────────── any TransferError, LeaseLost
                                          │ superseded: another process has this node id
                                          ▼
                                         ended, for good

While etcd is away the view stays as it was: nobody is gone because nobody says so.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from transfer.errors import (
    DeadlineExceeded,
    HelloRefused,
    PeerLost,
    TransferError,
    Unauthorized,
)
from transfer.etcd import wire
from transfer.etcd.address import EtcdAccess, EtcdAddress
from transfer.etcd.client import EtcdClient
from transfer.etcd.listing import ages_s, list_keys
from transfer.etcd.records import Keys
from transfer.etcd.seat import LeaseLost, Seat
from transfer.etcd.table import MemberTable
from transfer.identity import Identity
from transfer.kept_seat import KeptSeat, first_failure
from transfer.membership import (
    MembershipView,
    NodeInfo,
    NodeStatus,
    Superseded,
    ViewCallback,
)

logger = logging.getLogger(__name__)

KEEP_EVERY_S = 1.0  # four times in a lease
PULSE_S = 0.5  # status is looked at, timers are served
REFRESH_S = 5.0  # a status that does not change is written again after so long
SETTLE_S = 1.0  # until etcd has ended all leases that ran out while it stood still
BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 1.0
LOG_EVERY_S = 5.0  # while waiting for etcd before there is a seat
LEAVE_TIMEOUT_S = 1.0


class EtcdMembership(KeptSeat):
    """``transfer.membership.Membership`` at an etcd.

    Args:
        renewed: the process has another incarnation from now on; called before anybody is told.
        rng: spreads retries; needs no seed.

    Raises:
        OSError: a certificate cannot be read.
    """

    def __init__(
        self,
        address: EtcdAddress,
        identity: Identity,
        *,
        access: EtcdAccess | None = None,
        renewed: Callable[[Identity], None] = lambda identity: None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(identity, f"etcd answered at {address}")
        self._address = address
        self._make_client = EtcdClient.factory(address, access or EtcdAccess())
        self._renewed = renewed
        self._rng = rng or random.Random()
        self._keys = Keys(address)
        self._table = MemberTable(self._keys)
        self._seat: Seat | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._away = False  # etcd failed us since the last list of members

    @property
    def view(self) -> MembershipView:
        return self._table.view(self._now_s())

    @property
    def identity(self) -> Identity:
        """Who this process is now: another incarnation after others have seen it leave."""
        return self._identity if self._seat is None else self._seat.info.identity

    def subscribe(self, callback: ViewCallback) -> None:
        self._subscribers.view = self.view
        self._subscribers.add(callback)

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        """See ``Membership``.

        Raises:
            Unauthorized: etcd knows no such user.
        """
        assert info.identity == self._identity, "a seat belongs to one process life"
        self._seat = Seat(self._keys, info, status, renewed=self._renewed, rng=self._rng)
        await self._start()

    async def leave(self) -> None:
        self._left = True
        await self._stop()
        seat = self._seat
        if seat is None or seat.lease is None or self._superseded:
            return
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S), self._make_client() as client:
                await client.authenticate()
                await seat.give_up(client)
        except (TransferError, TimeoutError) as error:
            logger.info("left without etcd's answer, the lease runs out: %s", error)

    # ---- the task

    async def _run(self) -> None:
        self._beat(self._now_s())
        backoff_s, next_log_s = BACKOFF_MIN_S, 0.0
        async with self._make_client() as client:
            while not self._stopping:
                try:
                    await self._session(client)
                except LeaseLost as error:
                    logger.warning("%s", error)
                    backoff_s = BACKOFF_MIN_S
                except (HelloRefused, Unauthorized) as error:
                    if self._give_up(error):
                        return
                    backoff_s = BACKOFF_MAX_S
                except TransferError as error:
                    backoff_s = BACKOFF_MIN_S if self._connected else backoff_s
                    next_log_s = self._say_away(error, client.endpoint, next_log_s)
                    client.next_endpoint()
                self._connected = False
                if self._stopping:
                    return
                await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _say_away(self, error: TransferError, endpoint: str, next_log_s: float) -> float:
        """Say once that etcd is lost; while there is no seat yet, again and again.

        After this process stood still its connections are broken, whatever etcd does: the first
        failure says nothing of etcd, the second one does.
        """
        assert self._seated is not None
        now_s, me = self._now_s(), self._identity.node_id
        if self._seated.done():
            we_slept = self._seat is not None and self._seat.history.stood_still
            away = self._away or not (we_slept and self._connected)
            if away and not self._away:
                logger.warning("%s: etcd is away, the last view stays (%s)", me, error)
            self._away = away
        elif now_s >= next_log_s:
            text = "%s waits for etcd at %s (%s); %s"
            logger.warning(text, me, endpoint, error, self._remedy())
            return now_s + LOG_EVERY_S
        return next_log_s

    def _remedy(self) -> str:
        first = self._address.endpoints[0]
        return f"start it with: etcd --listen-client-urls {first} --advertise-client-urls {first}"

    # ---- one session

    async def _session(self, client: EtcdClient) -> None:
        """Take the seat, take the view, and keep both until something fails."""
        await client.authenticate()
        if self._seat is not None:
            settle_s = SETTLE_S if self._away else 0.0
            await self._seat.take(client, self._table.stays(), settle_s)
        revision = await self._take_view(client)
        failure: TransferError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(client, revision), name="etcd watch")
                group.create_task(self._keep(client), name="etcd keep-alive")
        except* TransferError as errors:
            failure = first_failure(errors, Superseded, LeaseLost)
        if failure is not None and not self._stopping:
            raise failure

    async def _take_view(self, client: EtcdClient) -> int:
        """List the members; return the revision that the view is of."""
        listing = await list_keys(client, self._keys)
        if self._seat is not None:
            self._seat.check(listing.kvs)  # somebody may have come between
        watches = self._seat is None  # a member sees the others renew; a watcher comes and goes
        heard = await ages_s(client, self._keys, listing) if watches else {}
        if self._away:
            logger.info("%s: etcd is back", self._identity.node_id)
        self._table.reset(self._now_s(), listing.kvs, after_outage=self._away)
        self._table.heard_before(self._now_s(), heard)
        self._away, self._connected = False, True
        self._publish()
        self._seat_taken()
        return listing.revision

    async def _watch(self, client: EtcdClient, revision: int) -> None:
        while True:
            try:
                async with client.watch(self._keys.prefix, revision + 1) as results:
                    async for result in results:
                        if result.compact_revision:
                            break
                        revision = self._take_in(result, revision)
            except DeadlineExceeded:
                continue  # nothing happened for a while: from the same revision on, anew
            # The history since ``revision`` is no more, though etcd was there all the time.
            revision = await self._take_view(client)

    def _take_in(self, result: wire.WatchResult, revision: int) -> int:
        """Apply one message of a watch; return the revision that the view is of now."""
        if result.canceled:
            raise PeerLost(f"etcd ended the watch: {result.cancel_reason}")
        self._table.apply(self._now_s(), result.events)
        self._publish()
        if self._seat is not None:
            self._seat.check_news(result.events)
        return max([revision, *(event.kv.mod_revision for event in result.events)])

    async def _keep(self, client: EtcdClient) -> None:
        """Renew the lease and write what changes; a watcher only asks whether etcd is there."""
        now_s = self._now_s()
        keep_s, say_s = now_s + KEEP_EVERY_S, now_s + REFRESH_S
        while True:
            await asyncio.sleep(PULSE_S)
            now_s = self._now_s()
            if now_s >= keep_s:
                keep_s = now_s + KEEP_EVERY_S
                await (self._ask(client) if self._seat is None else self._seat.keep(client))
            if self._seat is not None and (now_s >= say_s or self._seat.has_news()):
                say_s = now_s + REFRESH_S
                await self._seat.say(client)

    async def _ask(self, client: EtcdClient) -> None:
        await client.call("kv/range", {"key": self._keys.joins}, wire.RangeAnswer)

    # ---- timers and the view

    def _beat(self, due_s: float) -> None:
        """Serve what waits for time; a beat that comes late says that this process stood still."""
        now_s = self._now_s()
        loop = asyncio.get_running_loop()
        self._pulse = loop.call_at(now_s + PULSE_S, self._beat, now_s + PULSE_S)  # whatever follows
        if self._seat is not None:
            self._seat.history.timer_fired(now_s, now_s - due_s)
        for node_id in self._table.tick(now_s):
            logger.warning("%s did not come back after etcd did; removed", node_id)
        self._publish()

    def _end(self) -> None:
        super()._end()
        if self._pulse is not None:
            self._pulse.cancel()
            self._pulse = None

    def _publish(self) -> None:
        if self._table.version != self._subscribers.view.version:
            self._subscribers.publish(self.view)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
