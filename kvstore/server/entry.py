"""The vocabulary of the directory's answers: small result types, no behaviour.

A ``Grant`` is a snapshot: true when it was made. Who holds one across an ``await`` asks again by
key and generation.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvstore.messages import ReserveStatus
from kvstore.page import PageKey, PageSpec
from kvstore.server.segment import Slot

Counters = Counter[str]


class Reservation(NamedTuple):
    """Answer to one page of a reserve; ``slot`` is set when GRANTED."""

    status: ReserveStatus
    slot: Slot | None = None


class Grant(NamedTuple):
    """One granted slot and the page in it. ``checksum`` is set once the page is ready."""

    row: int
    key: PageKey
    slot: Slot
    spec: PageSpec
    num_tokens: int
    ready: bool
    checksum: bytes


class Lease(NamedTuple):
    """The promise that these pages keep their slots until ``expires_s``."""

    lease_id: int
    granted_s: float
    expires_s: float
    rows: tuple[int, ...]


class Write(NamedTuple):
    """A reservation, or the quarantine of one that was given up; ends at ``end_s``."""

    generation: int
    granted_s: float
    end_s: float
    writer: str
