"""Memory that the library reads into and writes from: registered once, never the caller's.

Owns the slabs of one direction. Why pages pass through slabs instead of moving straight between
the library and the caller's region:

* A read of Mooncake that hung and failed may still write into its buffer when the segment's owner
  comes back (seen: 20 MB, a minute after the call had returned). Such bytes may meet a slab, never
  the caller's memory; a slab is abandoned after such a call, so that they harm no later one either,
  and pages are verified after they were copied, so that even that would be found.
* The library's port lets any host on the network reach registered memory. A slab holds bytes that
  are verified before use; the pool that a model computes from must not be reachable.

::

    free ──take──▶ lent ──give_back──▶ free
                     └──the call hung──▶ abandoned: left to the library for good
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.mooncake.binding import HUNG_S, TRANSFER_FAILED, NativeStore
from kvstore.mooncake.calls import within
from kvstore.mooncake.config import ABANDONED_SLABS_MAX, BATCH_PAGES_MAX, SLAB_NBYTES
from kvstore.mooncake.record import header_nbytes
from kvstore.page import PageSpec

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_ABANDONED: list[Slab] = []  # keeps the memory mapped as long as the process lives


class ObjectLayout:
    """Where the objects of one batch lie in a slab."""

    def __init__(self, spec: PageSpec) -> None:
        self.header_nbytes = header_nbytes(spec)
        self.object_nbytes = self.header_nbytes + spec.page_nbytes
        self.stride = -(-self.object_nbytes // _ALIGNMENT) * _ALIGNMENT
        self.batch_pages = max(1, min(BATCH_PAGES_MAX, SLAB_NBYTES // self.stride))
        self.slab_nbytes = self.batch_pages * self.stride


class Slab:
    """Memory of one call."""

    def __init__(self, layout: ObjectLayout) -> None:
        self._layout = layout
        self._memory: npt.NDArray[np.uint8] = np.empty(layout.slab_nbytes, dtype=np.uint8)
        self._view = memoryview(self._memory.data)
        self._registered_with: NativeStore | None = None
        self.address = int(self._memory.ctypes.data)

    def address_of(self, place: int) -> int:
        return self.address + place * self._layout.stride

    def header(self, place: int) -> memoryview:
        start = place * self._layout.stride
        return self._view[start : start + self._layout.header_nbytes]

    def page(self, place: int) -> memoryview:
        start = place * self._layout.stride
        return self._view[start + self._layout.header_nbytes : start + self._layout.object_nbytes]

    def register(self, native: NativeStore) -> bool:
        """Make it known to the library; False when that refuses. Blocks: call it on a thread."""
        if self._registered_with is not native:
            code = native.register_buffer(self.address, self._memory.nbytes)
            if code != 0:
                logger.warning("Mooncake registers no memory (code %d)", code)
                return False
            self._registered_with = native
        return True

    def unregister(self) -> None:
        if self._registered_with is not None:
            self._registered_with.unregister_buffer(self.address)
            self._registered_with = None


class SlabPool:
    """At most ``num_max`` slabs lent at once."""

    def __init__(self, layout: ObjectLayout, num_max: int) -> None:
        self._layout = layout
        self._permits = asyncio.Semaphore(num_max)
        self._free: list[Slab] = []
        self.num_abandoned = 0

    async def take(self, deadline_s: float) -> Slab | None:
        """Return a slab; None when there was none until the deadline."""
        if await within(self._permits.acquire(), deadline_s) is None:
            return None
        return self._free.pop() if self._free else Slab(self._layout)

    def give_back(self, slab: Slab) -> None:
        self._free.append(slab)
        self._permits.release()

    def settle(self, slab: Slab, codes: Sequence[int], took_s: float) -> None:
        """Take a slab back from a read that ended with ``codes`` after ``took_s``."""
        hung = TRANSFER_FAILED in codes and took_s >= HUNG_S
        if hung and self.num_abandoned < ABANDONED_SLABS_MAX:
            self._abandon(slab)
        else:
            self.give_back(slab)

    def _abandon(self, slab: Slab) -> None:
        """The library may still write into it."""
        _ABANDONED.append(slab)
        self.num_abandoned += 1
        logger.warning(
            "a read from Mooncake hung: %d bytes are left to it (%d of at most %d times)",
            self._layout.slab_nbytes,
            self.num_abandoned,
            ABANDONED_SLABS_MAX,
        )
        self._permits.release()

    def unregister(self) -> None:
        """Withdraw what is free from the library. Blocks."""
        for slab in self._free:
            slab.unregister()
