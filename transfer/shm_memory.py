"""Shared memory of this host: anonymous files, and the words by which an owner revokes.

Owns memfds and their mappings; knows no sockets and no tokens. Nothing here has a name in any file
system: the kernel frees everything when the last process that holds it ends, however it ends.

The *control page* is one memfd of 64-bit words for each engine::

    word 0           state of the engine: OPEN, CLOSED (said goodbye) or ABORTED
    word 1 + slot    id of the region that lives in this slot; 0 when none does

Peers read it before, during and after each copy. Region ids are never used twice, so a word that
still equals the id means: not revoked. One word is stored by one aligned 8-byte move.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from contextlib import suppress
from enum import IntEnum

from transfer.buffers import address_of
from transfer.errors import PeerClosed, PeerLost, RegionRevoked, TransferError

MAX_REGIONS = 65_535
HUGE_PAGES_FROM_NBYTES = 4 << 20
CONTROL_NBYTES = 8 * (MAX_REGIONS + 1)


class EngineState(IntEnum):
    """Word 0 of the control page."""

    OPEN = 1
    CLOSED = 2
    ABORTED = 3


def gone_error(state: int) -> TransferError:
    """Return why memory of an engine in ``state`` is not there any more."""
    if state == EngineState.CLOSED:
        return PeerClosed("the peer closed its transfer engine")
    if state == EngineState.ABORTED:
        return PeerLost("the peer's transfer engine was aborted")
    return RegionRevoked("the region was revoked by its owner")


def shared_memory_available() -> bool:
    """True where memory can be shared through anonymous files and abstract sockets."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def slot_of(region_id: int) -> int:
    """Return the control slot that a region id carries in its low bits."""
    return region_id & 0xFFFF


def use_huge_pages(mapped: mmap.mmap, nbytes: int) -> None:
    """Ask for huge pages: copies of whole segments are bound by the TLB otherwise.

    Private memory gets them where transparent huge pages are ``madvise`` or ``always``, shared
    memory where ``shmem_enabled`` is ``advise``; elsewhere nothing changes.
    """
    if nbytes < HUGE_PAGES_FROM_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    with suppress(OSError):  # a kernel without transparent huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)


_FILE_IDS = itertools.count(1)


class Allocation:
    """Zeroed, page-aligned memory; in a memfd when ``shared``.

    The file descriptor is closed when the last region in it is gone (``release``); the mapping
    lives as long as anybody holds a view of it.
    """

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.nbytes = nbytes
        self.file_id = next(_FILE_IDS)
        self.fd: int | None = None
        self._users = 0
        if shared:
            self.fd = os.memfd_create("kvferry", os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.fd, nbytes)
                self._map = mmap.mmap(self.fd, nbytes)
            except OSError:
                os.close(self.fd)
                raise
        else:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        use_huge_pages(self._map, nbytes)
        self.view = memoryview(self._map)
        self.address = address_of(self.view)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where ``[address, address + nbytes)`` lies in here; None if it does not."""
        offset = address - self.address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    @property
    def in_use(self) -> bool:
        return self._users > 0

    def hold(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if self._users == 0 and self.fd is not None:
            os.close(self.fd)
            self.fd = None


class ControlPage:
    """The owner's side of the control words."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvferry-control", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, CONTROL_NBYTES)
        self._words = memoryview(mmap.mmap(self.fd, CONTROL_NBYTES)).cast("Q")
        self._words[0] = EngineState.OPEN

    def set_state(self, state: EngineState) -> None:
        self._words[0] = state

    def publish(self, region_id: int) -> None:
        self._words[1 + slot_of(region_id)] = region_id

    def withdraw(self, region_id: int) -> None:
        self._words[1 + slot_of(region_id)] = 0

    def close(self) -> None:
        os.close(self.fd)


class ControlView:
    """A peer's side of the control words; read-only."""

    def __init__(self, fd: int) -> None:
        mapped = mmap.mmap(fd, CONTROL_NBYTES, prot=mmap.PROT_READ)
        self._words = memoryview(mapped).cast("Q")

    @property
    def state(self) -> int:
        return self._words[0]

    def holds(self, region_id: int) -> bool:
        return self._words[1 + slot_of(region_id)] == region_id
