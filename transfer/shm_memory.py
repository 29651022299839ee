"""Memory that an owner allocates, private or shared with peers of this host.

Owns the mappings and their files; knows no sockets, no tokens and no regions. Nothing here has a
name in any file system: the kernel frees everything when the last process that holds it ends,
however it ends.

Memory can be *left behind* for a peer that was stopped while it copied (SIGSTOP, a debugger) and
may go on at any time, or that has not taken what was sent to it by reference::

    shared:  owner ──▶ file ◀── peer          left behind:  owner ──▶ private copy
                                                            file ◀── peer, alone

The owner's addresses stay the same and no store of its threads is lost: the kernel copies each page
when it is next written. Until then the page is the file's, and keeps its bytes unless a peer stores
into it. Where one might, all are copied at once (``keep_bytes``): what that peer writes when it
wakes up is seen by nobody. A peer of tcp may find pages in its socket and stores nothing: for it no
page is copied. A page that was copied takes twice its room for as long as anybody holds a view.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
from contextlib import suppress

from transfer.buffers import address_of
from transfer.gate import Gate
from transfer.shm_files import create_sealed, seal_for_good

HUGE_PAGES_FROM_NBYTES = 4 << 20
MAX_LEFT_BEHIND_NBYTES = 1 << 30  # it is copied: a segment of most of the memory must not be


def shared_memory_available() -> bool:
    """True where memory can be shared through anonymous files and abstract sockets."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


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
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; Python has no name for it
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class Allocation:
    """Zeroed, page-aligned memory; in a memfd when ``shared``.

    The file descriptor is closed when the last region in it is gone (``release``); the mapping
    lives as long as anybody holds a view of it.
    """

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.nbytes = nbytes
        self.file_id = next(_FILE_IDS)
        self.fd: int | None = None
        self.sending = Gate()  # who sends from the file is inside
        self._users = 0
        if shared:
            self.fd = create_sealed("kvferry", nbytes)
            try:
                self._map = mmap.mmap(self.fd, nbytes)
                seal_for_good(self.fd)
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
        if self._users == 0:
            self.stop_sharing()

    def stop_sharing(self) -> None:
        """Hand the file to nobody any more. Idempotent; waits for who sends a piece from it."""
        self.sending.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    @property
    def can_leave_behind(self) -> bool:
        """False for memory that is too large to be copied."""
        return self.nbytes <= MAX_LEFT_BEHIND_NBYTES

    def leave_behind(self) -> bool:
        """Give up the file to the peers that look at it, but keep the addresses and the bytes.

        Call ``keep_bytes`` next if one may store into it. Takes 0.2 s for a gigabyte.
        Returns False where the kernel refuses. Memory that a driver pinned (a GPU's, a network
        card's) stays what the driver sees: register it anew. Does nothing to private memory.
        """
        if self.fd is None:
            return True
        self.sending.close()  # what is stored after the next line is not in the file
        if not self._map_privately(self.fd):
            return False
        self.stop_sharing()
        return True

    def keep_bytes(self) -> bool:
        """Copy every page that is still the file's, after ``leave_behind``: seconds for a gigabyte.

        Returns False where the kernel refuses: it is too old, or out of memory.
        """
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
        return True

    def _map_privately(self, fd: int) -> bool:
        """Replace our mapping, in one step, by a private one of the same bytes."""
        both, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        at: int = _LIBC.mmap(self.address, self.nbytes, both, flags, fd, 0)
        return at == self.address
