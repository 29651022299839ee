"""Anonymous files of a fixed size: what one process hands to another, and what that one checks.

Owns memfds and their seals; knows no regions and no sockets. A file is sealed when it is made: it
can neither shrink nor grow any more, and nobody can lift that. So memory that is mapped from it
stays there: no process can end another one by truncating a file that both use (SIGBUS).

What a peer may do with a descriptor is decided when the owner opens one for it: a descriptor that
was opened for reading cannot be mapped for writing. This keeps peers of the same user from
*mistakes*; the kernel keeps out other users. A process of the same user that means harm could just
as well trace this one.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress

_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h, since 5.1; Python has no name for it


def create_sealed(name: str, nbytes: int) -> int:
    """Return a descriptor of a new file of ``nbytes`` zeros, for reading and writing.

    Raises:
        OSError: no descriptor or no memory left, or a kernel without seals.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal_for_good(fd: int, *, last_writer: bool = False) -> None:
    """Let nobody add a seal: none can take writing away from the owner.

    Args:
        fd: a file from ``create_sealed``, mapped by its owner.
        last_writer: only the mappings that exist may write (Linux 5.1; older kernels allow more).
    """
    if last_writer:
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def opened_again(fd: int, *, writable: bool) -> int:
    """Return a new descriptor of the same file, with these rights and locks of its own.

    Raises:
        OSError: no descriptor left, or no ``/proc``.
    """
    mode = os.O_RDWR if writable else os.O_RDONLY
    return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)


def check_sealed(fd: int, nbytes: int) -> None:
    """Check that ``nbytes`` of a file from a peer can be mapped and will stay there.

    Raises:
        ValueError: not a regular file, too short, or it could still shrink.
        OSError: not a file that can be sealed.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("the descriptor is not that of a regular file")
    if not 0 < nbytes <= status.st_size:
        raise ValueError(f"a file of {status.st_size} bytes cannot hold the {nbytes} claimed")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the file is not sealed: its owner could truncate it under us")
