"""Pages with known bytes, as the tier takes them."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from kvstore.checksum import checksum_of
from kvstore.page import PageKey, PageSpec
from kvstore.server.tier import TierPage
from kvstore.ssd import SsdTier
from kvstore.store import PageRecord

SMALL = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, dtype="uint8")  # 512 B
LARGE = PageSpec(num_layers=4, num_kv_heads=8, head_dim=64, page_size=4, dtype="uint8")  # 16 KiB
DEEP = PageSpec(num_layers=36, num_kv_heads=2, head_dim=80, page_size=16, dtype="bfloat16")
assert DEEP.page_nbytes == 368_640

TENANT = b"t" * 32


def content(number: int, spec: PageSpec = SMALL) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, spec.page_nbytes, dtype=np.uint8)


def page(
    number: int,
    *,
    spec: PageSpec = SMALL,
    heat: float = 0.0,
    num_tokens: int | None = None,
    namespace: bytes = TENANT,
    checksum: bytes | None = None,
) -> TierPage:
    """Page ``number``; its bytes are ``content(number, spec)`` unless a checksum is given."""
    tokens = np.arange(num_tokens or spec.page_size, dtype="<i4") + number
    record = PageRecord(
        key=key(number),
        parent=hashlib.sha256(b"parent %d" % number).digest(),
        depth=number,
        tokens=tokens.tobytes(),
        checksum=checksum or checksum_of(spec, content(number, spec).data, len(tokens)),
        page_nbytes=spec.page_nbytes,
    )
    return TierPage(record, spec, namespace, 35, heat)


def key(number: int) -> PageKey:
    return PageKey(hashlib.sha256(b"page %d" % number).digest())


async def put(
    tier: SsdTier,
    number: int,
    *,
    spec: PageSpec = SMALL,
    heat: float = 0.0,
    namespace: bytes = TENANT,
) -> bool:
    stored = page(number, spec=spec, heat=heat, namespace=namespace)
    return await tier.store(stored, content(number, spec).data)


async def get(tier: SsdTier, number: int, *, spec: PageSpec = SMALL) -> bool:
    """True when the page is there, with its bytes; False when it is absent. Never wrong bytes."""
    into = np.zeros(spec.page_nbytes, dtype=np.uint8)
    record = await tier.load(key(number), into.data)
    if record is None:
        return False
    assert record == page(number, spec=spec).record
    assert (into == content(number, spec)).all(), f"page {number} has other bytes"
    return True
