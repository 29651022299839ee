"""Host memory through which the pages of a device pass on their way to and from a store.

Owns the slots of the staging memory and the discipline of copies: a copy that was begun is waited
for, also when its caller is cancelled, so that a slot is given back and a device page reused only
when nothing touches them any more. Knows no store, no CUDA: the copies are a ``DevicePages``'.

    moving slots: held for one batch (copy and wire), handed out first come first served
    waiting slots: one per reader that waits for a page that is not there yet; never queued for

A reader that waits can so never keep a page from being pushed, which may be the very one it
waits for on the other side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstore.device.slot_pool import SlotPool
from transfer.errors import Unauthorized
from transfer.interface import Region, Rights, Transfer

WAITING_SHARE = 4  # one staging page of so many is for readers that wait


class PageMove(NamedTuple):
    """One page's place on the device and in staging memory, in bytes from the start of each."""

    device_offset: int
    staging_offset: int


class DevicePages(Protocol):
    """The page memory of a device, with host memory to reach it through.

    Copies are of whole pages and block. They are called from any thread, several at a time, on
    disjoint pages, and return when all bytes are in place: ``copy_out`` sees what was computed by
    the steps that have returned, and steps that begin after ``copy_in`` see what it brought.

    Raises:
        RuntimeError: (both copies) the device failed.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the page memory."""
        ...

    @property
    def staging(self) -> object:
        """A host buffer of whole pages that ``Transfer.register`` takes."""
        ...

    def copy_out(self, moves: Sequence[PageMove]) -> None:
        """Copy from the device into ``staging``."""
        ...

    def copy_in(self, moves: Sequence[PageMove]) -> None:
        """Copy from ``staging`` to the device."""
        ...


class DeviceRegion:
    """``Region`` of device memory: an address space for page offsets, without a host view.

    No peer reaches it, and the host does not: only ``StagedStore`` takes it.

    Args:
        nbytes: size.
        first: where it begins in the device's page memory.
    """

    def __init__(self, nbytes: int, *, first: int = 0) -> None:
        self.first = first
        self.revoked = False
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def view(self) -> memoryview:
        raise TypeError("device memory has no host view: its pages pass through a StagedStore")

    def export(self, rights: Rights) -> bytes:
        raise Unauthorized("device memory cannot be granted to peers: export host memory")

    def revoke(self) -> None:
        """Copy nothing from or to it any more; a copy under way ends first. Idempotent."""
        self.revoked = True


class StagingSlots:
    """A run of staging pages: free slots, and where they lie."""

    def __init__(self, num_slots: int, *, first: int, page_nbytes: int) -> None:
        self.pool = SlotPool(num_slots)
        self._first = first
        self._page_nbytes = page_nbytes

    def offset_of(self, slot: int) -> int:
        return (self._first + slot) * self._page_nbytes


class Staging:
    """The staging memory of one process.

    Raises:
        ValueError: the staging memory does not hold a single page.
    """

    def __init__(self, pages: DevicePages, *, transfer: Transfer, page_nbytes: int) -> None:
        self.region: Region = transfer.register(pages.staging)
        num_pages = self.region.nbytes // page_nbytes
        if num_pages < 1:
            raise ValueError(
                f"staging memory of {self.region.nbytes} bytes: one page takes {page_nbytes}"
            )
        num_waiting = num_pages // WAITING_SHARE
        num_moving = num_pages - num_waiting
        self.moving = StagingSlots(num_moving, first=0, page_nbytes=page_nbytes)
        self.waiting = StagingSlots(num_waiting, first=num_moving, page_nbytes=page_nbytes)
        self._pages = pages

    @property
    def num_held(self) -> int:
        """Staging pages in use."""
        pools = (self.moving.pool, self.waiting.pool)
        return sum(pool.num_slots - pool.num_free for pool in pools)

    async def copy_out(self, moves: Sequence[PageMove]) -> None:
        """Device to staging; when cancelled, raises once the copy has ended."""
        await _run_to_its_end(self._pages.copy_out, moves)

    async def copy_in(self, moves: Sequence[PageMove]) -> None:
        """Staging to device; when cancelled, raises once the copy has ended."""
        await _run_to_its_end(self._pages.copy_in, moves)


async def _run_to_its_end(
    copy: Callable[[Sequence[PageMove]], None], moves: Sequence[PageMove]
) -> None:
    """Run a copy on the loop's executor, which cannot stop it: a cancellation waits for it."""
    running = asyncio.get_running_loop().run_in_executor(None, copy, moves)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    failed = running.exception()
    if cancelled is not None:
        raise cancelled
    if failed is not None:
        raise failed
