"""The pages that the clients of a simulated store use: identities by key, and their right bytes.

Owns prompts of several tenants, cut into pages of one spec. The bytes of a page are a function of
its key, so that whoever reads a page can be checked against what any writer put.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvstore.keys import namespace_of, page_keys
from kvstore.page import PageSpec
from kvstore.store import GetPage, PageIdentity, PutPage, identities
from tests.kvstore.pages import BIG_SPEC, SPEC, content
from transfer.interface import Region, Transfer

__all__ = ["BIG_SPEC", "SPEC", "TENANTS", "content"]

TENANTS = ("red", "green", "blue")


@lru_cache(maxsize=64)
def namespace(tenant: str, spec: PageSpec = SPEC) -> bytes:
    return namespace_of("test-model", spec, salt=tenant)


@lru_cache(maxsize=8192)
def prompt(tenant: str, tokens: tuple[int, ...], spec: PageSpec = SPEC) -> list[PageIdentity]:
    """The pages of one prompt, the tail included."""
    root = namespace_of("test-model", spec, salt=tenant)
    keys = page_keys(root, list(tokens), spec.page_size)
    return identities(root, keys, np.asarray(tokens, dtype="<i4").tobytes(), spec.page_size)


def right(page: memoryview, identity: PageIdentity, spec: PageSpec) -> bool:
    """True when the valid bytes of ``page`` are those that belong to the key."""
    wanted = memoryview(content(identity.key, spec.page_nbytes))
    if identity.num_tokens == spec.page_size:
        return bool(page == wanted)
    valid, wanted_valid = (spec.valid_bytes(data, identity.num_tokens) for data in (page, wanted))
    return np.array_equal(valid, wanted_valid)


def filled(
    transfer: Transfer, pages: list[PageIdentity], spec: PageSpec = SPEC
) -> tuple[Region, list[PutPage]]:
    """A region that holds ``pages`` one after the other, and what to put."""
    region = transfer.register(bytearray().join(content(p.key, spec.page_nbytes) for p in pages))
    return region, [PutPage(page, i * spec.page_nbytes) for i, page in enumerate(pages)]


def empty(
    transfer: Transfer, pages: list[PageIdentity], spec: PageSpec = SPEC
) -> tuple[Region, list[GetPage]]:
    """A zeroed region for ``pages``, and what to get."""
    region = transfer.register(bytearray(max(1, len(pages)) * spec.page_nbytes))
    return region, [GetPage(page, i * spec.page_nbytes) for i, page in enumerate(pages)]
