"""A timer of the kernel, which any thread may set without waking the loop that it goes off on.

Owns one timerfd. A timer of asyncio that is set from outside has to wake its loop, to be taken into
account; a descriptor that becomes readable later has not. Only Linux has it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

NANO = 1_000_000_000


class KernelTimer:
    """Calls ``fire()`` on its loop. Made, set and closed on that loop, or while it is lent."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None]) -> None:
        """Raises:
        OSError: there is no such timer here, or no descriptor for it.
        """
        if sys.platform != "linux":
            raise OSError("timers with a descriptor need Linux")
        libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK, TFD_CLOEXEC
        self._fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._settime = libc.timerfd_settime
        self._loop = loop
        self._fire = fire
        self._is_set = False
        loop.add_reader(self._fd, self._on_readable)

    def set(self, delay_s: float) -> None:
        """Go off in ``delay_s``, if nothing was to make it go off before."""
        if not self._is_set:
            self._is_set = True
            nanos = max(1, int(delay_s * NANO))
            self._set_time((ctypes.c_long * 4)(0, 0, nanos // NANO, nanos % NANO))

    def _set_time(self, spec: ctypes.Array[ctypes.c_long]) -> None:
        """``spec``: seconds and nanoseconds of the interval (none), then of the first time."""
        failed = self._settime(self._fd, 0, spec, None)
        assert not failed, "a time that is none"

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._is_set = False
        self._fire()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
