"""What store nodes say to one another, and what a writer asks about copies.

Owns the msgspec structs. Bytes travel one-sidedly: the receiver reads them from the sender's
segment, under a lease that the sender holds meanwhile::

    sender                                   receiver
    AcquirePages (own node) ─▶ lease
    TakeCopies ────────────────────────────▶ ReservePages (own node)
               ◀──────── transfer.read ───── CommitPages (own node: hashes what has arrived)
    ReleasePages ◀── CopiesTaken ────────────┘

    a node that lost a page to damage      SendCopies ─▶ its replicas: TakeCopies, please
    a node that drains                     AnnounceDrain ─▶ all others: send me nothing

    writer   CommitPages ─▶ READY ─▶ AwaitCopies ─▶ CopiesAwaited
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvstore.messages import LeasedPage
from kvstore.page import PageKey, PageSpec
from kvstore.replication.clears import Fence
from kvstore.store import PutPolicy


class CopyStatus(StrEnum):
    """TAKEN: copied and verified. PRESENT: it was there. WRITING: another writer is at it.
    REFUSED: no room, or the key is taken by other tokens. LATER: no room yet, offer it again.
    TORN: what arrived does not hash to the record. BROKEN: the bytes could not be read. CLEARED:
    they may be what is being forgotten."""

    TAKEN = "taken"
    PRESENT = "present"
    WRITING = "writing"
    REFUSED = "refused"
    LATER = "later"
    TORN = "torn"
    BROKEN = "broken"
    CLEARED = "cleared"


class TakeCopies(msgspec.Struct, frozen=True, kw_only=True, tag="take_copies"):
    """Please hold these pages, too. Their bytes lie still for ``lease_s`` from the request on.

    ``clears``: done by the sender before it leased them, or begun before a writer put any of them
    there (``kvstore/replication/clears.py``).
    """

    spec: PageSpec
    policy: PutPolicy
    read_token: bytes
    lease_s: float
    pages: tuple[LeasedPage, ...]
    clears: tuple[str, ...] = ()


class CopiesTaken(msgspec.Struct, frozen=True, tag="copies_taken"):
    """In the order of the pages. ``fences``: the clears that CLEARED pages are refused for."""

    statuses: tuple[CopyStatus, ...]
    fences: tuple[Fence, ...] = ()


class SendCopies(msgspec.Struct, frozen=True, kw_only=True, tag="send_copies"):
    """I should hold these pages and do not: send me (``TakeCopies``) those that you hold.

    Answered with ``StoreDone``: how many will come.
    """

    keys: tuple[PageKey, ...]


class AnnounceDrain(msgspec.Struct, frozen=True, tag="announce_drain"):
    """I take no pages any more, for the rest of this life. Answered with ``StoreDone``."""


class AwaitCopies(msgspec.Struct, frozen=True, kw_only=True, tag="await_copies"):
    """Long poll: answer when no copies of these pages are owed any more."""

    keys: tuple[PageKey, ...]
    wait_s: float


class CopiesAwaited(msgspec.Struct, frozen=True, tag="copies_awaited"):
    """One byte per key: 1 when all its copies are where they belong, 0 when some could not be
    made now (their node does not answer or has no room, or the time was over)."""

    made: bytes
