"""A device without a device: memory that no buffer reaches, copies that can be held and failed.

A copy is done when its event is waited for, or when the test says so, never when it is asked for:
whoever touches the pinned bytes, or looks at the destination, too early is found out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from transfer.device_memory import CopyEngine, DeviceEvent, DeviceMemory, PinnedMemory, Run
from transfer.errors import DeviceFailed

VOID = 0xEE  # what pinned memory holds until the device has copied into it


class FakeDevice:
    """One device.

    Attributes:
        pending: copies that were asked for and are not done, oldest first.
        torn: copies whose pinned bytes changed before the device had read them.
        num_copies: copies that were done.
        failing: the next copies fail: ``"start"`` when asked for, ``"event"`` when waited for.
        no_memory: pinned memory is refused.
    """

    def __init__(self, name: str = "fake:0") -> None:
        self.name = name
        self.pending: list[FakeCopy] = []
        self.torn = 0
        self.num_copies = 0
        self.max_runs = 0
        self.failing = ""
        self.no_memory = False
        self._changed = threading.Condition()
        self._held = False
        self._compute: list[FakeCompute] = []
        self._pinned: list[FakePinned] = []

    def memory(self, data: bytes) -> FakeMemory:
        return FakeMemory(self, bytearray(data))

    def hold(self) -> None:
        """Do no copy until ``release``, or ``FakeCopy.perform``."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def compute(self) -> FakeCompute:
        """Enqueue work on the caller's stream; it goes on until ``finish``."""
        work = FakeCompute()
        self._compute.append(work)
        return work

    def forget_compute(self) -> None:
        """Fences from now on stand behind none of the work so far: another stream is current."""
        self._compute.clear()

    def let_go(self) -> None:
        """Hold nothing any more: a test that failed half-way must not hang in its clean-up."""
        self.release()
        for work in self._compute:
            work.finish()

    def pin(self, nbytes: int) -> FakePinned:
        if self.no_memory:
            raise DeviceFailed("no pinned memory: raise the limit on locked memory")
        self._pinned.append(FakePinned(nbytes))
        return self._pinned[-1]

    def is_pinned(self, data: bytes) -> bool:
        """True if some pinned memory holds exactly ``data``."""
        return any(pinned.view == data for pinned in self._pinned)

    def enqueued(self, copy: FakeCopy) -> FakeCopy:
        if self.failing == "start":
            raise DeviceFailed("the fake device refused")
        with self._changed:
            self.pending.append(copy)
            self.max_runs = max(self.max_runs, len(copy.runs))
        return copy

    def wait_for(self, copy: FakeCopy) -> None:
        with self._changed:
            while self._held and not copy.done:
                self._changed.wait()
            self._do(copy)
        if self.failing == "event":
            raise DeviceFailed("the fake device failed")

    def perform(self, copy: FakeCopy) -> None:
        """Do this copy now, whatever its turn."""
        with self._changed:
            self._do(copy)
            self._changed.notify_all()

    def _do(self, copy: FakeCopy) -> None:
        if copy.done:
            return
        copy.move()
        copy.done = True
        self.torn += copy.is_torn
        self.num_copies += 1
        self.pending.remove(copy)

    def fence(self) -> DeviceEvent:
        return FakeFence(list(self._compute))


class FakeCompute:
    """Work on the caller's stream."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def finish(self) -> None:
        self.over.set()


class FakeFence:
    def __init__(self, before: list[FakeCompute]) -> None:
        self._before = before

    @property
    def done(self) -> bool:
        return all(work.over.is_set() for work in self._before)

    def wait(self) -> None:
        for work in self._before:
            assert work.over.wait(30), "nobody finished the work before a fence"


class FakeMemory:
    """Memory of a fake device; ``data`` is for the eyes of tests."""

    readonly = False

    def __init__(self, device: FakeDevice, data: bytearray) -> None:
        self.gpu = device
        self.data = data
        self.device = device.name
        self.nbytes = len(data)

    def array(self, offset: int, nbytes: int) -> object:
        """Return what a transport reaches that takes device memory as it is."""
        return np.frombuffer(self.data, np.uint8, nbytes, offset)

    def fence(self) -> DeviceEvent:
        return self.gpu.fence()

    def open_copy_engine(self) -> CopyEngine:
        return FakeCopyEngine(self.gpu)


class FakePinned:
    def __init__(self, nbytes: int) -> None:
        self._data = bytearray(nbytes)

    @property
    def view(self) -> memoryview:
        return memoryview(self._data)


class FakeCopy:
    """One copy, and its own event."""

    def __init__(
        self,
        device: FakeDevice,
        memory: DeviceMemory,
        pinned: PinnedMemory,
        runs: Sequence[Run],
        *,
        into_device: bool,
    ) -> None:
        assert isinstance(memory, FakeMemory)
        self.device = device
        self.memory = memory
        self.into_device = into_device
        self.runs = list(runs)
        self.done = False
        self._pinned = pinned.view
        if not into_device:
            for _, place, nbytes in self.runs:
                self._pinned[place : place + nbytes] = bytes([VOID]) * nbytes
        self._asked = self._seen()

    def _seen(self) -> bytes:
        return b"".join(self._pinned[place : place + n] for _, place, n in self.runs)

    @property
    def is_torn(self) -> bool:
        return self.into_device and self._seen() != self._asked

    def move(self) -> None:
        for offset, place, nbytes in self.runs:
            if self.into_device:
                self.memory.data[offset : offset + nbytes] = self._pinned[place : place + nbytes]
            else:
                self._pinned[place : place + nbytes] = self.memory.data[offset : offset + nbytes]

    def perform(self) -> None:
        self.device.perform(self)

    def wait(self) -> None:
        self.device.wait_for(self)


class FakeCopyEngine:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def pin(self, nbytes: int) -> PinnedMemory:
        return self._device.pin(nbytes)

    def copy_in(
        self, memory: DeviceMemory, pinned: PinnedMemory, runs: Sequence[Run]
    ) -> DeviceEvent:
        return self._device.enqueued(FakeCopy(self._device, memory, pinned, runs, into_device=True))

    def copy_out(
        self, memory: DeviceMemory, pinned: PinnedMemory, runs: Sequence[Run]
    ) -> DeviceEvent:
        return self._device.enqueued(
            FakeCopy(self._device, memory, pinned, runs, into_device=False)
        )
