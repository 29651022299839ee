"""Copies between one device's memory and pinned host memory, for one transfer engine.

Owns three lanes (into the device, out of it, and waiting for fences), so that neither direction
waits for the other and no stream waits for somebody's compute. Knows no peers and no wire. Every
copy holds its region's gate from its first byte to its last: once ``revoke`` has returned, the
device does nothing with the memory any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from transfer.device_lane import DeviceLane, Start
from transfer.device_memory import DeviceEvent, DeviceMemory, PinnedMemory, Run
from transfer.errors import PeerClosed, TransferError
from transfer.gate import Gate
from transfer.region import DeviceRegion

Refusal = Callable[[], TransferError]  # why a region's gate is closed
CopyCall = Callable[[DeviceMemory, PinnedMemory, Sequence[Run]], DeviceEvent]


class _Inside:
    """The event of a copy; leaves the gate when the copy is over."""

    def __init__(self, event: DeviceEvent, gate: Gate) -> None:
        self._event = event
        self._gate = gate

    @property
    def done(self) -> bool:
        return self._event.done

    def wait(self) -> None:
        try:
            self._event.wait()
        finally:
            self._gate.leave()


class DeviceCopier:
    """Thread-safe. A call that has ended, however it did, has left nothing on the device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._engine = memory.open_copy_engine()
        self._into = DeviceLane(f"kvferry-into-{memory.device}")
        self._out = DeviceLane(f"kvferry-from-{memory.device}")
        self._fences = DeviceLane(f"kvferry-fence-{memory.device}")

    @property
    def is_alive(self) -> bool:
        """True while all threads run that were started."""
        return all(lane.is_alive for lane in (self._into, self._out, self._fences))

    async def pin(self, nbytes: int) -> PinnedMemory:
        """Return new pinned memory; locking pages takes its time, so a lane's thread does it."""
        made: list[PinnedMemory] = []

        def start() -> None:
            made.append(self._engine.pin(nbytes))

        await self._into.run(start)
        return made[0]

    async def passed(self, fence: DeviceEvent) -> None:
        """Return when the device has done all that ``fence`` stands behind."""
        if not fence.done:
            await self._fences.run(lambda: fence, only_waits=True)

    async def copy_in(
        self, region: DeviceRegion, pinned: PinnedMemory, runs: Sequence[Run], refusal: Refusal
    ) -> None:
        """Copy from pinned memory to the device.

        Raises:
            DeviceFailed: the device reported an error.
            PeerClosed: this copier was closed before the copy had begun.
            TransferError: that of ``refusal``, when the region was revoked.
        """
        await self._into.run(_guarded(self._engine.copy_in, region, pinned, runs, refusal))

    async def copy_out(
        self, region: DeviceRegion, pinned: PinnedMemory, runs: Sequence[Run], refusal: Refusal
    ) -> None:
        """Copy from the device to pinned memory; as ``copy_in``."""
        await self._out.run(_guarded(self._engine.copy_out, region, pinned, runs, refusal))

    def close(self) -> None:
        """End waiting copies with ``PeerClosed``; wait for those on the device. Idempotent."""
        self._fences.close(wait=False)  # that would be waiting for somebody's compute
        self._into.close()
        self._out.close()


def _guarded(
    call: CopyCall,
    region: DeviceRegion,
    pinned: PinnedMemory,
    runs: Sequence[Run],
    refusal: Refusal,
) -> Start:
    """Return what starts a copy inside of its region's gate."""

    def start() -> DeviceEvent:
        if not region.gate.enter():
            raise refusal()
        try:
            event = call(region.memory, pinned, runs)
        except BaseException:
            region.gate.leave()
            raise
        return _Inside(event, region.gate)

    return start


class DeviceCopiers:
    """The copiers of one engine, one for each device; made when first used. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copiers: dict[str, DeviceCopier] = {}
        self._closed = False

    def of(self, memory: DeviceMemory) -> DeviceCopier:
        """Return the copier of the memory's device.

        Raises:
            PeerClosed: the engine is closed.
            DeviceFailed: the device has no streams left.
        """
        with self._lock:
            if self._closed:
                raise PeerClosed("this transfer engine is closed")
            copier = self._copiers.get(memory.device)
            if copier is None:
                copier = self._copiers[memory.device] = DeviceCopier(memory)
            return copier

    @property
    def are_alive(self) -> bool:
        with self._lock:
            return all(copier.is_alive for copier in self._copiers.values())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            copiers = list(self._copiers.values())
        for copier in copiers:
            copier.close()
