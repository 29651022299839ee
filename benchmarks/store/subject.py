"""What every store under measurement can do, and the pages that it is measured with.

Owns ``Subject`` and the memory of the measuring process: a source whose pages all differ, and a
destination that is wiped before every get, so that a get that moved nothing would be noticed.
Knows no store.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class WrongBytes(AssertionError):
    """A store gave other bytes than it was given."""


class Pages:
    """Pages in memory: ``batch`` of them at a time, of ``page_nbytes`` each.

    Args:
        source, into: flat ``[batch * page_nbytes] uint8`` arrays; the caller may have registered
            them.
    """

    def __init__(self, source: Bytes, into: Bytes, page_nbytes: int) -> None:
        assert len(source) == len(into), (len(source), len(into))
        assert len(source) % page_nbytes == 0, (len(source), page_nbytes)
        self.source = source
        self.into = into
        self.page_nbytes = page_nbytes
        self.batch = len(source) // page_nbytes
        rng = np.random.default_rng(1)
        source[:] = rng.integers(0, 256, len(source), dtype=np.uint8)

    def page(self, array: Bytes, index: int) -> memoryview:
        """Page ``index`` of ``source`` or ``into``."""
        start = index * self.page_nbytes
        return memoryview(array)[start : start + self.page_nbytes]

    def wipe(self, count: int | None = None) -> None:
        """Forget what the last get brought to the first ``count`` pages (default: all)."""
        nbytes = (self.batch if count is None else count) * self.page_nbytes
        self.into[:nbytes] = 0

    def verify(self, count: int | None = None) -> None:
        """Check the first ``count`` pages (default: all) of the destination.

        Raises:
            WrongBytes: one differs from what was put.
        """
        nbytes = (self.batch if count is None else count) * self.page_nbytes
        if not np.array_equal(self.source[:nbytes], self.into[:nbytes]):
            where = int(np.argmax(self.source[:nbytes] != self.into[:nbytes]))
            raise WrongBytes(f"page {where // self.page_nbytes} differs at byte {where}")


class Subject(Protocol):
    """One store in a process of its own, and a client of it in this one.

    ``put(keys)`` stores page ``i`` of the source under ``keys[i]`` and returns when readers can
    have it; ``get(keys)`` reads them back into the destination. Both raise when a page failed.
    Keys are 32 bytes; no key is put twice between two calls of ``clear``.
    """

    name: str

    async def start(self) -> None: ...

    async def put(self, keys: list[bytes]) -> None: ...

    async def get(self, keys: list[bytes]) -> None: ...

    async def clear(self) -> None: ...

    async def close(self) -> None: ...
