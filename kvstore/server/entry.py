"""What the directory knows of one granted slot, and the vocabulary of its answers.

Owns ``Entry`` and the small result types of ``Directory``. No behaviour beyond derived state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.messages import ReserveStatus
from kvstore.page import PageKey, PageSpec
from kvstore.server.segment import Slab, Slot
from kvstore.store import PageIdentity, PageRecord

Counters = Counter[str]


class Reservation(NamedTuple):
    """Answer to one page of a reserve; ``slot`` is set when GRANTED."""

    status: ReserveStatus
    slot: Slot | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """One granted slot. Writing while ``record`` is None, ready after.

    Attributes:
        expires_s: end of the reservation (writing) or of the quarantine (fenced).
        num_leases: read leases that name this grant.
        stamp: logical time of the last touch; never older than that of a descendant here.
        queued: a candidate of this grant is in the eviction queue.
        indexed: the key leads here; False once dropped or fenced while the slot is still owed.
        fenced: an aborted or lapsed write may still be on the wire: the slot waits for
            ``expires_s`` before it is reused.
    """

    identity: PageIdentity
    spec: PageSpec
    slot: Slot
    slab: Slab
    expires_s: float
    stamp: int
    record: PageRecord | None = None
    num_leases: int = 0
    queued: bool = False
    indexed: bool = True
    fenced: bool = False

    @property
    def key(self) -> PageKey:
        return self.identity.key

    @property
    def ready(self) -> bool:
        return self.record is not None


class Lease(NamedTuple):
    """The promise that these grants keep their slots until ``expires_s``."""

    lease_id: int
    expires_s: float
    entries: tuple[Entry, ...]
