"""The first block of the file of pages: whose file this is and how it is cut.

Owns its layout and its verdict on foreign files. Knows no slots.

::

    offset  bytes  field
         0      8  magic "KVFERRY-" (any version)
         8      4  format version
        12      4  zero
        16     16  UUID of the tier
        32      8  slab_nbytes: slab i begins at 4096 + i * slab_nbytes
        40     16  xxh3-128 of the 40 bytes before
        56   4040  zeros
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvstore.ssd.config import BLOCK_NBYTES, SLAB_NBYTES_MAX, SLABS_PER_FILE, SsdRefused

MAGIC = b"KVFERRY-"
FORMAT_VERSION = 1
UUID_NBYTES = 16
_LAYOUT = struct.Struct("<8sI4x16sQ")


class Superblock(NamedTuple):
    uuid: bytes
    slab_nbytes: int

    def pack(self) -> bytes:
        body = _LAYOUT.pack(MAGIC, FORMAT_VERSION, self.uuid, self.slab_nbytes)
        return (body + xxhash.xxh3_128_digest(body)).ljust(BLOCK_NBYTES, b"\0")


def slab_nbytes_for(nbytes: int) -> int:
    """Slab size of a new file of ``nbytes``."""
    slab_nbytes = min((nbytes - BLOCK_NBYTES) // SLABS_PER_FILE, SLAB_NBYTES_MAX)
    return max(slab_nbytes // BLOCK_NBYTES, 1) * BLOCK_NBYTES


def parse_superblock(block: bytes, where: str) -> Superblock:
    """Read the block; a file that is not ours, or not of our version, is refused.

    Raises:
        SsdRefused: with the remedy.
    """
    if len(block) < BLOCK_NBYTES or block[:8] != MAGIC:
        raise SsdRefused(
            f"{where} is not a kvferry page file; give the tier a directory of its own"
        )
    _, version, uuid, slab_nbytes = _LAYOUT.unpack_from(block)
    if version != FORMAT_VERSION:
        raise SsdRefused(
            f"{where} has format {version}, this kvferry reads format {FORMAT_VERSION}; give"
            " another directory, run the kvferry that wrote it, or delete the directory (its"
            " pages are a cache)"
        )
    end = _LAYOUT.size + 16
    if block[_LAYOUT.size : end] != xxhash.xxh3_128_digest(block[: _LAYOUT.size]):
        raise SsdRefused(
            f"{where}: its first block is damaged; delete the directory (its pages are a cache)"
            " and check the disk"
        )
    return Superblock(uuid, slab_nbytes)
