"""What a reader checks before it believes a page.

Owns the comparison of a record with the identity the reader expects, and of the bytes with the
record's checksum. A mismatch of either is a miss (``CORRUPT``), never a hit: a forced collision of
keys cannot hand out the KV of other tokens, and a flipped byte cannot reach the attention.
"""

from __future__ import annotations

from kvstore.checksum import CHECKSUM_NBYTES, checksum_of
from kvstore.page import KEY_NBYTES, PageSpec
from kvstore.store import GetOutcome, PageIdentity, PageRecord

DEPTH_MAX = 1 << 32  # pages before a page


def same_identity(record: PageRecord | PageIdentity, identity: PageIdentity) -> bool:
    """True when ``record`` is about exactly the tokens, ancestry and depth of ``identity``."""
    return (
        record.key == identity.key
        and record.parent == identity.parent
        and record.depth == identity.depth
        and record.tokens == identity.tokens
    )


def well_formed(identity: PageIdentity | PageRecord, spec: PageSpec) -> bool:
    """True when a peer's identity can be a page of ``spec`` at all."""
    nbytes = len(identity.tokens)
    return (
        nbytes % 4 == 0
        and 4 <= nbytes <= 4 * spec.page_size
        and 0 <= identity.depth < DEPTH_MAX
        and len(identity.key) == len(identity.parent) == KEY_NBYTES
        and identity.key != identity.parent
    )


def believable(record: PageRecord, identity: PageIdentity, spec: PageSpec) -> bool:
    """Everything that can be checked before the bytes have moved."""
    return (
        same_identity(record, identity)
        and record.page_nbytes == spec.page_nbytes
        and len(record.checksum) == CHECKSUM_NBYTES
    )


def verify(
    record: PageRecord, identity: PageIdentity, spec: PageSpec, page: memoryview
) -> GetOutcome:
    """Return READ when identity, geometry and bytes agree, else CORRUPT."""
    if not believable(record, identity, spec) or not well_formed(identity, spec):
        return GetOutcome.CORRUPT
    if checksum_of(spec, page, identity.num_tokens) != record.checksum:
        return GetOutcome.CORRUPT
    return GetOutcome.READ
