"""Settings of the store node and the store client, with their limits.

Owns the two frozen config classes and the named maxima of the package. Knows no files, no command
line: ``launch`` fills these in.
"""

from __future__ import annotations

import math
import re
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

PAGES_PER_MESSAGE_MAX = 1024  # pages named by one control message
MATCH_KEYS_MAX = 65_536  # packed keys of one MatchPages or PinPages
LEASE_S_MAX = 120.0
LEASE_LIFE_S_MAX = 600.0  # of a lease that is renewed again and again
LEASES_MAX = 65_536  # read leases held at one node
SESSIONS_MAX = 4096  # clients whose lives a node watches
WAIT_S_MAX = 30.0  # one long poll at a node; clients poll again
WATCHES_MAX = 65_536  # keys x long polls held at one node
BACKGROUND_MAX = 1024  # releases and aborts a client has under way
NAMESPACES_SHOWN_MAX = 1024  # listed by one answer about what a node holds
REPLICAS_MAX = 8  # copies of one page that a cluster may be asked to keep
MIB = 1 << 20


class StoreConfig(BaseModel, frozen=True, extra="forbid"):
    """One store node.

    Attributes:
        segment_nbytes: memory contributed to the store.
        bind: where the control channel listens; port 0 takes a free one.
        lease_s: how long a writer or reader may hold a page without a sign of life.
        lease_grace_s: how much longer the node keeps the promise than it says, so that bytes on
            the wire at the end of a lease never meet a reused slot.
        tick_s: period of lease expiry and incremental eviction.
        high_watermark, low_watermark: fractions of the segment between which a tick evicts.
        spill_watermark: fraction of the segment above which pages are copied to the SSD, in the
            order of eviction and ahead of it; ``low_watermark`` where that is lower.
        evict_batch: pages evicted per tick at most.
        eviction: the order in which pages of equal rank go: lru, lfu, slru, fifo or heat.
        half_life_s: time in which a use of a page loses half of its weight in the page's heat.
        quotas: fraction of the memory that is guaranteed, by namespace (64 hex digits); other
            namespaces share the rest equally. Empty: all share all.
        pinned_max: fraction of the segment that may be pinned.
        capacity_weight: this node's share in placement, relative to others; 0 < weight <= 1000.
        replicas: nodes that hold each page; all nodes of a cluster must state the same.
        hot_reads: reads of a page within about ten seconds that make the node spread copies of it
            over more nodes; None: never.
    """

    segment_nbytes: int = Field(default=1024 * MIB, ge=1)
    bind: str = "tcp://127.0.0.1:0"
    lease_s: float = Field(default=5.0, gt=0, le=LEASE_S_MAX)
    lease_grace_s: float = Field(default=1.0, ge=0, le=LEASE_S_MAX)
    tick_s: float = Field(default=0.1, gt=0, le=10)
    high_watermark: float = Field(default=0.95, gt=0, le=1)
    low_watermark: float = Field(default=0.90, ge=0, le=1)
    spill_watermark: float = Field(default=0.75, ge=0, le=1)
    evict_batch: int = Field(default=256, ge=1)
    eviction: Literal["lru", "lfu", "slru", "fifo", "heat"] = "lru"
    half_life_s: float = Field(default=600.0, gt=0)
    quotas: dict[str, float] = {}
    pinned_max: float = Field(default=0.25, ge=0, le=0.9)
    capacity_weight: float = Field(default=1.0, gt=0, le=1000)
    replicas: int = Field(default=1, ge=1, le=REPLICAS_MAX)
    hot_reads: int | None = Field(default=256, ge=2)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark={self.low_watermark} is above high_watermark={self.high_watermark}"
            )
        return self

    @model_validator(mode="after")
    def _quotas_fit(self) -> Self:
        for namespace, fraction in self.quotas.items():
            if not re.fullmatch(r"[0-9a-f]{64}", namespace):
                raise ValueError(f"quotas: {namespace!r} is no namespace of 64 hex digits")
            if not 0 < fraction <= 1:
                raise ValueError(f"quotas: {fraction} of {namespace} is not within 0..1")
        if (total := math.fsum(self.quotas.values())) > 1:
            raise ValueError(f"quotas: together {total}, more than the memory")
        return self

    def quotas_by_name(self) -> dict[bytes, float]:
        """The quotas by namespace as pages name it."""
        return {bytes.fromhex(name): fraction for name, fraction in self.quotas.items()}


class StoreClientConfig(BaseModel, frozen=True, extra="forbid"):
    """One store client.

    Attributes:
        op_timeout_s: limit of every call that does not wait for other people's work.
        poll_s: length of one long poll; after it the keys are placed anew.
        backoff_s, backoff_max_s: how long an unreachable node is skipped; doubles per failure.
        batch_nbytes: bytes per transfer call; pages become usable batch by batch.
        offer_nbytes_max: a put of up to so many bytes to one node is one message: the node reads
            the pages from here. Larger ones, and all when this is 0, are written to the node.
        num_batches: transfer calls under way per node in one put or get.
        room_wait_s: how long a put goes on waiting, at most, once a page of it has found no room:
            for nodes whose memory is full to copy pages to their SSD. After that they make room of
            pages without a copy. It is one end for all its pages, however many find room meanwhile,
            and never more than three quarters of the time that the put has left then; None: that.
        put_waits_for_replicas: a put returns when the copies of its pages have been made (or
            cannot be made now), so that a page that was stored survives the loss of a node.
    """

    op_timeout_s: float = Field(default=2.0, gt=0)
    poll_s: float = Field(default=1.0, gt=0, le=WAIT_S_MAX)
    backoff_s: float = Field(default=0.25, gt=0)
    backoff_max_s: float = Field(default=5.0, gt=0)
    batch_nbytes: int = Field(default=16 * MIB, ge=1)
    offer_nbytes_max: int = Field(default=16 * MIB, ge=0)
    num_batches: int = Field(default=2, ge=1, le=16)
    room_wait_s: float | None = Field(default=None, gt=0)
    put_waits_for_replicas: bool = True
