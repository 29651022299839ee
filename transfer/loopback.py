"""Transport inside one process: a copy from one region to another, be they on host or device.

Owns the process-wide table of loopback engines. The same checks as on a wire: incarnation,
capability, rights, bounds, revocation. Knows no sockets; works between engines of different event
loops and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from transfer.copier import Access, Copier, Copy
from transfer.counters import CounterBoard
from transfer.device_stage import DeviceStages, Staged
from transfer.errors import PeerUnreachable, Stale
from transfer.interface import Range
from transfer.ranges import total_nbytes
from transfer.region import (
    DeviceRegion,
    HostRegion,
    RegionTable,
    RegisteredRegion,
    check_spans,
)
from transfer.shm_control import EngineState, gone_error
from transfer.token import Endpoint
from transfer.transports import Move


class LoopbackOwner:
    """One engine as others in this process see it."""

    def __init__(self, incarnation: str, regions: RegionTable, counters: CounterBoard) -> None:
        self.incarnation = incarnation
        self.regions = regions
        self.counters = counters
        self.state = EngineState.OPEN


class _Registry(NamedTuple):
    lock: threading.Lock
    owners: dict[str, LoopbackOwner]


_REGISTRY = _Registry(threading.Lock(), {})


class _RegionAccess(Access):
    """Holds the remote region's gate for each piece."""

    def __init__(self, region: RegisteredRegion, owner: LoopbackOwner) -> None:
        self._region = region
        self._owner = owner

    def enter(self) -> None:
        if not self._region.gate.enter():
            raise gone_error(self._owner.state)

    def leave(self) -> None:
        self._region.gate.leave()


def _owner_at(endpoint: Endpoint) -> LoopbackOwner:
    with _REGISTRY.lock:
        owner = _REGISTRY.owners.get(endpoint.loopback)
    if owner is None:
        raise PeerUnreachable(f"no engine at loopback address {endpoint.loopback!r}")
    if owner.incarnation != endpoint.incarnation:
        raise Stale(
            f"loopback address {endpoint.loopback!r} is incarnation {owner.incarnation}, "
            f"the token names {endpoint.incarnation}"
        )
    return owner


def _swapped(ranges: Sequence[Range]) -> list[Range]:
    return [Range(r.local_offset, r.remote_offset, r.nbytes) for r in ranges]


class LoopbackTransport:
    """Reaches the engines of this process."""

    name = "loopback"

    def __init__(
        self, address: str, owner: LoopbackOwner, copier: Copier, devices: DeviceStages
    ) -> None:
        self._address = address
        self._owner = owner
        self._copier = copier
        self._devices = devices

    async def start(self) -> None:
        with _REGISTRY.lock:
            if self._address in _REGISTRY.owners:
                raise PeerUnreachable(
                    f"loopback address {self._address!r} is in use in this process; take port 0"
                )
            _REGISTRY.owners[self._address] = self._owner

    async def move(self, move: Move) -> None:
        owner = _owner_at(move.token.endpoint)
        region = owner.regions.authorize(move.token.region_id, move.token.capability, move.right)
        check_spans([(r.remote_offset, r.nbytes) for r in move.ranges], region.nbytes)
        if isinstance(region, DeviceRegion):
            await self._move_device(move, region, owner)
        else:
            access, to_local = _RegionAccess(region, owner), move.right == "r"
            copy = Copy(move.region.view, region.view, move.ranges, access, to_local, move.priority)
            await self._copier.copy(copy, move.deadline_s)
        owner.counters.add(bytes_served=total_nbytes(move.ranges))

    async def _move_device(self, move: Move, region: DeviceRegion, owner: LoopbackOwner) -> None:
        """The owner's memory is on a device: slots of this engine lie between it and ours."""
        staged = Staged(
            region,
            _swapped(move.ranges),
            into_device=move.right == "w",
            peer=owner.incarnation,
            priority=move.priority,
            deadline_s=move.deadline_s,
            refusal=lambda: gone_error(owner.state),
        )
        pinned = self._devices.pinned_of(move.region)
        if pinned is not None:
            await self._devices.copy(staged, pinned)
            return
        access = _RegionAccess(region, owner)

        async def wire(slot: HostRegion, ranges: list[Range]) -> None:
            spans = _swapped(ranges)
            to_local, priority = move.right == "r", move.priority
            copy = Copy(move.region.view, slot.view, spans, access, to_local, priority)
            await self._copier.copy(copy, move.deadline_s)

        await self._devices.move(staged, wire)

    def disrupt(self, endpoint: Endpoint) -> None:
        """Nothing: within a process there is no connection that could break."""

    async def close(self) -> None:
        self._leave(EngineState.CLOSED)

    def abort(self) -> None:
        self._leave(EngineState.ABORTED)

    def _leave(self, state: EngineState) -> None:
        with _REGISTRY.lock:
            if _REGISTRY.owners.get(self._address) is self._owner:
                self._owner.state = state
                del _REGISTRY.owners[self._address]
