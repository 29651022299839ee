"""Page checksums: xxh3-128 over the valid bytes of a page.

Owns the digest and where it is computed: small pages in place, large ones on the loop's executor
so that the loop is never held for more than a fraction of a millisecond. Knows no store, no slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvstore.page import PageSpec

CHECKSUM_NBYTES = 16
INLINE_NBYTES_MAX = 512 * 1024  # about 40 us of hashing at 12 GB/s, less than a hop to a thread


class PageBytes(NamedTuple):
    """A page's whole blob, and how many of its slots are valid."""

    spec: PageSpec
    page: memoryview
    num_tokens: int


def checksum_of(spec: PageSpec, page: memoryview, num_tokens: int) -> bytes:
    """Return the 16-byte xxh3-128 digest of the first ``num_tokens`` slots of every run."""
    return xxhash.xxh3_128_digest(spec.valid_bytes(page, num_tokens).data)


def fit_inline(pages: Sequence[PageBytes]) -> bool:
    """The pages are small enough together to be hashed on the loop."""
    return sum(len(page.page) for page in pages) <= INLINE_NBYTES_MAX


def checksums_now(pages: Sequence[PageBytes]) -> list[bytes]:
    """Hash ``pages`` on the calling thread."""
    return [checksum_of(*page) for page in pages]


async def checksums(pages: Sequence[PageBytes]) -> list[bytes]:
    """Hash ``pages``: here when they are small together, else on the loop's executor.

    When cancelled, the executor may still be *reading* the pages for a moment; it writes nothing.
    """
    if fit_inline(pages):
        return checksums_now(pages)
    return await asyncio.get_running_loop().run_in_executor(None, checksums_now, pages)
