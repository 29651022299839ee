"""The store's wire vocabulary: what a client asks of one store node.

Owns the msgspec structs. One message speaks of up to ``PAGES_PER_MESSAGE_MAX`` pages. Bulk bytes
never travel here: a grant names offsets in the node's segment, and the client reads or writes them
one-sidedly with the tokens from ``StoreOpened``.

::

    put   ReservePages ─▶ PagesReserved ─▶ transfer.write ─▶ CommitPages ─▶ PagesCommitted
                                           (broken: AbortPages)
          AwaitPages ─▶ PageStates         long poll: another writer's page is settled
    put   TakePages ─▶ transfer.read by the node, into slots of its own ─▶ PagesTaken   (few bytes)
    get   AcquirePages ─▶ PagesAcquired ─▶ transfer.read ─▶ verify ─▶ ReleasePages
    match MatchPages ─▶ PagesMatched       keys and states packed
    both  RenewLeases ─▶ LeasesRenewed     at half-life, while a reader or writer needs longer

Fencing: ``incarnation`` names the process life that made the grant; ``generation`` the grant.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvstore.page import KEY_NBYTES, PageKey, PageSpec
from kvstore.store import DEFAULT_POLICY, PageIdentity, PageRecord, PageState, PutPolicy

STATES = (PageState.ABSENT, PageState.WRITING, PageState.READY, PageState.SPILLED)  # by code


class ReserveStatus(StrEnum):
    """GRANTED: write it. PRESENT: committed already. WRITING: by another writer. REFUSED: no slot
    can be freed. LATER: room is being made; ask again, once the granted ones are written.
    COLLISION: the key is taken by a page of other tokens."""

    GRANTED = "granted"
    PRESENT = "present"
    WRITING = "writing"
    REFUSED = "refused"
    LATER = "later"
    COLLISION = "collision"


class CommitStatus(StrEnum):
    """READY: readers see it. STALE: the reservation is gone. TORN: the bytes in the slot are not
    the ones that the writer declared; the reservation is gone too."""

    READY = "ready"
    STALE = "stale"
    TORN = "torn"


class TakeStatus(StrEnum):
    """TAKEN: read, verified, committed. PRESENT, WRITING, REFUSED, LATER, COLLISION: as in a
    reservation; nothing was moved. TORN: what the node read does not hash to the checksum. UNREAD:
    the node could not read the writer's memory; it can be written to all the same."""

    TAKEN = "taken"
    PRESENT = "present"
    WRITING = "writing"
    REFUSED = "refused"
    LATER = "later"
    COLLISION = "collision"
    TORN = "torn"
    UNREAD = "unread"


class OpenStore(msgspec.Struct, frozen=True, tag="open_store"):
    """First message to a node: ask for access to its segment."""


class HoldSession(msgspec.Struct, frozen=True, tag="hold_session"):
    """Stream request, answered with one ``StoreDone``, that stays open while the client lives.

    When the last one of a client's incarnation ends, however it ends, the node gives up what that
    client has reserved: readers who wait for it are told, other writers may write it.
    """


class StoreOpened(msgspec.Struct, frozen=True, kw_only=True, tag="store_opened"):
    """Tokens of the segment's region, good for this incarnation only."""

    incarnation: str
    read_token: bytes
    write_token: bytes


class MatchPages(msgspec.Struct, frozen=True, tag="match_pages"):
    """Which of these pages are there? ``keys``: up to ``MATCH_KEYS_MAX``, one after the other.

    ``touch`` says that somebody is about to use them, so that they stay; nodes that compare their
    holdings say False.
    """

    keys: bytes
    touch: bool = True


class PagesMatched(msgspec.Struct, frozen=True, tag="pages_matched"):
    """One byte per key, in order: an index into ``STATES``."""

    codes: bytes


class AwaitPages(msgspec.Struct, frozen=True, kw_only=True, tag="await_pages"):
    """Long poll: answer when any of these pages is not being written (any more)."""

    keys: tuple[PageKey, ...]
    wait_s: float


class PageStates(msgspec.Struct, frozen=True, tag="page_states"):
    """The states, in the order of the keys asked for."""

    states: tuple[PageState, ...]


class ReservePages(msgspec.Struct, frozen=True, kw_only=True, tag="reserve_pages"):
    """Grant me slots for these pages.

    Of a node whose SSD has to make room first, the answer is LATER for all that does not fit; with
    ``wait_s`` it comes when at least one page has been granted, or that time is over.
    """

    spec: PageSpec
    pages: tuple[PageIdentity, ...]
    policy: PutPolicy = DEFAULT_POLICY
    wait_s: float = 0.0


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


class OfferedPage(msgspec.Struct, frozen=True, array_like=True):
    """A page in the writer's memory: its blob at ``offset``, xxh3-128 of its valid bytes."""

    identity: PageIdentity
    offset: int
    checksum: bytes


class TakePages(msgspec.Struct, frozen=True, kw_only=True, tag="take_pages"):
    """Here are pages, take them: one message stores a page where three steps would.

    The writer keeps the bytes behind ``read_token`` unchanged until the answer, or until it has
    given the request up: what is read after that does not hash to the checksum, at worst.
    ``wait_s`` is for room, as in ``ReservePages``.
    """

    spec: PageSpec
    read_token: bytes
    pages: tuple[OfferedPage, ...]
    policy: PutPolicy = DEFAULT_POLICY
    wait_s: float = 0.0


class PagesTaken(msgspec.Struct, frozen=True, tag="pages_taken"):
    """In the order of the pages."""

    statuses: tuple[TakeStatus, ...]


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """One grant, by name."""

    key: PageKey
    generation: int


class AbortPages(msgspec.Struct, frozen=True, kw_only=True, tag="abort_pages"):
    """I give these reservations up. ``quiet``: none of my bytes can arrive any more."""

    incarnation: str
    pages: tuple[PageGrant, ...]
    quiet: bool


class LeasedPage(msgspec.Struct, frozen=True, array_like=True):
    """A ready page: its record, and where its bytes lie while the lease lasts."""

    record: PageRecord
    offset: int
    generation: int


class PagesAcquired(msgspec.Struct, frozen=True, kw_only=True, tag="pages_acquired"):
    """The pages that were ready, under one lease that lasts ``lease_s`` from the request on.

    ``spread``: on how many nodes each of them lies, one byte per page, 0 for the usual number;
    empty when that is so for all. ``num_spilled``: so many of the others are on the SSD yet, as
    not all fit into memory at once: ask again once these have been read. ``waited_s``: from the
    request's arrival to the grant, when that was not at once; the lease lasts from then on.
    """

    incarnation: str
    lease_id: int
    lease_s: float
    pages: tuple[LeasedPage, ...]
    spread: bytes = b""
    num_spilled: int = 0
    waited_s: float = 0.0


class ReleasePages(msgspec.Struct, frozen=True, kw_only=True, tag="release_pages"):
    """End a lease, and perhaps ``others``. ``corrupt`` names pages that did not verify; the node
    checks and drops them."""

    incarnation: str
    lease_id: int
    corrupt: tuple[PageGrant, ...] = ()
    others: tuple[int, ...] = ()


class AcquirePages(msgspec.Struct, frozen=True, kw_only=True, tag="acquire_pages"):
    """Lease me those of these pages that are ready; with ``wait_s``, wait for the first.

    ``touch``: as in ``MatchPages``; a node that copies its pages elsewhere says False.
    ``first``: end these leases before; ignored when they are of another incarnation.
    """

    keys: tuple[PageKey, ...]
    wait_s: float = 0.0
    touch: bool = True
    first: ReleasePages | None = None


class RenewLeases(msgspec.Struct, frozen=True, kw_only=True, tag="renew_leases"):
    """I am alive and need these longer: read leases by id, reservations by grant."""

    incarnation: str
    lease_ids: tuple[int, ...] = ()
    writes: tuple[PageGrant, ...] = ()


class LeasesRenewed(msgspec.Struct, frozen=True, kw_only=True, tag="leases_renewed"):
    """What was renewed lasts ``lease_s`` from the request on. False, in the order asked: it has
    ended, or was renewed for the longest time allowed; the former promise is all there is."""

    lease_s: float
    leases: tuple[bool, ...]
    writes: tuple[bool, ...]


class PinPages(msgspec.Struct, frozen=True, tag="pin_pages"):
    """Never evict these pages (packed keys); pages that are not ready are left out."""

    keys: bytes


class UnpinPages(msgspec.Struct, frozen=True, tag="unpin_pages"):
    """Take pins off (packed keys)."""

    keys: bytes


class PagesPinned(msgspec.Struct, frozen=True, tag="pages_pinned"):
    """One byte per key, in order: 1 where the pin was set (taken off), else 0."""

    done: bytes


class ReadStats(msgspec.Struct, frozen=True, tag="read_stats"):
    """Ask for ``StoreStats``, with up to ``num_namespaces`` of the largest namespaces."""

    num_namespaces: int = 0


class NamespaceUsage(msgspec.Struct, frozen=True, array_like=True):
    """What one namespace holds on a node; a page in memory with a copy on the SSD is one page."""

    namespace: bytes
    num_pages: int
    memory_nbytes: int
    ssd_nbytes: int


class StoreStats(msgspec.Struct, frozen=True, kw_only=True, tag="store_stats"):
    """Counters and sizes of one node; what it was told and what ails it, in words."""

    numbers: dict[str, float]
    facts: dict[str, str] = {}
    namespaces: tuple[NamespaceUsage, ...] = ()


class ClearStore(msgspec.Struct, frozen=True, tag="clear_store"):
    """Forget all ready pages, or those of one namespace.

    ``clear_id`` names one clear of the cluster, the same to every node: while it is under way, no
    copy between nodes brings back what it covers. Without one a copy may.
    """

    namespace: bytes | None = None
    clear_id: str = ""


class StoreDone(msgspec.Struct, frozen=True, tag="store_done"):
    """Done; ``count`` pages were concerned."""

    count: int = 0


def pack_keys(keys: Sequence[PageKey]) -> bytes:
    """Keys one after the other, as ``MatchPages`` carries them."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[PageKey]:
    """The keys of a packed message; its length must be a multiple of ``KEY_NBYTES``."""
    assert len(packed) % KEY_NBYTES == 0, len(packed)
    return [PageKey(packed[i : i + KEY_NBYTES]) for i in range(0, len(packed), KEY_NBYTES)]


def states_of(codes: bytes) -> list[PageState]:
    """The states behind the codes of ``PagesMatched``.

    Raises:
        IndexError: a peer sent a code that is none.
    """
    return [STATES[code] for code in codes]
