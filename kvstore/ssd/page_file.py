"""The file of pages: reads, writes and syncs at offsets.

Owns the file descriptor and the choice of direct or buffered I/O. Knows no slots. Tests put a
faulty ``Disk`` in the place of ``LocalDisk``.

Direct I/O (O_DIRECT) keeps pages out of the page cache, which would hold them a second time, and
makes a write that returned a write that the device has. Where the file system refuses it, the same
calls go through the cache, which is told to drop what it holds; that is said once, loudly.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Protocol

from kvstore.ssd.config import BLOCK_NBYTES

log = logging.getLogger(__name__)


class PageFile(Protocol):
    """All offsets, lengths and memory are multiples of 4,096. All calls may raise OSError."""

    @property
    def is_direct(self) -> bool: ...

    @property
    def nbytes(self) -> int:
        """Length of the file when it was opened, before it was made longer."""
        ...

    def read(self, offset: int, into: memoryview) -> int:
        """Returns the bytes read: fewer than asked for only at the end of the file."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``, or raise."""
        ...

    def reserve(self, offset: int, nbytes: int) -> None:
        """Have the file system set room aside, so that later writes cannot lack it."""
        ...

    def sync(self) -> None:
        """What was written is on the disk; raises when the file is not in the folder any more."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    def open(self, path: Path, nbytes: int) -> PageFile:
        """Open an existing file for reading and writing and make it ``nbytes`` long."""
        ...


class LocalDisk:
    """The machine's own file systems."""

    def open(self, path: Path, nbytes: int) -> PageFile:
        return LocalFile(path, nbytes)


class LocalFile:
    """A file, opened directly where that works. A thread-safe ``PageFile``."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._fd, self._direct = _open(path)
        try:
            self._nbytes = os.fstat(self._fd).st_size
            os.ftruncate(self._fd, nbytes)
        except OSError:
            os.close(self._fd)
            raise

    @property
    def is_direct(self) -> bool:
        return self._direct

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, offset: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            num = os.preadv(self._fd, [into[done:]], offset + done)
            done += num
            if not num or num % BLOCK_NBYTES:
                break  # the end of the file, which may lie inside of a block
        self._uncache(offset, len(into))
        return done

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            num = os.pwritev(self._fd, [data[done:]], offset + done)
            if not num:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            done += num
        if not self._direct:
            os.fdatasync(self._fd)  # what is dirty cannot be dropped
            self._uncache(offset, len(data))

    def reserve(self, offset: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise  # others: this file system cannot reserve; it will say so when written

    def sync(self) -> None:
        os.fdatasync(self._fd)
        if not os.fstat(self._fd).st_nlink:
            raise OSError(errno.ENOENT, "the file was deleted", str(self._path))

    def close(self) -> None:
        os.close(self._fd)

    def _uncache(self, offset: int, nbytes: int) -> None:
        if not self._direct:
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _open(path: Path) -> tuple[int, bool]:
    """Open without the page cache if the file system can: some say so only when asked to read."""
    flags = os.O_RDWR | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            fd = os.open(path, flags | direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            if _reads_directly(fd):
                return fd, True
            os.close(fd)
    log.warning(
        "%s: its file system refuses direct I/O; pages go through the page cache, every write is"
        " flushed, and the tier is slower; a file system such as ext4 or xfs would do better",
        path,
    )
    return os.open(path, flags), False


def _reads_directly(fd: int) -> bool:
    block = mmap.mmap(-1, BLOCK_NBYTES)
    try:
        os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        block.close()
    return True
