"""One process a tier: the lock file.

Owns the lock and the words of the refusal. The kernel releases the lock when its process ends,
however it ends; what the file says is only for people.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from kvstore.ssd.config import SsdRefused

HOLDER_NBYTES_MAX = 256


class TierLock:
    """Hold ``path`` until ``release``.

    Raises:
        SsdRefused: another holds it; the message says who.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, HOLDER_NBYTES_MAX, 0).decode("utf-8", "replace").strip()
            os.close(self._fd)
            raise SsdRefused(
                f"{path.parent} is in use by {holder or 'another process'}; stop it, or give this"
                " node a directory of its own"
            ) from None
        except OSError:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
