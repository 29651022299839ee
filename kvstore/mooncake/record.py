"""The object that holds one page: a header with the page's record, then the page.

Pure layout, shared with nobody else::

    [ magic 4 | length 4 LE | xxh3-64 of the record 8 | record msgpack | zeros ] [ page ]
    <------------------------- header_nbytes ---------------------------------> <page_nbytes>

The digest over the record tells a damaged record from one about other tokens: what is damaged is
removed, what is merely another page stays.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from kvstore.checksum import checksum_of
from kvstore.page import PageKey, PageSpec
from kvstore.store import PageRecord

_PREFIX = struct.Struct("<4sI8s")
_MAGIC = b"KVF1"
_FIXED_NBYTES = 256  # prefix, keys, checksum, numbers and field names; asserted when encoding
_ALIGNMENT = 64
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PageRecord)


def header_nbytes(spec: PageSpec) -> int:
    """Bytes before the page; room for the record of any page of ``spec``."""
    return -(-(_FIXED_NBYTES + 4 * spec.page_size) // _ALIGNMENT) * _ALIGNMENT


def encode(record: PageRecord, into: memoryview) -> None:
    """Write the header of ``record`` over all of ``into``."""
    packed = _ENCODER.encode(record)
    digest = xxhash.xxh3_64_digest(packed)
    header = _PREFIX.pack(_MAGIC, len(packed), digest) + packed
    assert len(header) <= len(into), (len(header), len(into))
    into[:] = header.ljust(len(into), b"\0")


def decode(header: memoryview) -> PageRecord | None:
    """Return the record of a header; None when it is damaged or somebody else's."""
    magic, length, digest = _PREFIX.unpack_from(header)
    if magic != _MAGIC or length > len(header) - _PREFIX.size:
        return None
    packed = bytes(header[_PREFIX.size : _PREFIX.size + length])
    if xxhash.xxh3_64_digest(packed) != digest:
        return None
    try:
        return _DECODER.decode(packed)
    except msgspec.DecodeError:
        return None


def is_intact(record: PageRecord, key: PageKey, spec: PageSpec, page: memoryview) -> bool:
    """True when the object under ``key`` is a sound page of ``spec``, whatever its tokens."""
    return (
        record.key == key
        and record.page_nbytes == spec.page_nbytes
        and 1 <= record.num_tokens <= spec.page_size
        and checksum_of(spec, page, record.num_tokens) == record.checksum
    )
