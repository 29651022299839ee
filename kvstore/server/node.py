"""The store node: one process that lends memory to the cluster.

Owns the life of the node: allocate the segment, listen, join, expire and evict by timer, drain,
close. Decisions are the ``Directory``'s, answers are the ``StoreHandlers``'. The network, transfer
and membership objects belong to the caller, who closes them after the node.

::

    new ──start──▶ serving ──drain──▶ draining ──close──▶ closed
                      └──────────close / abort──────────────▲
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable

from kvstore.config import StoreConfig
from kvstore.events import KvEventPublisher, WatchKvEvents
from kvstore.placement import REPLICAS_FACT, WEIGHT_LABEL
from kvstore.replication import Replicator
from kvstore.replication.holdings import Holdings, OwnNode
from kvstore.server.directory import Directory
from kvstore.server.handlers import StoreHandlers
from kvstore.server.polls import now_s
from kvstore.server.segment import Segment
from kvstore.server.taking import PageTaker
from kvstore.server.tier import Tier
from kvstore.server.tiering import Tiering
from transfer.channel import Hello, Listener, Network, Service
from transfer.identity import Identity
from transfer.interface import Region, Transfer
from transfer.membership import (
    OWN_PAGE_STORE,
    PAGE_STORE_FACT,
    Membership,
    NodeInfo,
    NodeStatus,
)

log = logging.getLogger(__name__)

SEED_NBYTES = 16  # unknown to clients


class StoreNode:
    """One store node. States nothing about the model: a segment serves pages of any spec.

    ``wall_clock`` gives the time that KV events carry. ``tier`` is where pages go that
    memory has no room for; opened by the caller, closed with the node.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        identity: Identity,
        network: Network,
        transfer: Transfer,
        membership: Membership,
        wall_clock: Callable[[], float] | None = None,
        tier: Tier | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.config = config
        self.identity = identity
        self._network = network
        self._transfer = transfer
        self._membership = membership
        nbytes = config.segment_nbytes
        self._directory = Directory(
            Segment(nbytes),
            lease_s=config.lease_s + config.lease_grace_s,
            high=int(nbytes * config.high_watermark),
            low=int(nbytes * config.low_watermark),
            spill=int(nbytes * config.spill_watermark),
            policy=config.eviction,
            quotas=config.quotas_by_name(),
            pinned_max=config.pinned_max,
            half_life_s=config.half_life_s,
            seed=random_bytes(SEED_NBYTES),
        )
        self._events = KvEventPublisher(self._directory.event_log)
        self._event_labels: dict[str, str] = {}
        self._wall_clock = wall_clock
        self._tier = tier
        self._tiering: Tiering | None = None
        self._region: Region | None = None
        self._handlers: StoreHandlers | None = None
        self._replicator: Replicator | None = None
        self._listener: Listener | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._started_s: float | None = None
        self._born_s: float | None = None  # likewise, by the wall clock
        self._quiet = asyncio.Event()  # set by the tick when no promise is open
        self._draining = False
        self._closed = False

    @property
    def address(self) -> str:
        """Where the node listens; known once started."""
        assert self._listener is not None, "the store node has not been started"
        return self._listener.address

    @property
    def region(self) -> Region:
        """The segment's memory; known once started."""
        assert self._region is not None, "the store node has not been started"
        return self._region

    async def start(self) -> None:
        """Allocate, listen, and join; returns when the node is a member.

        Raises:
            PeerUnreachable: ``bind`` cannot be bound.
        """
        self._started_s = now_s()
        self._born_s = None if self._wall_clock is None else self._wall_clock()
        self._region = self._transfer.allocate(self.config.segment_nbytes)
        self._handlers = StoreHandlers(
            self._directory,
            self._region,
            incarnation=self.identity.incarnation,
            lease_s=self.config.lease_s,
            numbers=self._answer,
            facts=self.facts,
        )
        service = Service()
        self._handlers.add_to(service)
        service.on_stream(WatchKvEvents, self._events.watch)
        self._replicator = self._replicate(service, self._handlers, self._region)
        if self._tier is not None:
            self._tiering = self._open_tier(self._tier, self._handlers, self._region)
        hello = Hello(identity=self.identity)
        self._listener = await self._network.listen(service, hello, self.config.bind)
        self._event_labels = self._events.open(
            self._network, self.identity, bind=self.config.bind, wall_clock=self._wall_clock
        )
        self._ticker = asyncio.create_task(self._tick(), name=f"{self.identity.node_id} tick")
        log.info(
            "store %s: %d MiB at %s over %s",
            self.identity.node_id,
            self.config.segment_nbytes >> 20,
            self.address,
            self._transfer.transport,
        )
        self._membership.subscribe(self._replicator.follow)
        await self._membership.join(self._info(), self.status)
        if self._tiering is not None and not self._closed:
            self._tiering.start_adopting(self._adopted)

    def _open_tier(self, tier: Tier, handlers: StoreHandlers, region: Region) -> Tiering:
        """From here on pages move."""
        tiering = Tiering(self._directory, tier, region.view, now_s=now_s)
        self._directory.expect(tier.nbytes, tier.used_nbytes // (tier.num_pages or 1) or None)
        handlers.promote, handlers.room = tiering.promote, tiering.room
        handlers.adopted, handlers.flush = tiering.adopted, tiering.flush
        return tiering

    def _adopted(self, num_pages: int) -> None:
        """What the tier kept from a life before is indexed; others may lack some of it."""
        log.info("store %s: %d pages on the SSD", self.identity.node_id, num_pages)
        if num_pages and self._replicator is not None:
            self._replicator.compare_all()

    def _replicate(self, service: Service, handlers: StoreHandlers, region: Region) -> Replicator:
        own = OwnNode(service, self._directory, self.identity, region, handlers.clears)
        PageTaker(own, self._transfer, handlers.counters).add_to(service)
        replicator = Replicator(self.config, own, network=self._network, transfer=self._transfer)
        replicator.add_to(service)
        handlers.committed, handlers.dropped = replicator.committed, replicator.dropped
        handlers.spread = replicator.spread
        return replicator

    def _info(self) -> NodeInfo:
        return NodeInfo(
            identity=self.identity,
            address=self.address,
            transport=self._transfer.transport,
            contract={
                REPLICAS_FACT: str(self.config.replicas),
                PAGE_STORE_FACT: OWN_PAGE_STORE,
            },
            labels={
                "pid": str(os.getpid()),
                "segment_nbytes": str(self.config.segment_nbytes),
                "policy": self.config.eviction,
                WEIGHT_LABEL: repr(self.config.capacity_weight),
                **self._event_labels,
            },
        )

    @property
    def holdings(self) -> Holdings:
        """The pages that are here, for those who compare them."""
        return self._directory

    def renew(self, identity: Identity) -> None:
        """Be another incarnation: clients have seen this node leave the cluster.

        The pages stay (a key names their bytes); grants, and the right to end leases, do not.
        """
        self.identity = identity
        self._events.renew(identity)
        if self._handlers is not None:
            self._handlers.renew(identity.incarnation)
        if self._replicator is not None:
            self._replicator.renew(identity)

    @property
    def healthy(self) -> bool:
        """The timer runs, so that leases end and pages are evicted; copies are being sent; and
        what the SSD kept is being indexed, or is."""
        if self._replicator is None or not self._replicator.healthy:
            return False
        if self._tiering is not None and not self._tiering.healthy:
            return False
        return self._ticker is not None and not self._ticker.done()

    def status(self) -> NodeStatus:
        """What goes with every heartbeat."""
        return NodeStatus(draining=self._draining, gauges=self.numbers())

    def numbers(self) -> dict[str, float]:
        """Sizes and counters of this node, by name."""
        segment = self._directory.segment
        numbers: dict[str, float] = {
            **self._directory.gauges(),
            "num_free_pages": self._num_free_pages(),
            "segment_nbytes": segment.nbytes,
            "free_nbytes": segment.nbytes - segment.used_nbytes,
            **dict.fromkeys(("hits", "misses", "evicted", "corrupt_dropped"), 0),
        }
        if self._born_s is not None:
            numbers["start_time_s"] = self._born_s
        numbers.update(self._directory.counters)
        numbers.update(self._events.counters())
        if self._tiering is not None:
            numbers.update(self._tiering.numbers())
        if self._handlers is not None:
            numbers.update(self._handlers.counters)
            numbers["num_sessions"] = self._handlers.sessions.num_open
        if self._replicator is not None:
            numbers.update(self._replicator.numbers())
        return numbers

    def _answer(self) -> dict[str, float]:
        """The numbers for who asks. Heartbeats lack the last one: they are sent on when they
        differ from those before."""
        assert self._started_s is not None, "the store node has not been started"
        uptime_s = now_s() - self._started_s
        return {**self.numbers(), "uptime_s": uptime_s}

    def facts(self) -> dict[str, str]:
        """What the operator decided, and what ails the node: for people, in words."""
        facts = {"policy": self._directory.policy, "replicas": str(self.config.replicas)}
        if self._tier is not None and self._tier.degraded is not None:
            facts["ssd_degraded"] = self._tier.degraded
        return facts

    def _num_free_pages(self) -> int:
        """Free slots for the page size reserved last; 0 while none is known."""
        size = self._directory.last_page_nbytes
        return self._directory.segment.num_free_slots(size) if size else 0

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_s)
            self._directory.tick(now_s(), self.config.evict_batch)
            if self._tiering is not None:
                self._tiering.tick()
            self._events.flush()
            if not self._directory.num_held:
                self._quiet.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no new pages, hand those that are here to other nodes, and write those that are in
        memory only to the SSD if there is one, the hottest first.

        Returns when all have a new place and no writer or reader holds one here, or after
        ``timeout_s``.
        """
        self._draining = True
        if self._handlers is not None:
            self._handlers.draining = True
        if self._tiering is not None:
            self._tiering.room.look()  # who waits for it is refused now
        self._quiet.clear()
        try:
            async with asyncio.timeout(timeout_s):
                if self._tiering is not None:
                    await self._tiering.adopted()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._write_all(), name="write all to the SSD")
                    if self._replicator is not None:
                        await self._replicator.migrate()
                if self._directory.num_held:
                    await self._quiet.wait()
                await self._write_all()  # what has been committed meanwhile
        except TimeoutError:
            log.warning("store %s: drained with pages held", self.identity.node_id)
        if self._tiering is not None and (num_left := self._directory.spilling.num_unwritten):
            text = "store %s: %d pages were not written to the SSD: they end with this process"
            log.warning(text, self.identity.node_id, num_left)

    async def _write_all(self) -> None:
        if self._tiering is not None:
            await self._tiering.copy_all()

    async def close(self) -> None:
        """Leave, stop answering, withdraw the memory. Idempotent; the pages are gone after it."""
        if self._closed:
            return
        self._draining = True
        await self._membership.leave()
        ticker, listener = self._ticker, self._listener
        self._stop()
        if self._region is not None:
            await asyncio.to_thread(self._region.revoke)  # may wait for a peer
        if self._replicator is not None:
            await self._replicator.close()
        if self._tiering is not None:
            await self._tiering.close()
        elif self._tier is not None:
            await self._tier.close()
        if listener is not None:
            await listener.close()
        if ticker is not None:
            await asyncio.gather(ticker, return_exceptions=True)

    def abort(self) -> None:
        """Stop at once: no goodbye, all is refused, the memory is withdrawn. Idempotent.

        Peers are not waited for if the transfer engine was aborted before.
        """
        self._stop()
        if self._region is not None:
            self._region.revoke()

    def _stop(self) -> None:
        """Refuse all from now on, and begin to end what runs."""
        self._closed = True
        self._events.close()
        if self._handlers is not None:
            self._handlers.closed = True
        if self._replicator is not None:
            self._replicator.abort()
        if self._tiering is not None:
            self._tiering.abort()
        if self._ticker is not None:
            self._ticker.cancel()

    def check(self) -> None:
        """Assert the invariants of the directory and its segment."""
        self._directory.check()
        if self._replicator is not None:
            self._replicator.check()
