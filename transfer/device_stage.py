"""Moves bytes of device memory by transports that only know host memory.

Owns the operations that pass through an engine's bounce slots (``device_slots``). Knows no CUDA
(``device_memory``) and no wire: the caller says how a slot's bytes travel. Lives on one event loop.

An operation is cut into chunks of one slot. Its lanes work on several chunks at a time, so that the
wire is busy with one while the device copies another::

    into the device     slot ──wire──▶ full ──fence, copy──▶ on the device ──▶ next chunk
    from the device     slot ──fence, copy──▶ full ──wire──▶ at the peer   ──▶ next chunk

Ordering: nothing is copied before the caller's stream has done what it had been given when the
operation began (the *fence*); and an operation that has returned has left nothing to the device, so
whatever any stream is given afterwards sees the bytes. Invariant: a slot is given back only when
neither wire nor device touches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from transfer.device_copier import DeviceCopiers, Refusal
from transfer.device_memory import DeviceMemory, PinnedMemory, Run
from transfer.device_slots import DeviceSlots, Slot, SlotLimits
from transfer.errors import DeadlineExceeded, RegionRevoked
from transfer.interface import Priority, Range
from transfer.ranges import merge, split, total_nbytes
from transfer.region import DeviceRegion, HostRegion, RegionTable, RegisteredRegion
from transfer.transports import Move, Transport

DEVICE_TRANSPORTS = ("ucx",)  # these take device memory as it is


class Staged(NamedTuple):
    """One operation. In its ranges *local* is the device and *remote* the other side."""

    region: DeviceRegion
    ranges: Sequence[Range]
    into_device: bool
    peer: Hashable
    priority: Priority
    deadline_s: float
    refusal: Refusal


# Moves ranges between a slot (local) and the other side (remote).
Wire = Callable[[HostRegion, list[Range]], Awaitable[None]]


class DeviceStages:
    """Carries out the operations of one engine on all its devices."""

    def __init__(self, copiers: DeviceCopiers, regions: RegionTable, limits: SlotLimits) -> None:
        self.limits = limits
        self._copiers = copiers
        self._regions = regions
        self._slots: dict[str, DeviceSlots] = {}

    def slots(self, memory: DeviceMemory) -> DeviceSlots:
        """Return the slots of the memory's device; raises as ``DeviceCopiers.of``."""
        slots = self._slots.get(memory.device)
        if slots is None:
            slots = DeviceSlots(self._copiers.of(memory), self._regions, self.limits)
            self._slots[memory.device] = slots
        return slots

    async def move(self, staged: Staged, wire: Wire) -> None:
        """Move every byte; see ``interface.Transfer`` for what holds when this has ended.

        Raises:
            DeadlineExceeded: the deadline passed; the device is quiet.
            DeviceFailed: the device reported an error.
            TransferError: whatever ``wire`` raised.
        """
        operation = _Operation(self.slots(staged.region.memory), staged, wire)
        try:
            async with asyncio.timeout_at(staged.deadline_s):
                await operation.run()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed while bytes went through host memory of "
                f"{staged.region.memory.device}"
            ) from None

    def pinned_of(self, region: RegisteredRegion) -> PinnedMemory | None:
        """Return the pinned memory behind ``region`` if it is a slot of these stages."""
        for slots in self._slots.values():
            pinned = slots.pinned_of(region)
            if pinned is not None:
                return pinned
        return None

    async def copy(self, staged: Staged, pinned: PinnedMemory) -> None:
        """Copy between the device and a slot that somebody else's operation holds.

        Where both sides are device memory, the slot of one is the host memory of the other; to take
        a second slot of the same ring could wait for the first.
        """
        copier = self._copiers.of(staged.region.memory)
        await copier.passed(staged.region.memory.fence())
        call = copier.copy_in if staged.into_device else copier.copy_out
        runs = [Run(r.local_offset, r.remote_offset, r.nbytes) for r in staged.ranges]
        await call(staged.region, pinned, runs, staged.refusal)

    def carry(self, move: Move, transport: Transport) -> Coroutine[Any, Any, None]:
        """Perform an operation by ``transport``, through slots if it cannot reach the region."""
        if isinstance(move.region, DeviceRegion):
            return self._carry_device(move, move.region, transport)
        return transport.move(move)

    async def _carry_device(self, move: Move, region: DeviceRegion, transport: Transport) -> None:
        if transport.name in DEVICE_TRANSPORTS:
            await self._pass_fence(region.memory, move.deadline_s)
            await transport.move(move)
            return
        staged = Staged(
            region,
            move.ranges,
            into_device=move.right == "r",
            peer=move.token.endpoint.incarnation,
            priority=move.priority,
            deadline_s=move.deadline_s,
            refusal=lambda: RegionRevoked("the local region is revoked"),
        )

        async def wire(slot: HostRegion, ranges: list[Range]) -> None:
            await transport.move(move._replace(region=slot, ranges=ranges))

        await self.move(staged, wire)

    async def _pass_fence(self, memory: DeviceMemory, deadline_s: float) -> None:
        """Wait for what the caller's stream was given: the transport itself knows no streams."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._copiers.of(memory).passed(memory.fence())
        except TimeoutError:
            raise DeadlineExceeded(
                f"{memory.device} was still busy with earlier work when the deadline passed"
            ) from None


class _Operation:
    """One operation under way: a stock of chunks and the lanes that work it off."""

    def __init__(self, slots: DeviceSlots, staged: Staged, wire: Wire) -> None:
        self._slots = slots
        self._staged = staged
        self._wire = wire
        self._fence = staged.region.memory.fence()
        limits = slots.limits
        self._chunks: Iterator[list[Range]] = split(
            staged.ranges, max_ranges=limits.max_ranges, max_nbytes=limits.slot_nbytes
        )
        by_nbytes = -(-total_nbytes(staged.ranges) // limits.slot_nbytes)
        by_ranges = -(-len(staged.ranges) // limits.max_ranges)
        self._num_lanes = min(limits.max_slots_per_peer, max(by_nbytes, by_ranges))

    async def run(self) -> None:
        if self._num_lanes == 1:
            await self._lane()
            return
        await _all_of([self._lane() for _ in range(self._num_lanes)])

    async def _lane(self) -> None:
        staged = self._staged
        for chunk in self._chunks:  # shared: each chunk goes to one lane
            async with self._slots.lend(staged.peer, staged.priority) as slot:
                await self._carry(chunk, slot)

    async def _carry(self, chunk: list[Range], slot: Slot) -> None:
        packed, runs = pack(chunk)
        if self._staged.into_device:
            await self._wire(slot.region, packed)
            await self._copy(slot, runs)
        else:
            await self._copy(slot, runs)
            await self._wire(slot.region, packed)

    async def _copy(self, slot: Slot, runs: list[Run]) -> None:
        staged, copier = self._staged, self._slots.copier
        await copier.passed(self._fence)
        call = copier.copy_in if staged.into_device else copier.copy_out
        await call(staged.region, slot.pinned, runs, staged.refusal)


async def _all_of(lanes: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all to their ends; the first to fail stops the others. Ends when none runs any more."""
    tasks = [asyncio.get_running_loop().create_task(lane) for lane in lanes]
    ended: set[asyncio.Task[None]] = set()
    cancelled: asyncio.CancelledError | None = None
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as error:
        cancelled = error
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    first = sorted(tasks, key=lambda task: task not in ended)
    failures = [task.exception() for task in first if not task.cancelled()]
    if cancelled is not None:
        raise cancelled
    for failure in failures:
        if failure is not None:
            raise failure
    if any(task.cancelled() for task in ended):
        raise asyncio.CancelledError  # somebody ended a lane from outside


def pack(chunk: Sequence[Range]) -> tuple[list[Range], list[Run]]:
    """Lay a chunk out in a slot without gaps: what the wire moves, and what the device copies.

    Each side is merged for itself: ranges that are neighbours at the peer are one on the wire even
    if they are apart on the device, and the other way round.
    """
    wire: list[Range] = []
    runs: list[Run] = []
    place = 0
    for remote_offset, device_offset, nbytes in chunk:
        wire.append(Range(remote_offset, place, nbytes))
        last = runs[-1] if runs else None
        if last is not None and last.device_offset + last.nbytes == device_offset:
            runs[-1] = last._replace(nbytes=last.nbytes + nbytes)
        else:
            runs.append(Run(device_offset, place, nbytes))
        place += nbytes
    return merge(wire), runs
