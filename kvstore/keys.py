"""Page keys: the content address of a KV page.

Owns the two hash chains of the design and nothing else. SHA-256 over domain- and length-framed
fields, so that no two inputs share a preimage::

    namespace = H("kvferry/ns/1",   fingerprint, kv dtype, page spec, adapter id, tenant salt)
    key[i]    = H("kvferry/page/1", key[i-1] or namespace, num_tokens, tokens int32 LE, media ids)

Fresh processes on other machines agree: no ``hash()``, no pickles, no machine byte order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

from kvstore.page import PageKey, PageSpec

Namespace = NewType("Namespace", bytes)

_NAMESPACE_DOMAIN = b"kvferry/ns/1"
_PAGE_DOMAIN = b"kvferry/page/1"


def _frame(*fields: bytes) -> bytes:
    """Each field preceded by its length, so that no two field lists join to the same bytes."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def namespace_of(
    fingerprint: str, spec: PageSpec, *, adapter: str | None = None, salt: str | None = None
) -> Namespace:
    """Return the root of the key chain for one model, page spec, adapter and tenant salt.

    An absent adapter or salt differs from an empty one.
    """
    geometry = "/".join(
        str(x) for x in (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.page_size)
    )
    optional = [
        b"\x00" if value is None else b"\x01" + value.encode("utf-8", "surrogatepass")
        for value in (adapter, salt)
    ]
    preimage = _frame(
        _NAMESPACE_DOMAIN, fingerprint.encode(), spec.dtype.encode(), geometry.encode(), *optional
    )
    return Namespace(hashlib.sha256(preimage).digest())


def page_key(
    parent: PageKey | Namespace, tokens: Sequence[int], media: Sequence[bytes] = ()
) -> PageKey:
    """Return the key of the page that holds exactly ``tokens`` after ``parent``."""
    return _key_of(parent, np.asarray(tokens, dtype="<i4"), media)


def page_keys(namespace: Namespace, tokens: Sequence[int], page_size: int) -> list[PageKey]:
    """Return the keys of all pages of ``tokens``, the tail page included.

    Element ``i`` commits to ``tokens[: min((i + 1) * page_size, len(tokens))]``.
    """
    packed = np.asarray(tokens, dtype="<i4")
    keys: list[PageKey] = []
    parent: PageKey | Namespace = namespace
    for start in range(0, len(packed), page_size):
        parent = _key_of(parent, packed[start : start + page_size])
        keys.append(parent)
    return keys


def _key_of(
    parent: PageKey | Namespace, packed: npt.NDArray[np.int32], media: Sequence[bytes] = ()
) -> PageKey:
    count = len(packed).to_bytes(4, "little")
    framed = _frame(_PAGE_DOMAIN, parent, count, packed.tobytes(), *media)
    return PageKey(hashlib.sha256(framed).digest())
