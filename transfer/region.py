"""Registered memory: regions, their capabilities, and who may use them.

Owns the table of live regions of one engine and the owner-side check of every foreign request.
Knows no sockets. Invariants: a region id is never used twice in one incarnation; a capability
grants exactly one set of rights on one region; once ``revoke`` has returned, no loopback or tcp
peer touches the memory any more (shm peers notice within one piece and fail).

A region may be a part of another: registering a slice of what ``allocate`` returned gives a
region of its own, with its own capabilities, that is still reached through shared memory.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from hmac import compare_digest
from typing import NamedTuple

from transfer.buffers import address_of, flat_view
from transfer.errors import FrameInvalid, RegionRevoked, Unauthorized
from transfer.gate import Gate
from transfer.interface import Rights
from transfer.shm_memory import MAX_REGIONS, Allocation, ControlPage, slot_of
from transfer.token import CAPABILITY_NBYTES

Spans = list[tuple[int, int]]  # (offset, nbytes)


class SharedPlace(NamedTuple):
    """Where a region lies in a memfd. ``fd`` is a duplicate: whoever asked closes it."""

    fd: int
    file_id: int
    file_nbytes: int
    offset: int


class HostRegion:
    """Host memory known to one engine. Made by ``RegionTable`` only."""

    def __init__(
        self, region_id: int, view: memoryview, table: RegionTable, allocation: Allocation | None
    ) -> None:
        self.region_id = region_id
        self.gate = Gate()
        self.allocation = allocation
        self._view = view
        self._table = table
        self._capabilities: dict[Rights, bytes] = {}

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def revoked(self) -> bool:
        return not self.gate.is_open

    @property
    def in_shared_memory(self) -> bool:
        """True when peers on this host can map it."""
        return self.allocation is not None and self.allocation.fd is not None

    def export(self, rights: Rights) -> bytes:
        """Return a token with ``rights``; equal rights give equal tokens.

        Raises:
            RegionRevoked: the region is revoked.
            Unauthorized: writing is to be granted on a read-only buffer.
        """
        if self.revoked:
            raise RegionRevoked(f"region {self.region_id} is revoked; register it again")
        if "w" in rights and self._view.readonly:
            raise Unauthorized("cannot grant writing: the buffer is read-only")
        capability = self._capabilities.get(rights)
        if capability is None:
            capability = secrets.token_bytes(CAPABILITY_NBYTES)
            self._capabilities[rights] = capability
        return self._table.encode(self, rights, capability)

    def revoke(self) -> None:
        """Withdraw the region from all peers. Idempotent; waits at most for one piece."""
        self._table.revoke(self)

    def rights_of(self, capability: bytes) -> Rights | None:
        """Return what ``capability`` grants; None if it is not one of ours."""
        granted: Rights | None = None
        for rights, known in list(self._capabilities.items()):
            if compare_digest(known, capability):
                granted = rights
        return granted


TokenEncoder = Callable[[HostRegion, Rights, bytes], bytes]


class RegionTable:
    """The live regions of one engine. Thread-safe: peers are served from the I/O thread."""

    def __init__(self, encode: TokenEncoder) -> None:
        self.encode = encode
        self._control: ControlPage | None = None
        self._lock = threading.Lock()
        self._regions: dict[int, HostRegion] = {}
        self._free_slots: list[int] = []
        self._num_made = 0
        self._next_slot = 0
        self._allocations: list[Allocation] = []

    def attach(self, control: ControlPage) -> None:
        """Publish all regions, those of now and later, through ``control``."""
        with self._lock:
            self._control = control
            for region_id in self._regions:
                control.publish(region_id)

    def register(self, buffer: object) -> HostRegion:
        view = flat_view(buffer)
        return self._add(view, self._allocation_around(view))

    def allocate(self, nbytes: int, *, shared: bool) -> HostRegion:
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        allocation = Allocation(nbytes, shared=shared)
        region = self._add(allocation.view, allocation)
        with self._lock:
            self._allocations.append(allocation)
        return region

    def _allocation_around(self, view: memoryview) -> Allocation | None:
        address = address_of(view)
        with self._lock:
            for allocation in self._allocations:
                if address and allocation.offset_of(address, view.nbytes) is not None:
                    return allocation
        return None

    def _add(self, view: memoryview, allocation: Allocation | None) -> HostRegion:
        with self._lock:
            if self._free_slots:
                slot = self._free_slots.pop()
            else:
                slot = self._next_slot
                assert slot < MAX_REGIONS, f"more than {MAX_REGIONS} live regions"
                self._next_slot += 1
            self._num_made += 1
            region_id = self._num_made << 16 | slot
            region = HostRegion(region_id, view, self, allocation)
            self._regions[region_id] = region
            if allocation is not None:
                allocation.hold()
            if self._control is not None:
                self._control.publish(region_id)
        return region

    def revoke(self, region: HostRegion) -> None:
        with self._lock:
            if self._regions.pop(region.region_id, None) is None:
                return
            if self._control is not None:
                self._control.withdraw(region.region_id)
            self._free_slots.append(slot_of(region.region_id))
            if region.allocation is not None:
                region.allocation.release()
                self._allocations = [a for a in self._allocations if a.in_use]
        region.gate.close()

    def revoke_all(self) -> None:
        with self._lock:
            regions = list(self._regions.values())
        for region in regions:
            self.revoke(region)

    def owns(self, region: object) -> bool:
        return isinstance(region, HostRegion) and region._table is self

    def authorize(self, region_id: int, capability: bytes, right: Rights | None) -> HostRegion:
        """Return the region if ``capability`` grants ``right`` (None: anything) on it.

        Raises:
            RegionRevoked: the region was revoked.
            Unauthorized: unknown region, wrong capability, or missing right.
        """
        with self._lock:
            region = self._regions.get(region_id)
            existed = 0 < region_id >> 16 <= self._num_made
        if region is None:
            raise (
                RegionRevoked("the region was revoked")
                if existed
                else Unauthorized("no such region")
            )
        granted = region.rights_of(capability)
        if granted is None:
            raise Unauthorized("the token's capability is not one of this region's")
        if right is not None and right not in granted:
            raise Unauthorized(f"the token grants {granted!r}, the operation needs {right!r}")
        return region

    def shared_place(self, region: HostRegion) -> SharedPlace | None:
        """Return where the region lies in shared memory; None if it does not (any more).

        The descriptor is duplicated under the lock: a region that is revoked on another thread
        meanwhile closes its own, and the number may then stand for another file.
        """
        with self._lock:
            allocation = region.allocation
            if allocation is None or allocation.fd is None:
                return None
            offset = allocation.offset_of(address_of(region.view), region.nbytes)
            assert offset is not None, "a region left its allocation"
            fd = os.dup(allocation.fd)
        return SharedPlace(fd, allocation.file_id, allocation.nbytes, offset)


def check_spans(spans: Spans, region_nbytes: int) -> None:
    """Check what a peer asked for against the region.

    Raises:
        FrameInvalid: an empty span, or one outside of the region.
    """
    for offset, nbytes in spans:
        if offset < 0 or nbytes <= 0 or offset + nbytes > region_nbytes:
            raise FrameInvalid(
                f"span [{offset}, +{nbytes}) lies outside of the region of {region_nbytes} bytes"
            )
