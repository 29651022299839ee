"""The pinned bounce slots of one device: memory through which bytes reach it.

Owns the memory, as the device knows it and as transports do (a region of the host), and lends it.
Who is next is decided by ``device_ring``. Lives on one event loop. Pinned memory is made when a
slot is first lent, and kept: locking pages is slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import NamedTuple

from transfer.config import TransferConfig
from transfer.device_copier import DeviceCopier
from transfer.device_memory import PinnedMemory
from transfer.device_ring import BounceRing
from transfer.errors import DeviceFailed
from transfer.interface import Priority
from transfer.region import HostRegion, RegionTable, RegisteredRegion

MAX_WAITING = 16_384  # lanes that stand in line for a slot


class SlotLimits(NamedTuple):
    """How much pinned memory a device gets, and how much of it one peer."""

    slot_nbytes: int
    max_slots: int
    max_slots_per_peer: int
    max_ranges: int  # of one chunk


def limits_of(config: TransferConfig) -> SlotLimits:
    """Return the limits for operations of this engine's own."""
    return SlotLimits(
        config.bounce_nbytes,
        config.bounce_slots,
        config.bounce_slots_per_peer,
        config.max_ranges_per_request,
    )


class Slot(NamedTuple):
    """One piece of pinned memory, as the device and as transports know it."""

    pinned: PinnedMemory
    region: HostRegion


class DeviceSlots:
    """The slots of one device. Lives on one event loop."""

    def __init__(self, copier: DeviceCopier, regions: RegionTable, limits: SlotLimits) -> None:
        self.copier = copier
        self.limits = limits
        self.ring = BounceRing(max_slots=limits.max_slots, max_per_peer=limits.max_slots_per_peer)
        self._regions = regions
        self._slots: dict[int, Slot] = {}

    @asynccontextmanager
    async def lend(self, peer: Hashable, priority: Priority) -> AsyncIterator[Slot]:
        """Lend a slot; waits for one. It must be at rest when it is given back.

        Raises:
            DeviceFailed: too many wait already, or the host has no pinned memory left.
        """
        if self.ring.num_waiting >= MAX_WAITING:
            raise DeviceFailed(f"{MAX_WAITING} chunks wait for a bounce slot; raise bounce_slots")
        granted = asyncio.Event()
        ticket = self.ring.ask(peer, priority, granted.set)
        try:
            await granted.wait()
            assert ticket.slot is not None, "granted without a slot"
            yield await self._made(ticket.slot)
        finally:
            self.ring.give_back(ticket)

    async def _made(self, number: int) -> Slot:
        slot = self._slots.get(number)
        if slot is None:
            pinned = await self.copier.pin(self.limits.slot_nbytes)
            slot = self._slots[number] = Slot(pinned, self._regions.register_host(pinned.view))
        return slot

    def pinned_of(self, region: RegisteredRegion) -> PinnedMemory | None:
        return next((s.pinned for s in self._slots.values() if s.region is region), None)
