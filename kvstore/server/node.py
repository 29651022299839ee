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

from kvstore.config import StoreConfig
from kvstore.placement import WEIGHT_LABEL
from kvstore.server.directory import Directory
from kvstore.server.handlers import StoreHandlers
from kvstore.server.segment import Segment
from transfer.channel import Hello, Listener, Network, Service
from transfer.identity import Identity
from transfer.interface import Region, Transfer
from transfer.membership import Membership, NodeInfo, NodeStatus

log = logging.getLogger(__name__)


class StoreNode:
    """One store node. Stores state no contract: a segment serves pages of any spec."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        identity: Identity,
        network: Network,
        transfer: Transfer,
        membership: Membership,
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
        )
        self._region: Region | None = None
        self._handlers: StoreHandlers | None = None
        self._listener: Listener | None = None
        self._ticker: asyncio.Task[None] | None = None
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
        self._region = self._transfer.allocate(self.config.segment_nbytes)
        self._handlers = StoreHandlers(
            self._directory,
            self._region,
            incarnation=self.identity.incarnation,
            lease_s=self.config.lease_s,
            numbers=self.numbers,
        )
        service = Service()
        self._handlers.add_to(service)
        hello = Hello(identity=self.identity)
        self._listener = await self._network.listen(service, hello, self.config.bind)
        self._ticker = asyncio.create_task(self._tick(), name=f"{self.identity.node_id} tick")
        log.info(
            "store %s: %d MiB at %s over %s",
            self.identity.node_id,
            self.config.segment_nbytes >> 20,
            self.address,
            self._transfer.transport,
        )
        await self._membership.join(self._info(), self.status)

    def _info(self) -> NodeInfo:
        return NodeInfo(
            identity=self.identity,
            address=self.address,
            transport=self._transfer.transport,
            labels={
                "pid": str(os.getpid()),
                "segment_nbytes": str(self.config.segment_nbytes),
                WEIGHT_LABEL: repr(self.config.capacity_weight),
            },
        )

    @property
    def healthy(self) -> bool:
        """The timer runs: leases end and pages are evicted."""
        return self._ticker is not None and not self._ticker.done()

    def status(self) -> NodeStatus:
        """What goes with every heartbeat."""
        return NodeStatus(draining=self._draining, gauges=self.numbers())

    def numbers(self) -> dict[str, float]:
        """Sizes and counters of this node, by name."""
        segment = self._directory.segment
        numbers: dict[str, float] = {
            "num_pages": self._directory.num_pages,
            "num_free_pages": self._num_free_pages(),
            "segment_nbytes": segment.nbytes,
            "free_nbytes": segment.nbytes - segment.used_nbytes,
            "num_writing": self._directory.num_writing,
            "num_owed": self._directory.num_owed,
            "num_leases": self._directory.num_leases,
            "num_waits": len(self._directory.watches),
            **dict.fromkeys(("hits", "misses", "evicted", "corrupt_dropped"), 0),
        }
        numbers.update(self._directory.counters)
        if self._handlers is not None:
            numbers.update(self._handlers.counters)
        return numbers

    def _num_free_pages(self) -> int:
        """Free slots for the page size reserved last; 0 while none is known."""
        size = self._directory.last_page_nbytes
        return self._directory.segment.num_free_slots(size) if size else 0

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_s)
            now_s = asyncio.get_running_loop().time()
            self._directory.tick(now_s, self.config.evict_batch)
            if not self._directory.num_held:
                self._quiet.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no new pages; return when no writer or reader holds one, or after ``timeout_s``."""
        self._draining = True
        if self._handlers is not None:
            self._handlers.draining = True
        self._quiet.clear()
        try:
            async with asyncio.timeout(timeout_s):
                if self._directory.num_held:
                    await self._quiet.wait()
        except TimeoutError:
            log.warning("store %s: drained with pages held", self.identity.node_id)

    async def close(self) -> None:
        """Leave, stop answering, withdraw the memory. Idempotent; the pages are gone after it."""
        if self._closed:
            return
        self._draining = True
        await self._membership.leave()
        ticker, listener = self._ticker, self._listener
        self.abort()
        if listener is not None:
            await listener.close()
        if ticker is not None:
            await asyncio.gather(ticker, return_exceptions=True)

    def abort(self) -> None:
        """Stop at once: no goodbye, all is refused, the memory is withdrawn. Idempotent."""
        self._closed = True
        if self._handlers is not None:
            self._handlers.closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        if self._region is not None:
            self._region.revoke()

    def check(self) -> None:
        """Assert the invariants of the directory and its segment."""
        self._directory.check()
