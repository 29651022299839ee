"""What a peer has mapped of one owner: files, and the grants that lie in them.

Owns the mappings; knows no sockets and no threads. Each file is mapped once for reading and, when a
grant allows writing, once for writing, which then serves both. A mapping goes when the last grant
in it is forgotten and the last copy that uses it has ended.

Nothing an owner says is believed: a file must be sealed against shrinking and as long as claimed
before it is mapped (else touching it could end this process by SIGBUS), and a place must lie in it.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

from transfer.errors import FrameInvalid
from transfer.shm_control import MAX_REGIONS
from transfer.shm_files import check_sealed
from transfer.shm_memory import use_huge_pages
from transfer.shm_wire import PlacePacket

MAX_MAPPED_REGIONS = 2 * MAX_REGIONS  # those that live, and those whose end is on its way to us


class Grant(NamedTuple):
    """One mapped region, as one capability allows it.

    Attributes:
        view: the bytes of the region; read-only memory unless the rights include ``w``.
    """

    region_id: int
    view: memoryview
    rights: str
    file: tuple[int, bool]  # id, and whether it is mapped for writing


class Mappings:
    """The grants of one owner. Changed on the I/O loop; ``get`` may be called from any thread."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, bool], memoryview] = {}
        self._num_grants: dict[tuple[int, bool], int] = {}  # by file
        self._grants: dict[int, dict[bytes, Grant]] = {}  # by region, then capability

    @property
    def num_files(self) -> int:
        return len(self._files)

    @property
    def region_ids(self) -> list[int]:
        return list(self._grants)

    def get(self, region_id: int, capability: bytes) -> Grant | None:
        """Return what is mapped already."""
        grants = self._grants.get(region_id)
        return None if grants is None else grants.get(capability)

    def add(self, region_id: int, capability: bytes, place: PlacePacket, fd: int) -> Grant:
        """Map a region; ``fd`` stays the caller's.

        Raises:
            FrameInvalid: what the owner sent cannot be mapped safely.
            OSError: the kernel maps no more.
        """
        known = self.get(region_id, capability)
        if known is not None:
            return known
        if len(self._grants) >= MAX_MAPPED_REGIONS:
            raise FrameInvalid(f"an owner has at most {MAX_REGIONS} regions")
        file = self._file_for(place, fd)
        view = self._files[file][place.offset : place.offset + place.nbytes]
        grant = Grant(region_id, view, place.rights, file)
        self._grants.setdefault(region_id, {})[capability] = grant
        self._num_grants[file] = self._num_grants.get(file, 0) + 1
        return grant

    def _file_for(self, place: PlacePacket, fd: int) -> tuple[int, bool]:
        end = place.offset + place.nbytes
        if place.offset < 0 or place.nbytes <= 0 or end > place.file_nbytes:
            raise FrameInvalid(
                f"the place [{place.offset}, +{place.nbytes}) lies outside of its file of "
                f"{place.file_nbytes} bytes"
            )
        writable = "w" in place.rights
        for file in ((place.file_id, True), (place.file_id, writable)):
            if file in self._files:
                if self._files[file].nbytes != place.file_nbytes:
                    raise FrameInvalid(f"file {place.file_id} has changed its size")
                return file
        self._files[place.file_id, writable] = _map(fd, place.file_nbytes, writable=writable)
        return place.file_id, writable

    def forget(self, region_id: int) -> None:
        """Unmap a region that its owner revoked; what a running copy uses stays until its end."""
        for grant in self._grants.pop(region_id, {}).values():
            self._num_grants[grant.file] -= 1
            if not self._num_grants[grant.file]:
                del self._num_grants[grant.file], self._files[grant.file]

    def clear(self) -> None:
        self._grants.clear()
        self._num_grants.clear()
        self._files.clear()


def _map(fd: int, nbytes: int, *, writable: bool) -> memoryview:
    try:
        check_sealed(fd, nbytes)
    except (OSError, ValueError) as error:
        raise FrameInvalid(f"the owner's memory cannot be mapped safely: {error}") from error
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(fd, nbytes, prot=protection)
    use_huge_pages(mapped, nbytes)
    return memoryview(mapped)
