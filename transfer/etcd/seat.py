"""A member's own record in etcd: taking the seat, keeping it, saying what changes, giving it up.

Owns the lease and the record under it, across sessions. Knows no watch and no back-off: each method
asks a client and raises what went wrong.

::

                 register: nobody joined in between, contract fits
      no lease ───────────────────────────────────────────────────▶ seated ──give_up──▶ no lease
          ▲                                                            │ keep, say
          └── LeaseLost: etcd has ended it ◀───────────────────────────┤
              (next time perhaps as a new incarnation: ``lease.py``)   │
      over, for good ◀── Superseded: another process has the node id ◀─┘

Two nodes whose contracts differ cannot both join: each reads all members, then writes its record
*if* ``joins`` is as it was read, and sets it; one of two writers finds it changed and reads again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs

from transfer.errors import HelloRefused, PeerLost, RemoteFailed, TransferError
from transfer.etcd import wire
from transfer.etcd.client import EtcdClient
from transfer.etcd.lease import LeaseHistory, Stays
from transfer.etcd.listing import Listing, list_keys
from transfer.etcd.records import Keys, Record, encode_record
from transfer.identity import Identity, new_identity
from transfer.membership import (
    TAKEN_RETRY_S,
    NodeInfo,
    NodeStatus,
    SeatHolder,
    SeatQuery,
    Superseded,
    check_contract,
    holder_before,
)
from transfer.registry import MAX_MEMBERS

logger = logging.getLogger(__name__)

LEASE_TTL_S = 5  # etcd's least is 1.5 of its election timeout: 2 s unless its operator says else
MAX_JOIN_ATTEMPTS = 64  # lost races against others that join, before it backs off
JOIN_PAUSE_S = 0.05  # at most, after a lost race
LEASE_NOT_FOUND = "etcd-5"


class LeaseLost(TransferError):
    """etcd has ended the lease: the record is gone, or will be."""


class Seat:
    """See the module's docstring.

    Args:
        renewed: called with the new identity before it is written, so that whoever reads of it
            finds the process answering to it.
        rng: spreads those who lost a race.
    """

    def __init__(
        self,
        keys: Keys,
        info: NodeInfo,
        status: Callable[[], NodeStatus],
        *,
        renewed: Callable[[Identity], None],
        rng: random.Random,
    ) -> None:
        self.info = info
        self.history = LeaseHistory()
        self.lease: int | None = None
        self._keys = keys
        self._status = status
        self._renewed = renewed
        self._rng = rng
        self._said: NodeStatus | None = None
        self._refused = False  # etcd does not take what is said
        self._mine = {info.identity.incarnation}
        self._joined = False

    @property
    def key(self) -> bytes:
        return self._keys.member(self.info.identity.node_id)

    async def take(self, client: EtcdClient, before: Stays, settle_s: float) -> None:
        """Be seated: under the lease that there is, or under a new one.

        Args:
            before: who was there while the lease was good.
            settle_s: how long to let etcd end other leases before judging by who is left.

        Raises:
            HelloRefused: the contract differs, or the cluster is full.
            SeatTaken: another process has the node id, and is alive.
            Superseded: another process has the node id by now.
        """
        if self.lease is not None:
            try:
                await self.keep(client)
                await self.say(client)
                return
            except LeaseLost:
                self.lease = None
                await asyncio.sleep(settle_s)
        await self._register(client, before)

    async def keep(self, client: EtcdClient) -> None:
        """Renew the lease.

        Raises:
            LeaseLost: etcd has ended it.
        """
        asked_s = asyncio.get_running_loop().time()
        body = {"ID": str(self.lease)}
        kept = (await client.call("lease/keepalive", body, wire.LeaseKept)).result
        if kept is None:
            raise PeerLost(f"{client.endpoint} does not say what became of the lease")
        if kept.TTL <= 0:
            raise LeaseLost(f"{self.info.identity.node_id} lost its lease, registering again")
        self.history.confirmed(asked_s)

    def has_news(self) -> bool:
        return self._status() != self._said

    async def say(self, client: EtcdClient) -> None:
        """Write the present status; an etcd that takes no writes (it is full) costs no seat.

        Raises:
            LeaseLost: the record is gone.
            Superseded: it is another process's.
        """
        assert self.lease is not None, "a seat is taken first"
        status = self._status()
        record = encode_record(Record(info=self.info, status=status))
        body = {
            "compare": [wire.is_under(self.key, self.lease)],
            "success": [wire.put(self.key, record, self.lease)],
            "failure": [wire.get(self.key)],
        }
        try:
            answer = await self._transact(client, body)
        except RemoteFailed as error:
            self._say_refused(error)
            return
        self._say_refused(None)
        if answer.succeeded:
            self._said = status
            return
        found = answer.responses[0].response_range if answer.responses else None
        self.check(() if found is None else found.kvs)
        raise LeaseLost(f"{self.info.identity.node_id} has two leases, registering again")

    def _say_refused(self, error: RemoteFailed | None) -> None:
        """Log once that etcd does not take the status, and once that it does again."""
        me = self.info.identity.node_id
        if error is not None and not self._refused:
            logger.error("%s: etcd does not take the status, the seat stays: %s", me, error)
        elif error is None and self._refused:
            logger.info("%s: etcd takes the status again", me)
        self._refused = error is not None

    def check(self, kvs: Iterable[wire.KeyValue]) -> None:
        """Find this node's own record among ``kvs``.

        Raises:
            LeaseLost: it is not there.
            Superseded: it is another process's.
        """
        for kv in kvs:
            if kv.key == self.key:
                self._check_mine(self._keys.record(kv.key, kv.value))
                return
        raise LeaseLost(f"{self.info.identity.node_id} is no longer in etcd, registering again")

    def check_news(self, events: Iterable[wire.Event]) -> None:
        """Look whether the newest of ``events`` for this node's key is a record of its own.

        Raises:
            LeaseLost, Superseded: see ``check``.
        """
        own = [event for event in events if event.kv.key == self.key]
        if own:
            self.check([own[-1].kv] if own[-1].type != "DELETE" else [])

    def _check_mine(self, record: Record | None) -> None:
        mine = record is None or record.info.identity.incarnation in self._mine
        if self._joined and not mine:
            raise Superseded(
                f"another process has joined as {self.info.identity.node_id}; this one is no "
                "longer listed. Give each process its own node id"
            )

    async def give_up(self, client: EtcdClient) -> None:
        """End the lease, and with it the record."""
        lease, self.lease = self.lease, None
        if lease is not None:
            await client.call("lease/revoke", {"ID": str(lease)}, wire.RangeAnswer)

    async def _register(self, client: EtcdClient, before: Stays) -> None:
        lease: int | None = None
        for _ in range(MAX_JOIN_ATTEMPTS):
            listing, asked_s = await self._list_without_holder(client)
            self._check_fits(listing)
            if lease is None:
                self._come_back(listing, before)
                lease = await self._grant(client)
            if await self._write(client, listing, lease):
                self.lease, self._joined = lease, True
                self.history.confirmed(asked_s)
                return
            await asyncio.sleep(self._rng.uniform(0.0, JOIN_PAUSE_S))
        raise PeerLost(f"{MAX_JOIN_ATTEMPTS} others joined first, each time")

    async def _list_without_holder(self, client: EtcdClient) -> tuple[Listing, float]:
        """Return the members, and when they were asked for, once none of them has the seat.

        A process that was killed has it until its lease ends; one that lives writes its record
        again, at least every ``REFRESH_S``.

        Raises:
            SeatTaken: the holder has done so.
        """
        query = SeatQuery(self.info.identity.node_id)
        while True:
            asked_s = asyncio.get_running_loop().time()
            listing = await list_keys(client, self._keys)
            if query.is_free(self._holder(listing)):
                return listing, asked_s
            await asyncio.sleep(TAKEN_RETRY_S)

    def _holder(self, listing: Listing) -> SeatHolder | None:
        """Who keeps this process from its first seat; later ``_check_mine`` judges."""
        kv = next((kv for kv in listing.kvs if kv.key == self.key), None)
        record = None if kv is None or self._joined else self._keys.record(kv.key, kv.value)
        if kv is None or record is None:
            return None
        holder = SeatHolder(
            incarnation=record.info.identity.incarnation,
            address=record.info.address,
            num_signs=kv.mod_revision,
            draining=record.status.draining,
        )
        return holder if holder_before(holder, self.info) else None

    def _check_fits(self, listing: Listing) -> None:
        """Check who is there already, by node id."""
        num_others = 0
        for kv in listing.kvs:
            if self._keys.node_of(kv.key) is None:
                continue
            record = self._keys.record(kv.key, kv.value)
            if kv.key == self.key:
                self._check_mine(record)
            elif record is not None:
                check_contract(self.info, record.info)
                num_others += 1
        if num_others >= MAX_MEMBERS:
            raise HelloRefused(f"the cluster holds {MAX_MEMBERS} members, its maximum")

    def _come_back(self, listing: Listing, before: Stays) -> None:
        """Take a new incarnation if others can have seen this one leave."""
        me = self.info.identity
        if not self._joined or not self.history.was_away(me.node_id, before, self._stays(listing)):
            return
        identity = new_identity(me.role, me.node_id)
        self._mine.add(identity.incarnation)
        self.info = structs.replace(self.info, identity=identity)
        self.history = LeaseHistory()
        self._renewed(identity)

    def _stays(self, listing: Listing) -> Stays:
        return {
            node_id: (kv.lease, kv.create_revision)
            for kv in listing.kvs
            if (node_id := self._keys.node_of(kv.key)) is not None
        }

    async def _grant(self, client: EtcdClient) -> int:
        body = {"TTL": str(LEASE_TTL_S)}
        return (await client.call("lease/grant", body, wire.LeaseGranted)).ID

    async def _write(self, client: EtcdClient, listing: Listing, lease: int) -> bool:
        """Write the record if nobody joined since ``listing``."""
        identity, status = self.info.identity, self._status()
        record = encode_record(Record(info=self.info, status=status))
        body = {
            "compare": [wire.is_at(self._keys.joins, listing.joins_revision)],
            "success": [
                wire.put(self._keys.joins, identity.node_id.encode()),
                wire.put(self.key, record, lease),
            ],
            "failure": [],
        }
        written = (await self._transact(client, body)).succeeded
        if written:
            self._said = status
        return written

    async def _transact(self, client: EtcdClient, body: dict[str, Any]) -> wire.TxnAnswer:
        try:
            return await client.call("kv/txn", body, wire.TxnAnswer)
        except RemoteFailed as error:
            if error.code == LEASE_NOT_FOUND:
                raise LeaseLost(f"{self.info.identity.node_id} lost its lease") from error
            raise
