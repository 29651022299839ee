"""Memory between callers and the disk.

Owns page-aligned buffers, as direct I/O wants them, and who waits for one. A thread that reads or
writes touches only these: a caller who gives up has its own memory back at once.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque

from kvstore.ssd.config import COPY_NBYTES


class BouncePool:
    """At most ``nbytes`` of buffers; always at least one, whatever its size."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes_max = nbytes
        self._nbytes = 0  # made, free or not
        self._num_out = 0
        self._free: dict[int, list[mmap.mmap]] = {}
        self._waiters: deque[tuple[int, asyncio.Future[memoryview]]] = deque()

    @property
    def num_out(self) -> int:
        return self._num_out

    def take_now(self, nbytes: int) -> memoryview | None:
        """A buffer, or None when all memory is in use or others wait for it."""
        return None if self._waiters else self._take(nbytes)

    async def take(self, nbytes: int) -> memoryview:
        """A buffer, in turn. When cancelled, none is taken."""
        ready = self.take_now(nbytes)
        if ready is not None:
            return ready
        future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._waiters.append((nbytes, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(future.result())
            self._serve()
            raise

    def give(self, buffer: memoryview) -> None:
        memory = buffer.obj
        assert isinstance(memory, mmap.mmap), memory
        self._num_out -= 1
        self._free.setdefault(len(buffer), []).append(memory)
        self._serve()

    def _take(self, nbytes: int) -> memoryview | None:
        free = self._free.get(nbytes)
        if free:
            self._num_out += 1
            return memoryview(free.pop())
        if self._nbytes + nbytes > self._nbytes_max:
            self._drop_free()
        if self._num_out and self._nbytes + nbytes > self._nbytes_max:
            return None
        self._nbytes += nbytes
        self._num_out += 1
        return memoryview(mmap.mmap(-1, nbytes))

    def _drop_free(self) -> None:
        """Let go of what is free, for buffers of another size."""
        self._nbytes -= sum(nbytes * len(free) for nbytes, free in self._free.items())
        self._free.clear()

    def _serve(self) -> None:
        while self._waiters:
            nbytes, future = self._waiters[0]
            if not future.done():
                buffer = self._take(nbytes)
                if buffer is None:
                    return
                future.set_result(buffer)
            self._waiters.popleft()


async def copy(to: memoryview, source: memoryview) -> None:
    """Copy on the loop, which others have in between; stops at once when cancelled."""
    for start in range(0, len(source), COPY_NBYTES):
        if start:
            await asyncio.sleep(0)
        to[start : start + COPY_NBYTES] = source[start : start + COPY_NBYTES]
