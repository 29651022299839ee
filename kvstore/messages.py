"""The store's wire vocabulary: what a client asks of one store node.

Owns the msgspec structs. One message speaks of up to ``PAGES_PER_MESSAGE_MAX`` pages. Bulk bytes
never travel here: a grant names offsets in the node's segment, and the client reads or writes them
one-sidedly with the tokens from ``StoreOpened``.

::

    put   ReservePages ─▶ PagesReserved ─▶ transfer.write ─▶ CommitPages ─▶ PagesCommitted
                                           (broken: AbortPages)
          AwaitPages ─▶ PageStates         long poll: another writer's page is settled
    get   AcquirePages ─▶ PagesAcquired ─▶ transfer.read ─▶ verify ─▶ ReleasePages
    match MatchPages ─▶ PageStates

Fencing: ``incarnation`` names the process life that made the grant; ``generation`` the grant.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvstore.page import PageKey, PageSpec
from kvstore.store import PageIdentity, PageRecord, PageState


class ReserveStatus(StrEnum):
    """GRANTED: write it. PRESENT: committed already. WRITING: by another writer. REFUSED: no slot
    can be freed. COLLISION: the key is taken by a page of other tokens."""

    GRANTED = "granted"
    PRESENT = "present"
    WRITING = "writing"
    REFUSED = "refused"
    COLLISION = "collision"


class CommitStatus(StrEnum):
    """READY: readers see it. STALE: the reservation is gone. TORN: the bytes in the slot are not
    the ones that the writer declared; the reservation is gone too."""

    READY = "ready"
    STALE = "stale"
    TORN = "torn"


class OpenStore(msgspec.Struct, frozen=True, tag="open_store"):
    """First message to a node: ask for access to its segment."""


class StoreOpened(msgspec.Struct, frozen=True, kw_only=True, tag="store_opened"):
    """Tokens of the segment's region, good for this incarnation only."""

    incarnation: str
    read_token: bytes
    write_token: bytes


class MatchPages(msgspec.Struct, frozen=True, tag="match_pages"):
    """Which of these pages are there?"""

    keys: tuple[PageKey, ...]


class AwaitPages(msgspec.Struct, frozen=True, kw_only=True, tag="await_pages"):
    """Long poll: answer when any of these pages is not being written (any more)."""

    keys: tuple[PageKey, ...]
    wait_s: float


class PageStates(msgspec.Struct, frozen=True, tag="page_states"):
    """The states, in the order of the keys asked for."""

    states: tuple[PageState, ...]


class ReservePages(msgspec.Struct, frozen=True, kw_only=True, tag="reserve_pages"):
    """Grant me slots for these pages."""

    spec: PageSpec
    pages: tuple[PageIdentity, ...]


class WriteGrant(msgspec.Struct, frozen=True, array_like=True):
    """Answer for one page; offset and generation mean something when GRANTED."""

    status: ReserveStatus
    offset: int = 0
    generation: int = 0


class PagesReserved(msgspec.Struct, frozen=True, kw_only=True, tag="pages_reserved"):
    """In the order of the pages. The writer must have committed ``lease_s`` after its request."""

    incarnation: str
    lease_s: float
    grants: tuple[WriteGrant, ...]


class PageCommit(msgspec.Struct, frozen=True, array_like=True):
    """A page that has been written; ``checksum`` is xxh3-128 of its valid bytes."""

    key: PageKey
    generation: int
    checksum: bytes


class CommitPages(msgspec.Struct, frozen=True, kw_only=True, tag="commit_pages"):
    """Make these pages visible, if the bytes in their slots are the ones I sent."""

    incarnation: str
    pages: tuple[PageCommit, ...]


class PagesCommitted(msgspec.Struct, frozen=True, tag="pages_committed"):
    """In the order of the commits."""

    statuses: tuple[CommitStatus, ...]


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """One grant, by name."""

    key: PageKey
    generation: int


class AbortPages(msgspec.Struct, frozen=True, kw_only=True, tag="abort_pages"):
    """I give these reservations up. ``quiet``: none of my bytes can arrive any more."""

    incarnation: str
    pages: tuple[PageGrant, ...]
    quiet: bool


class AcquirePages(msgspec.Struct, frozen=True, kw_only=True, tag="acquire_pages"):
    """Lease me those of these pages that are ready; with ``wait_s``, wait for the first."""

    keys: tuple[PageKey, ...]
    wait_s: float = 0.0


class LeasedPage(msgspec.Struct, frozen=True, array_like=True):
    """A ready page: its record, and where its bytes lie while the lease lasts."""

    record: PageRecord
    offset: int
    generation: int


class PagesAcquired(msgspec.Struct, frozen=True, kw_only=True, tag="pages_acquired"):
    """The pages that were ready, under one lease that lasts ``lease_s`` from the request on."""

    incarnation: str
    lease_id: int
    lease_s: float
    pages: tuple[LeasedPage, ...]


class ReleasePages(msgspec.Struct, frozen=True, kw_only=True, tag="release_pages"):
    """End a lease. ``corrupt`` names pages that did not verify; the node checks and drops them."""

    incarnation: str
    lease_id: int
    corrupt: tuple[PageGrant, ...] = ()


class ReadStats(msgspec.Struct, frozen=True, tag="read_stats"):
    """Ask for ``StoreStats``."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True, tag="store_stats"):
    """Counters and sizes of one node."""

    numbers: dict[str, float]


class ClearStore(msgspec.Struct, frozen=True, tag="clear_store"):
    """Forget all ready pages."""


class StoreDone(msgspec.Struct, frozen=True, tag="store_done"):
    """Done; ``count`` pages were concerned."""

    count: int = 0
