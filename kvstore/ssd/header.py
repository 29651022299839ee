"""The header of a slot: what the page behind it claims to be.

Owns the byte layout and its checksum. Knows no files. The same bytes lie before the page in its
slot and, as the row of the index, in the index: both check themselves, and neither is believed
where they disagree.

::

    offset  bytes  field                       offset  bytes  field
         0      8  magic "KVFSLOT1"               168      4  num_layers
         8      4  header_nbytes                  172      4  num_kv_heads
        12      4  num_tokens                     176      4  head_dim
        16     16  tier's UUID                    180      4  page_size
        32      8  slot's offset in the file      184      4  depth
        40      8  generation                     188      1  priority
        48     32  key                            189      1  parent's length
        80     32  parent, zero-padded            190      1  namespace's length
       112     32  namespace, zero-padded         191      1  zero
       144     16  xxh3-128 of the page           192     16  dtype, zero-padded
       160      8  page_nbytes                    208      8  heat, float64
                                                  216    ...  tokens, int32; zeros
                                     header_nbytes - 16     16  xxh3-128 of all before

Integers are little-endian. ``header_nbytes`` is a multiple of 64 and depends on the page size only,
so that slots of one geometry are equal. The page follows at once; the slot ends at the next
multiple of 4,096.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvstore.checksum import checksum_of
from kvstore.page import KEY_NBYTES, PageKey, PageSpec
from kvstore.server.tier import TierPage
from kvstore.ssd.config import BLOCK_NBYTES
from kvstore.store import PRIORITY_MAX, PageRecord

MAGIC = b"KVFSLOT1"
DIGEST_NBYTES = 16
DTYPE_NBYTES = 16
_LAYOUT = struct.Struct("<8sII16sQQ32s32s32s16sQIIIIIBBBx16sd")
FIXED_NBYTES = _LAYOUT.size
HEADER_NBYTES_MAX = 8192
assert FIXED_NBYTES == 216, FIXED_NBYTES


Specs = dict[tuple[int, int, int, int, int, bytes], PageSpec]


class SlotHeader(NamedTuple):
    """A header that verified: the page, and where it was written."""

    page: TierPage
    uuid: bytes
    offset: int
    generation: int


def header_nbytes_of(spec: PageSpec) -> int:
    return _rounded(FIXED_NBYTES + 4 * spec.page_size + DIGEST_NBYTES, 64)


def slot_nbytes_of(spec: PageSpec) -> int:
    return _rounded(header_nbytes_of(spec) + spec.page_nbytes, BLOCK_NBYTES)


def fits_format(page: TierPage) -> bool:
    """True when the format can say all of ``page``."""
    record, spec = page.record, page.spec
    return (
        len(record.key) == KEY_NBYTES
        and len(record.parent) <= KEY_NBYTES
        and len(page.namespace) <= KEY_NBYTES
        and len(record.checksum) == DIGEST_NBYTES
        and len(spec.dtype) <= DTYPE_NBYTES
        and record.page_nbytes == spec.page_nbytes
        and 1 <= record.num_tokens <= spec.page_size
        and 0 <= record.depth < 1 << 32
        and max(spec.num_layers, spec.num_kv_heads, spec.head_dim) < 1 << 32
        and 0 <= page.priority <= PRIORITY_MAX
    )


def pack_header(header: SlotHeader) -> bytes:
    """Return the bytes of ``header``; its page must fit the format."""
    page, record, spec = header.page, header.page.record, header.page.spec
    assert fits_format(page), page
    nbytes = header_nbytes_of(spec)
    fixed = _LAYOUT.pack(
        MAGIC,
        nbytes,
        record.num_tokens,
        header.uuid,
        header.offset,
        header.generation,
        record.key,
        record.parent,
        page.namespace,
        record.checksum,
        record.page_nbytes,
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
        spec.page_size,
        record.depth,
        page.priority,
        len(record.parent),
        len(page.namespace),
        spec.dtype.encode("ascii"),
        page.heat,
    )
    body = (fixed + record.tokens).ljust(nbytes - DIGEST_NBYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def header_at(slot: memoryview) -> bytes | None:
    """The header's bytes at the start of a slot, verified; None when there is none."""
    if len(slot) < FIXED_NBYTES or slot[:8] != MAGIC:
        return None
    nbytes = int.from_bytes(slot[8:12], "little")
    if not FIXED_NBYTES + DIGEST_NBYTES <= nbytes <= min(len(slot), HEADER_NBYTES_MAX):
        return None
    header = bytes(slot[:nbytes])
    return header if verifies(header) else None


def verifies(header: bytes) -> bool:
    return xxhash.xxh3_128_digest(header[:-DIGEST_NBYTES]) == header[-DIGEST_NBYTES:]


def parse_header(header: bytes, specs: Specs) -> SlotHeader | None:
    """Read a header that verifies; None when it says something that we would never write."""
    page = parse_page(header, specs)
    if page is None:
        return None
    uuid, offset, generation = _LAYOUT.unpack_from(header)[3:6]
    return SlotHeader(page, uuid, offset, generation)


def parse_page(header: bytes, specs: Specs) -> TierPage | None:
    """The page in a header that verifies; None when it says something that we would never write.

    ``specs`` keeps one spec per geometry, so that a million headers share it.
    """
    fields = _LAYOUT.unpack_from(header)
    (num_tokens, _, _, _, key, parent, namespace, checksum, page_nbytes) = fields[2:11]
    (depth, priority, parent_nbytes, namespace_nbytes, dtype, heat) = fields[15:]
    geometry = (*fields[10:15], dtype)
    spec = specs.get(geometry)
    if spec is None:
        spec = _spec_of(*geometry)
        if spec is None:
            return None
        specs[geometry] = spec
    if not 1 <= num_tokens <= spec.page_size:
        return None
    record = PageRecord(
        key=key,
        parent=parent[:parent_nbytes],
        depth=depth,
        tokens=header[FIXED_NBYTES : FIXED_NBYTES + 4 * num_tokens],
        checksum=checksum,
        page_nbytes=page_nbytes,
    )
    return TierPage(record, spec, namespace[:namespace_nbytes], priority, heat)


def key_in(header: bytes) -> PageKey:
    """The key in a header that verifies, whatever else it says."""
    return PageKey(header[48:80])


def page_verifies(header: SlotHeader, page: memoryview) -> bool:
    """True when the valid bytes of ``page`` are those that the header names."""
    record = header.page.record
    return checksum_of(header.page.spec, page, record.num_tokens) == record.checksum


def _spec_of(
    page_nbytes: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: bytes,
) -> PageSpec | None:
    try:
        spec = PageSpec(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype.rstrip(b"\0").decode("ascii"),
        )
    except ValueError:  # of a version that knows other dtypes; UnicodeDecodeError is one
        return None
    return spec if spec.page_nbytes == page_nbytes else None


def _rounded(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
