"""The page-store contract: what a node may ask of any store back end.

Owns the ``PageStore`` interface and its result types. Implementations: the distributed store
(``kvstore/client``), and one for pages in device memory over any other (``kvstore/device``). All
pass the same contract suite.

A missing page is a result, never an exception. A store that cannot be reached holds nothing and
accepts nothing: ``match`` and ``get`` say absent, ``put`` says failed. Callers recompute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from kvstore.page import KEY_NBYTES, PageKey
from transfer.interface import Region


class PageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a page claims to be; verified by every reader.

    Attributes:
        key: content key.
        parent: key of the page before, or the namespace.
        depth: index of the page in its sequence, from 0.
        tokens: the page's tokens, int32 little-endian (1..page_size of them).
        checksum: xxh3-128 of the valid bytes, 16 bytes.
        page_nbytes: bytes of the whole page.
    """

    key: PageKey
    parent: bytes
    depth: int
    tokens: bytes
    checksum: bytes
    page_nbytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class PageIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader or writer knows of a page before it has the bytes."""

    key: PageKey
    parent: bytes
    depth: int
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class PageState(StrEnum):
    """READY: in memory. SPILLED: only on a node's SSD; a ``get`` reads it all the same, slower."""

    ABSENT = "absent"
    WRITING = "writing"
    READY = "ready"
    SPILLED = "spilled"

    @property
    def present(self) -> bool:
        """A ``get`` would read it now."""
        return self is PageState.READY or self is PageState.SPILLED


PRIORITY_DEFAULT = 35
PRIORITY_MAX = 100


class PutPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a page is to be kept; does not change what it is.

    Attributes:
        namespace: the tenant whose quota the page counts against: the root of its key chain
            (``kvstore.keys.namespace_of``). Empty: the tenant of pages that name none.
        priority: 0..100; pages of lower priority are evicted first.
        priority_s: how long the priority holds, a float; a raised one falls back to the default
            after it. None: for good.

    Raises:
        ValueError: a field is of another type, or out of range; the message names it.
    """

    namespace: bytes = b""
    priority: int = PRIORITY_DEFAULT
    priority_s: float | None = None

    def __post_init__(self) -> None:
        priority, priority_s = self.priority, self.priority_s
        if type(priority) is not int:  # nor a bool, nor a number of numpy: a node takes neither
            text = f"an int, 0..{PRIORITY_MAX}; {PRIORITY_DEFAULT} is the default"
            raise ValueError(f"priority={priority!r}: must be {text}")
        if not 0 <= priority <= PRIORITY_MAX:
            raise ValueError(f"priority={priority}: must be 0..{PRIORITY_MAX}")
        if priority_s is not None:
            self._check_time(priority_s)
        if type(self.namespace) is not bytes:
            text = "bytes: kvstore.keys.namespace_of(model, spec), or b'' for none"
            raise ValueError(f"namespace={self.namespace!r}: must be {text}")
        if len(self.namespace) not in (0, KEY_NBYTES):
            raise ValueError(f"namespace of {len(self.namespace)} bytes: must be {KEY_NBYTES}")

    def _check_time(self, priority_s: float) -> None:
        if type(priority_s) not in (int, float):
            text = "a number of seconds, or None for good"
            raise ValueError(f"priority_s={priority_s!r}: must be {text}")
        if not 0 < priority_s <= sys.float_info.max:
            raise ValueError(f"priority_s={priority_s}: must be positive and finite")
        if type(priority_s) is int:
            msgspec.structs.force_setattr(self, "priority_s", float(priority_s))


DEFAULT_POLICY = PutPolicy()


class PutOutcome(StrEnum):
    """STORED by this call; PRESENT before it (or finished by another writer meanwhile); REFUSED
    for lack of space; FAILED because the store could not be reached or the write broke."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"
    FAILED = "failed"


class GetOutcome(StrEnum):
    """READ and verified; ABSENT (or not there in time); CORRUPT: bytes or identity did not
    verify; FAILED: the node that should hold it could not be reached."""

    READ = "read"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    FAILED = "failed"


class PutPage(NamedTuple):
    """One page to store; its whole blob lies at ``local_offset`` in the source region."""

    identity: PageIdentity
    local_offset: int


class GetPage(NamedTuple):
    """One page wanted; its whole blob goes to ``local_offset`` in the destination region."""

    identity: PageIdentity
    local_offset: int


class TransferCount(NamedTuple):
    """What a put or get really moved over the wire."""

    num_pages: int
    nbytes: int


class PutResult(NamedTuple):
    outcomes: list[PutOutcome]
    moved: TransferCount


class GetResult(NamedTuple):
    outcomes: list[GetOutcome]
    moved: TransferCount


class PageStore(Protocol):
    """A shared store of KV pages.

    ``put``: pages present already move nothing; pages being written by another writer are
    joined (the outcome is the other writer's, or this call writes if that one fails).
    The caller keeps the source pages unchanged until ``put`` returns. ``policy`` applies to the
    pages that this call stores.

    ``get``: reads, verifies, releases its leases. With ``wait`` it also waits until ``deadline_s``
    for pages that are absent or being written now. ``on_page(index, outcome)`` is called once per
    page as soon as its outcome is known, in any order. ``get`` never touches the destination
    after it has returned or been cancelled. Only pages with outcome READ hold defined bytes.

    Raises:
        ValueError: what was asked is none of the above: a deadline that is not finite, something
            that is no page or key, a place outside the region (``kvstore/asking.py``). Nothing
            was done.
    """

    async def match(self, keys: Sequence[PageKey], *, deadline_s: float) -> list[PageState]: ...

    async def put(
        self,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> PutResult: ...

    async def get(
        self,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        wait: bool = False,
        on_page: Callable[[int, GetOutcome], None] | None = None,
    ) -> GetResult: ...

    async def close(self) -> None: ...


def identities(
    namespace: bytes, keys: Sequence[PageKey], tokens: bytes, page_size: int
) -> list[PageIdentity]:
    """Return the identity of every page of a sequence, given its keys and packed int32 tokens."""
    page_nbytes = page_size * 4
    return [
        PageIdentity(
            key=key,
            parent=keys[i - 1] if i else namespace,
            depth=i,
            tokens=tokens[i * page_nbytes : (i + 1) * page_nbytes],
        )
        for i, key in enumerate(keys)
    ]
