"""What the store node asks of a slower tier below its memory: the SSD.

Owns the ``Tier`` interface and the description of a page on it. The tier owns files, slots,
checksums on the way in and out, its own threads, and which pages are worth its room: a page without
room displaces colder ones. The directory (``kvstore/server/directory.py``) decides what is copied,
``kvstore/server/tiering.py`` carries it out.

Pages on a tier are named by key: a node holds one page of a key. What was stored under a key is
immutable; it goes with ``remove``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvstore.page import PageKey, PageSpec
from kvstore.store import PageRecord


class TierPage(NamedTuple):
    """All that a node must know of a page to serve it again after a restart.

    Attributes:
        record: identity, checksum and size.
        spec: geometry.
        namespace: the tenant that it counts against; empty for the tenant of unnamed pages.
        priority: 0..100 at the time it was stored.
        heat: how warm the page was when it was stored; higher is warmer. Numbers of one policy
            compare; a restart only uses them as an order.
    """

    record: PageRecord
    spec: PageSpec
    namespace: bytes
    priority: int
    heat: float


class Tier(Protocol):
    """Pages on slower storage.

    Calls may overlap, for different keys. ``store`` and ``load`` never block the loop. A tier that
    breaks (disk full, permission, I/O error) does not raise: it says so in ``degraded``, loudly in
    its log, and answers False or None from then on.
    """

    @property
    def degraded(self) -> str | None:
        """Why the tier takes no pages (any more); None while it works."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def used_nbytes(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Capacity for page bytes."""
        ...

    def displace(self, told: Callable[[Sequence[PageKey]], None]) -> None:
        """Make room for warmer pages from now on, by giving up colder ones; ``told`` is called
        with these before ``store`` goes on."""
        ...

    def touch(self, key: PageKey, heat: float) -> None:
        """Say how warm a page is now; an unknown key is ignored."""
        ...

    def __contains__(self, key: PageKey) -> bool:
        """The tier has the page, also while it cannot be read."""
        ...

    async def store(self, page: TierPage, data: memoryview) -> bool:
        """Write one page; True once ``load`` would find it (durable sooner or later, whole or
        not at all). ``data`` stays unchanged until this returns. False: not stored, for want of
        room among warmer pages, of time, or because the disk fails.

        When cancelled it may still be reading ``data`` for a moment only if ``data`` was copied;
        the caller reuses the memory at once.
        """
        ...

    async def load(self, key: PageKey, into: memoryview) -> PageRecord | None:
        """Read one page into ``into``, verified against its checksum. None: absent, or damaged
        (then it is removed and counted), or not now: it is still in the tier. ``into`` holds
        nothing defined unless a record returns.

        Returns, also when cancelled, only after the last byte has been written to ``into``.
        """
        ...

    def remove(self, keys: Sequence[PageKey]) -> None:
        """Forget pages; unknown keys are ignored. Their room is free at once."""
        ...

    async def flush(self) -> bool:
        """Make what was stored and removed so far last: a removed page does not come back,
        however this process ends. False: the disk failed, or is closed."""
        ...

    def contents(self) -> Iterator[TierPage]:
        """Every page found at start, in any order, but for those that the tier has no more when
        it is their turn; called once. Other calls may come between two pages."""
        ...

    def numbers(self) -> dict[str, float]:
        """Counters and sizes for metrics."""
        ...

    async def close(self) -> None:
        """Make the index durable and stop. Idempotent."""
        ...
