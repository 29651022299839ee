"""A device for tests: memory that stores reach through staging only, with faults at will."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.device.staged import StagedStore
from kvstore.device.staging import DeviceRegion, PageMove
from kvstore.store import PageStore
from tests.kvstore.pages import SPEC
from transfer.interface import Region, Transfer

PAGE = SPEC.page_nbytes
DEVICE_NBYTES = 1 << 21


class DevicePart(DeviceRegion):
    """A part of a device's memory that the test may look into."""

    def __init__(self, memory: npt.NDArray[np.uint8], first: int, nbytes: int) -> None:
        super().__init__(nbytes, first=first)
        self._view = memory[first : first + nbytes].data

    @property
    def view(self) -> memoryview:
        return self._view


class Device:
    """Page memory, given out in parts. Stands where a ``Transfer`` does for ``allocate``."""

    transport = "device"

    def __init__(self) -> None:
        self.memory = np.zeros(DEVICE_NBYTES, dtype=np.uint8)
        self._num_used = 0

    def allocate(self, nbytes: int) -> Region:
        first = self._num_used
        self._num_used += -(-nbytes // PAGE) * PAGE
        assert self._num_used <= DEVICE_NBYTES, "the test device is too small"
        return DevicePart(self.memory, first, nbytes)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a page store may not use {name} on device memory")


class NumpyPages:
    """``DevicePages`` by plain copies.

    Attributes:
        gate: copies wait here (on their thread); set by default.
        entered: set when a copy has begun.
        error: every copy raises it.
    """

    def __init__(self, device: Device, num_staging_pages: int) -> None:
        self._device = device.memory
        self._staging = np.full(num_staging_pages * PAGE, 0xAA, dtype=np.uint8)
        self._lock = threading.Lock()
        self._busy: dict[int, None] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: RuntimeError | None = None
        self.num_copied = 0

    @property
    def nbytes(self) -> int:
        return self._device.nbytes

    @property
    def staging(self) -> object:
        return self._staging

    def copy_out(self, moves: Sequence[PageMove]) -> None:
        self._copy(moves, to_device=False)

    def copy_in(self, moves: Sequence[PageMove]) -> None:
        self._copy(moves, to_device=True)

    def _copy(self, moves: Sequence[PageMove], *, to_device: bool) -> None:
        self._begin(moves)
        try:
            self.entered.set()
            assert self.gate.wait(20), "the test never opened the gate"
            if self.error is not None:
                raise self.error
            for move in moves:
                device = self._device[move.device_offset : move.device_offset + PAGE]
                staging = self._staging[move.staging_offset : move.staging_offset + PAGE]
                np.copyto(device, staging) if to_device else np.copyto(staging, device)
            self.num_copied += len(moves)
        finally:
            with self._lock:
                for move in moves:
                    del self._busy[move.staging_offset]

    def _begin(self, moves: Sequence[PageMove]) -> None:
        """No staging page may serve two copies at a time."""
        with self._lock:
            for move in moves:
                assert move.staging_offset % PAGE == 0
                assert move.staging_offset not in self._busy, "two holders of one staging page"
                self._busy[move.staging_offset] = None


def staged(
    store: PageStore, transfer: Transfer, device: Device, *, num_staging_pages: int
) -> tuple[StagedStore, NumpyPages]:
    pages = NumpyPages(device, num_staging_pages)
    return StagedStore(store, transfer=transfer, pages=pages, spec=SPEC), pages
