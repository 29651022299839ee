"""Who is inside a region right now: one kernel lock for each, held for the time of a piece.

Owns the protocol by which an owner knows that no peer touches a region any more. Knows no memory.
Byte ``region_id`` of the control file stands for the region; peers lock it shared, the owner tries
to lock it alone::

    peer                                    owner
    lock byte (shared)                      control word := 0
    control word == id?  no ─▶ unlock       lock byte (alone)?  refused ─▶ somebody is inside, wait
    copy one piece                          granted ─▶ nobody is inside, nobody will be; unlock
    unlock byte

Why it is sound: the kernel serialises the two locks. Where the owner is granted the lock first, the
peer's lock comes after the word was withdrawn, so the peer sees that and stays out; else the owner
is refused. Copied bytes are ordered before the unlock. Unlike words in shared memory this needs no
fence (a store that is followed by a load may be reordered even on x86, and Python has no fence),
and the kernel unlocks for a peer that is killed. A peer that is *stopped* stays inside; the owner
waits with a limit and then leaves the memory to it (``shm_memory``).

These are locks of the open file (``F_OFD``), so each side needs one of its own: an owner opens the
file anew for each peer. Threads of one peer share it; a count says when the last of them is out.
A lock costs a peer 0.8 µs (one syscall), twice for each piece.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

FIRST_PAUSE_S = 50e-6
MAX_PAUSE_S = 5e-3
EVERY_REGION = 0  # no region has this id
_TO_THE_END = 0

# struct flock: short l_type, l_whence; off_t l_start, l_len; pid_t l_pid
_FLOCK = struct.Struct("hhqqi4x")
_REFUSED = (errno.EAGAIN, errno.EACCES, errno.ENOLCK)  # the last: no memory for one more lock


class Presence:
    """A peer's side. Thread-safe."""

    def __init__(self, fd: int) -> None:
        """Take over ``fd``: an open file of the control page that no other process shares."""
        self._fd = fd
        self._closed = False
        self._num_inside: dict[int, int] = {}
        self._lock = threading.Lock()

    def enter(self, region_id: int) -> bool:
        """Go inside; False when the owner keeps us out, or after ``close``.

        Every True needs one ``leave``. The memory may be touched only if the region's control word,
        read after this, still names the region.
        """
        with self._lock:
            num = self._num_inside.get(region_id, 0)
            if self._closed or (num == 0 and not _lock_shared(self._fd, region_id)):
                return False
            self._num_inside[region_id] = num + 1
            return True

    def leave(self, region_id: int) -> None:
        with self._lock:
            num = self._num_inside[region_id] - 1
            if num:
                self._num_inside[region_id] = num
                return
            del self._num_inside[region_id]
            # Also when closed: the control page's mapping holds the same open file, and its locks,
            # for as long as anybody refers to it.
            _set_lock(self._fd, fcntl.F_UNLCK, region_id)
            if self._closed and not self._num_inside:
                os.close(self._fd)

    def close(self) -> None:
        """Let nobody in any more; the locks of those inside go with the last of them."""
        with self._lock:
            if not self._closed and not self._num_inside:
                os.close(self._fd)
            self._closed = True


def wait_until_empty(fd: int, region_id: int, patience_s: float) -> bool:
    """Wait until no peer is inside a region whose control word was withdrawn; the owner's side.

    ``EVERY_REGION`` stands for all of them.

    Returns False when somebody stayed inside for ``patience_s``. Blocks the calling thread.
    """
    for pause_s in _pauses(patience_s):
        if _is_empty(fd, region_id):
            return True
        time.sleep(pause_s)
    return _is_empty(fd, region_id)


async def until_empty(fd: int, region_id: int, patience_s: float) -> bool:
    """``wait_until_empty`` for a loop that has other things to do. Cancelled, it knows nothing."""
    for pause_s in _pauses(patience_s):
        if _is_empty(fd, region_id):
            return True
        await asyncio.sleep(pause_s)
    return _is_empty(fd, region_id)


def _pauses(patience_s: float) -> Iterator[float]:
    """Yield how long to wait before the next look, until patience is used up."""
    ends_at = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while time.monotonic() < ends_at:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _is_empty(fd: int, region_id: int) -> bool:
    """A query would not do: the kernel answers it without taking the lock that orders memory."""
    try:
        _set_lock(fd, fcntl.F_WRLCK, region_id)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    _set_lock(fd, fcntl.F_UNLCK, region_id)
    return True


def _lock_shared(fd: int, region_id: int) -> bool:
    try:
        _set_lock(fd, fcntl.F_RDLCK, region_id)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def _set_lock(fd: int, kind: int, region_id: int) -> None:
    length = _TO_THE_END if region_id == EVERY_REGION else 1
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, region_id, length, 0))
