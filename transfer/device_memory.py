"""What the transfer engine asks of memory that the host cannot address.

Owns the interface between staging and a device; knows no CUDA and no torch (``device_torch`` is the
implementation for CUDA tensors). Transports that reach devices themselves use ``array`` only; for
the others, bytes pass through pinned host memory by a ``CopyEngine``.

An *event* is a point in the work of a device. Copies of one direction are done in the order in
which they were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Run(NamedTuple):
    """One contiguous copy between a device's memory and pinned memory; in bytes."""

    device_offset: int
    pinned_offset: int
    nbytes: int


class DeviceEvent(Protocol):
    """Something that a device has been told to do, and will have done."""

    @property
    def done(self) -> bool:
        """True once it is done or has failed; never blocks."""
        ...

    def wait(self) -> None:
        """Block this thread, without spinning, until it is done.

        Raises:
            DeviceFailed: the device reported an error.
        """
        ...


class PinnedMemory(Protocol):
    """Page-locked host memory of one device. Freed with the last reference to it."""

    @property
    def view(self) -> memoryview: ...


class CopyEngine(Protocol):
    """Copies on streams of their own, beside compute. Each direction is used by one thread."""

    def pin(self, nbytes: int) -> PinnedMemory:
        """Return page-locked memory.

        Raises:
            DeviceFailed: the host has none left, or may not lock it.
        """
        ...

    def copy_in(
        self, memory: DeviceMemory, pinned: PinnedMemory, runs: Sequence[Run]
    ) -> DeviceEvent:
        """Tell the device to copy from ``pinned``; returns before it has.

        Raises:
            DeviceFailed: the device refused; nothing of it is queued or running.
        """
        ...

    def copy_out(
        self, memory: DeviceMemory, pinned: PinnedMemory, runs: Sequence[Run]
    ) -> DeviceEvent:
        """Tell the device to copy into ``pinned``; as ``copy_in``."""
        ...


@runtime_checkable
class DeviceMemory(Protocol):
    """A contiguous piece of one device's memory; keeps it alive."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> str:
        """Name of the device, such as ``cuda:0``; equal names are one device."""
        ...

    @property
    def readonly(self) -> bool: ...

    def array(self, offset: int, nbytes: int) -> object:
        """Return a part of it as an object with ``__cuda_array_interface__``."""
        ...

    def fence(self) -> DeviceEvent:
        """Return the end of all work that the calling thread's stream has been given so far."""
        ...

    def open_copy_engine(self) -> CopyEngine:
        """Return a new copy engine for memory of this device."""
        ...
