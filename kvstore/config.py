"""Settings of the store node and the store client, with their limits.

Owns the two frozen config classes and the named maxima of the package. Knows no files, no command
line: ``launch`` fills these in.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator

PAGES_PER_MESSAGE_MAX = 1024  # pages named by one control message
LEASE_S_MAX = 120.0
LEASES_MAX = 65_536  # read leases held at one node
WAIT_S_MAX = 30.0  # one long poll at a node; clients poll again
WATCHES_MAX = 65_536  # keys x long polls held at one node
BACKGROUND_MAX = 1024  # releases and aborts a client has under way
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
        evict_batch: pages evicted per tick at most.
        capacity_weight: this node's share in placement, relative to others; 0 < weight <= 1000.
    """

    segment_nbytes: int = Field(default=1024 * MIB, ge=1)
    bind: str = "tcp://127.0.0.1:0"
    lease_s: float = Field(default=5.0, gt=0, le=LEASE_S_MAX)
    lease_grace_s: float = Field(default=1.0, ge=0, le=LEASE_S_MAX)
    tick_s: float = Field(default=0.1, gt=0, le=10)
    high_watermark: float = Field(default=0.95, gt=0, le=1)
    low_watermark: float = Field(default=0.90, ge=0, le=1)
    evict_batch: int = Field(default=256, ge=1)
    capacity_weight: float = Field(default=1.0, gt=0, le=1000)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark={self.low_watermark} is above high_watermark={self.high_watermark}"
            )
        return self


class StoreClientConfig(BaseModel, frozen=True, extra="forbid"):
    """One store client.

    Attributes:
        op_timeout_s: limit of every call that does not wait for other people's work.
        poll_s: length of one long poll; after it the keys are placed anew.
        backoff_s, backoff_max_s: how long an unreachable node is skipped; doubles per failure.
        batch_nbytes: bytes per transfer call; pages become usable batch by batch.
        num_batches: transfer calls under way per node in one put or get.
    """

    op_timeout_s: float = Field(default=2.0, gt=0)
    poll_s: float = Field(default=1.0, gt=0, le=WAIT_S_MAX)
    backoff_s: float = Field(default=0.25, gt=0)
    backoff_max_s: float = Field(default=5.0, gt=0)
    batch_nbytes: int = Field(default=16 * MIB, ge=1)
    num_batches: int = Field(default=2, ge=1, le=16)
