"""Registered memory: regions, their capabilities, and who may use them.

Owns the table of live regions of one engine and the owner-side check of every foreign request.
Knows no sockets. Invariants: a region id is never used twice in one incarnation; a capability
grants exactly one set of rights on one region; once ``revoke`` has returned, no peer touches the
memory any more, nor finds it in its socket (memory in which an shm peer was stopped, or that a tcp
peer does not say to have taken, is left behind for it: ``shm_memory``, ``loans``).

A region may be a part of another: registering a slice of what ``allocate`` returned gives a
region of its own, with its own capabilities, that is still reached through shared memory.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from hmac import compare_digest
from typing import NamedTuple, TypeVar

from transfer.buffers import address_of, device_memory_of, flat_view
from transfer.device_memory import DeviceMemory
from transfer.errors import FrameInvalid, RegionRevoked, Unauthorized
from transfer.gate import Gate
from transfer.interface import Rights
from transfer.loans import Loans
from transfer.shm_control import MAX_REGIONS, ControlPage, slot_of
from transfer.shm_files import opened_again
from transfer.shm_memory import Allocation
from transfer.token import CAPABILITY_NBYTES

_LOG = logging.getLogger(__name__)

# One text for an unknown region and a wrong capability: a guess learns nothing from it.
_NOT_OURS = "the token opens no region here"
Spans = list[tuple[int, int]]  # (offset, nbytes)
AnyRegion = TypeVar("AnyRegion", bound="RegisteredRegion")


class SharedPlace(NamedTuple):
    """Where a region lies in a memfd. Whoever asked closes ``fd``."""

    fd: int
    file_id: int
    file_nbytes: int
    offset: int


class RegisteredRegion(ABC):
    """Memory known to one engine, wherever it lies. Made by ``RegionTable`` only.

    Attributes:
        gate: whoever touches the memory is inside; closed for good by ``revoke``.
        revoking: held by ``revoke`` from its beginning to its end.
        readonly: nothing can be written into the memory, neither by a peer nor by a read.
    """

    def __init__(self, region_id: int, table: RegionTable, *, nbytes: int, readonly: bool) -> None:
        self.region_id = region_id
        self.gate = Gate()
        self.revoking = threading.Lock()
        self.readonly = readonly
        self._nbytes = nbytes
        self._table = table
        self._capabilities: dict[Rights, bytes] = {}

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    @abstractmethod
    def view(self) -> memoryview:
        """The bytes, where the host can address them."""

    @property
    def revoked(self) -> bool:
        return not self.gate.is_open

    @property
    def in_shared_memory(self) -> bool:
        """True when peers on this host can map it."""
        return False

    def export(self, rights: Rights) -> bytes:
        """Return a token with ``rights``; equal rights give equal tokens.

        Raises:
            RegionRevoked: the region is revoked.
            Unauthorized: writing is to be granted on a read-only buffer.
        """
        if self.revoked:
            raise RegionRevoked(f"region {self.region_id} is revoked; register it again")
        if "w" in rights and self.readonly:
            raise Unauthorized("cannot grant writing: the buffer is read-only")
        capability = self._capabilities.get(rights)
        if capability is None:
            capability = secrets.token_bytes(CAPABILITY_NBYTES)
            self._capabilities[rights] = capability
        return self._table.encode(self, rights, capability)

    def revoke(self) -> None:
        """Withdraw the region from all peers. Idempotent.

        Blocks its thread for at most one piece, and until peers of tcp have said what they have
        taken; for ``shm_control.REVOKE_PATIENCE_S`` when a peer was stopped in the middle of a
        piece, then for a copy of the memory; for ``loans.LOAN_PATIENCE_S`` when one does not say
        so. Of memory that was left behind, each page is copied when it is next stored into; what
        was copied takes twice its room, until nobody holds a view of it. Thread-safe: a loop that
        cannot wait asks a thread.
        """
        self._table.revoke(self)

    def rights_of(self, capability: bytes) -> Rights | None:
        """Return what ``capability`` grants; None if it is not one of ours."""
        granted: Rights | None = None
        for rights, known in list(self._capabilities.items()):
            if compare_digest(known, capability):
                granted = rights
        return granted


class HostRegion(RegisteredRegion):
    """Host memory, private or in a memfd."""

    def __init__(
        self, region_id: int, table: RegionTable, view: memoryview, allocation: Allocation | None
    ) -> None:
        super().__init__(region_id, table, nbytes=view.nbytes, readonly=view.readonly)
        self.allocation = allocation
        self.loans = Loans()
        self._view = view

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def in_shared_memory(self) -> bool:
        return self.allocation is not None and self.allocation.fd is not None

    @property
    def file(self) -> FilePlace | None:
        """Where the region lies in a memfd, if it does."""
        if self.allocation is None or self.allocation.fd is None:
            return None
        offset = self.allocation.offset_of(address_of(self._view), self.nbytes)
        return None if offset is None else FilePlace(self.allocation, offset)


class FilePlace(NamedTuple):
    """``cursor.FileSource`` of a region."""

    allocation: Allocation
    offset: int

    def enter(self) -> tuple[int, int] | None:
        if not self.allocation.sending.enter():
            return None
        assert self.allocation.fd is not None, "the gate closes before the file does"
        return self.allocation.fd, self.offset

    def leave(self) -> None:
        self.allocation.sending.leave()


class DeviceRegion(RegisteredRegion):
    """Memory of a device, which the host cannot address."""

    def __init__(self, region_id: int, table: RegionTable, memory: DeviceMemory) -> None:
        super().__init__(region_id, table, nbytes=memory.nbytes, readonly=memory.readonly)
        self.memory = memory

    @property
    def view(self) -> memoryview:
        raise TypeError(
            f"a region on {self.memory.device} has no view: use the tensor that was registered, "
            "or read the region into host memory"
        )


TokenEncoder = Callable[[RegisteredRegion, Rights, bytes], bytes]


class RegionTable:
    """The live regions of one engine. Thread-safe: peers are served from the I/O thread."""

    def __init__(self, encode: TokenEncoder) -> None:
        self.encode = encode
        self._control: ControlPage | None = None
        self._lock = threading.Lock()
        self._regions: dict[int, RegisteredRegion] = {}
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

    def register(self, buffer: object) -> RegisteredRegion:
        """Return a region over ``buffer``; see ``TransferEngine.register``."""
        memory = device_memory_of(buffer)
        if memory is not None:
            return self.register_device(memory)
        return self.register_host(flat_view(buffer))

    def register_host(self, view: memoryview) -> HostRegion:
        with self._lock:  # from looking to holding: another thread may revoke its last region
            allocation = self._allocation_around(view)
            return self._publish(HostRegion(self._next_id(), self, view, allocation))

    def register_device(self, memory: DeviceMemory) -> DeviceRegion:
        with self._lock:
            return self._publish(DeviceRegion(self._next_id(), self, memory))

    def allocate(self, nbytes: int, *, shared: bool) -> HostRegion:
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        allocation = Allocation(nbytes, shared=shared)
        with self._lock:
            region = self._publish(HostRegion(self._next_id(), self, allocation.view, allocation))
            self._allocations.append(allocation)
        return region

    def _allocation_around(self, view: memoryview) -> Allocation | None:
        """Return the allocation that ``view`` is a part of. Call it under the lock."""
        address = address_of(view)
        for allocation in self._allocations:
            if address and allocation.offset_of(address, view.nbytes) is not None:
                return allocation
        return None

    def _next_id(self) -> int:
        """Return an id that was never used. Call it under the lock."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._next_slot
            assert slot < MAX_REGIONS, f"more than {MAX_REGIONS} live regions"
            self._next_slot += 1
        self._num_made += 1
        return self._num_made << 16 | slot

    def _publish(self, region: AnyRegion) -> AnyRegion:
        """From now on peers may use the region. Call it under the lock."""
        self._regions[region.region_id] = region
        if isinstance(region, HostRegion) and region.allocation is not None:
            region.allocation.hold()
        if self._control is not None:
            self._control.publish(region.region_id)
        return region

    def revoke(self, region: RegisteredRegion) -> None:
        with region.revoking:  # whoever comes second returns no sooner than the first
            self._revoke(region)

    def _revoke(self, region: RegisteredRegion) -> None:
        with self._lock:
            if self._regions.pop(region.region_id, None) is None:
                return
            if self._control is not None:
                self._control.withdraw(region.region_id)
            self._free_slots.append(slot_of(region.region_id))
        region.gate.close()
        if isinstance(region, HostRegion) and region.allocation is not None:
            self._give_up(region, region.allocation)

    def _give_up(self, region: HostRegion, allocation: Allocation) -> None:
        """Part with memory that peers may look at, once none of them does any more."""
        region_id = region.region_id
        is_empty = self._control is None or self._control.wait_until_empty(region_id)
        is_taken = region.loans.wait_until_returned()
        if not (is_empty and is_taken):
            self._leave_behind(allocation, writable=not is_empty)
        with self._lock:
            allocation.release()
            self._allocations = [a for a in self._allocations if a.in_use]

    def _leave_behind(self, allocation: Allocation, *, writable: bool) -> None:
        """A peer may look at the file at any time, or ``writable`` go on storing: leave it to it.

        Only the exchange of the mapping is under the lock, not the copy of up to a gigabyte: peers
        are served from the I/O loop meanwhile. That copy keeps out what a peer of shm stores, and
        is made for nothing else; what is in the socket of a peer of tcp, nobody stores into.
        """
        with self._lock:
            parted = allocation.can_leave_behind
            if parted and self._control is not None:
                for region in self._regions.values():
                    if isinstance(region, HostRegion) and region.allocation is allocation:
                        self._control.move_away(region.region_id)
            parted = parted and allocation.leave_behind()
        if parted and (not writable or allocation.keep_bytes()):
            _LOG.warning("a peer may still look at revoked memory: it was left behind for it")
        else:
            _LOG.error(
                "a peer that was stopped or dropped may still touch the revoked memory: do not "
                "reuse its %d bytes, release them",
                allocation.nbytes,
            )

    def revoke_all(self) -> None:
        with self._lock:
            regions = list(self._regions.values())
        for region in regions:
            self.revoke(region)

    def owns(self, region: object) -> bool:
        return isinstance(region, RegisteredRegion) and region._table is self

    def authorize(
        self, region_id: int, capability: bytes, right: Rights | None
    ) -> RegisteredRegion:
        """Return the region if ``capability`` grants ``right`` (None: anything) on it.

        Raises:
            RegionRevoked: the region was revoked.
            Unauthorized: unknown region, wrong capability, or missing right.
        """
        with self._lock:
            region = self._regions.get(region_id)
            existed = 0 < region_id >> 16 <= self._num_made
        if region is None:
            raise (RegionRevoked("the region was revoked") if existed else Unauthorized(_NOT_OURS))
        granted = region.rights_of(capability)
        if granted is None:
            raise Unauthorized(_NOT_OURS)
        if right is not None and right not in granted:
            raise Unauthorized(f"the token grants {granted!r}, the operation needs {right!r}")
        return region

    def shared_place(self, region: RegisteredRegion, *, writable: bool) -> SharedPlace | None:
        """Return where a live region lies in shared memory; None if it does not (any more).

        The descriptor is opened under the lock: a region that is revoked on another thread
        meanwhile closes its own, and the number may then stand for another file. It grants writing
        only if ``writable``.
        """
        with self._lock:
            allocation = region.allocation if isinstance(region, HostRegion) else None
            if allocation is None or allocation.fd is None:
                return None
            if region.region_id not in self._regions:
                return None
            offset = allocation.offset_of(address_of(region.view), region.nbytes)
            assert offset is not None, "a region left its allocation"
            fd = opened_again(allocation.fd, writable=writable)
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
