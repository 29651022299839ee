"""Sequences of pages with known bytes, for store tests."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvstore.keys import namespace_of, page_keys
from kvstore.page import PageKey, PageSpec
from kvstore.store import GetPage, PageIdentity, PutPage, identities
from transfer.interface import Region, Transfer

SPEC = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, dtype="uint8")
BIG_SPEC = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=8, dtype="uint8")


def sequence(tokens: list[int] | range, *, spec: PageSpec = SPEC) -> list[PageIdentity]:
    """The identities of all pages of ``tokens``, the tail included."""
    namespace = namespace_of("test-model", spec)
    keys = page_keys(namespace, list(tokens), spec.page_size)
    packed = np.asarray(list(tokens), dtype="<i4").tobytes()
    return identities(namespace, keys, packed, spec.page_size)


def bytes_of(page: PageIdentity, *, spec: PageSpec = SPEC) -> npt.NDArray[np.uint8]:
    """The content of a page: a function of its key."""
    return np.frombuffer(content(page.key, spec.page_nbytes), dtype=np.uint8).copy()


@lru_cache(maxsize=8192)
def content(key: PageKey, nbytes: int) -> bytes:
    """The content of the page of this key."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).bytes(nbytes)


def filled(
    transfer: Transfer, pages: list[PageIdentity], *, spec: PageSpec = SPEC
) -> tuple[Region, list[PutPage]]:
    """A region that holds ``pages`` one after the other, and what to put."""
    region = transfer.allocate(max(1, len(pages)) * spec.page_nbytes)
    puts = []
    for i, page in enumerate(pages):
        offset = i * spec.page_nbytes
        region.view[offset : offset + spec.page_nbytes] = bytes_of(page, spec=spec).data
        puts.append(PutPage(page, offset))
    return region, puts


def empty(
    transfer: Transfer, pages: list[PageIdentity], *, spec: PageSpec = SPEC
) -> tuple[Region, list[GetPage]]:
    """A zeroed region for ``pages``, and what to get."""
    region = transfer.allocate(max(1, len(pages)) * spec.page_nbytes)
    return region, [GetPage(page, i * spec.page_nbytes) for i, page in enumerate(pages)]


def holds(region: Region, page: GetPage, *, spec: PageSpec = SPEC) -> bool:
    """True when the valid bytes at the page's place are the page's."""
    found = region.view[page.local_offset : page.local_offset + spec.page_nbytes]
    num_tokens = page.identity.num_tokens
    wanted = bytes_of(page.identity, spec=spec)
    return bool(
        (spec.valid_bytes(found, num_tokens) == spec.valid_bytes(wanted.data, num_tokens)).all()
    )
