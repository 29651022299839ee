"""Writing and reading one slot, on a thread.

Owns the order of bytes in a slot and the verdict on what is read. Knows no loop: its methods are
calls for a thread. Touches only the buffers it is given, never a caller's memory.

    slot = header | page | zeros up to a multiple of 4,096

Header and page go out in one write, and nothing orders the two: a slot counts only when both
checksums verify, whatever part of the write reached the disk.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvstore.ssd.catalogue import Grant
from kvstore.ssd.header import SlotHeader, header_at, page_verifies, parse_header
from kvstore.ssd.page_file import PageFile
from kvstore.ssd.slabs import Slabs


class Damage(StrEnum):
    """Why what is in a slot is not the page wanted."""

    TRUNCATED = "truncated"  # the file ends before the slot does
    HEADER = "header"  # no header that verifies: never written, torn or flipped
    MISPLACED = "misplaced"  # another page, another place, or another tier's
    PAGE = "page"  # the header verifies, the page does not


class Found(NamedTuple):
    header: SlotHeader
    page_at: int  # where the page begins in the buffer


class SlotIO:
    """Slots of one page file."""

    def __init__(self, file: PageFile, uuid: bytes, slabs: Slabs) -> None:
        self._file = file
        self._uuid = uuid
        self._slab_nbytes = slabs.slab_nbytes
        self._slab_at = slabs.offset_of
        self._reserved: set[int] = set()

    def write(self, header: SlotHeader, buffer: memoryview, page_at: int) -> bool:
        """Write a slot; False when the page in ``buffer`` is not what its header says.

        Raises:
            OSError: the disk failed; the slot holds anything.
        """
        page = buffer[page_at : page_at + header.page.record.page_nbytes]
        if not page_verifies(header, page):
            return False
        self._reserve(header.offset)
        self._file.write(header.offset, buffer)
        return True

    def read(self, grant: Grant, buffer: memoryview) -> Found | Damage:
        """Read the slot of ``grant`` and verify that it holds what was granted.

        Raises:
            OSError: the disk failed.
        """
        num = self._file.read(grant.offset, buffer)
        if num < len(buffer):
            return Damage.TRUNCATED
        raw = header_at(buffer)
        header = parse_header(raw, {}) if raw is not None else None
        if raw is None or header is None:
            return Damage.HEADER
        record = header.page.record
        where = (header.uuid, header.offset, header.generation, record.key, record.page_nbytes)
        wanted = (self._uuid, grant.offset, grant.generation, grant.key, grant.page_nbytes)
        if where != wanted:
            return Damage.MISPLACED
        page = buffer[len(raw) : len(raw) + record.page_nbytes]
        if not page_verifies(header, page):
            return Damage.PAGE
        return Found(header, len(raw))

    def _reserve(self, offset: int) -> None:
        """Have room for the whole slab once: a full disk shows at its first page."""
        start = offset - (offset - self._slab_at(0)) % self._slab_nbytes
        if start not in self._reserved:
            self._file.reserve(start, self._slab_nbytes)
            self._reserved.add(start)
