"""How a real operation is made to stand still, for each way in which bytes are moved.

Owns the two points at which every piece asks before it touches the owner's memory: the region's
gate (tcp, on the owner's I/O thread; for ucx see ``holds_ucx``) and the copier's access (loopback
and shm, on a copy thread of the user). Both delegate once the hold is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.transfer.contract.world import Hold
from transfer.copier import Access, Copier, Copy
from transfer.engine import TransferEngine
from transfer.gate import Gate
from transfer.region import HostRegion

SLICE_S = 0.001  # how long a held piece keeps its thread before it asks again


class HeldGate(Gate):
    """Says "not now" to held pieces, as a full socket would: the I/O thread serves others."""

    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self.hold = hold

    def enter(self) -> bool:
        if not self.is_open:
            return False
        if not self.hold.admits():
            time.sleep(SLICE_S)
            raise BlockingIOError
        return super().enter()


class HeldAccess(Access):
    """Keeps the copy thread before its piece until it is released or the copy is told to stop."""

    def __init__(self, access: Access, hold: Hold, copier: Copier, *, inside: bool) -> None:
        self._access = access
        self._hold = hold
        self._copier = copier
        self._inside = inside

    def enter(self) -> None:
        if self._inside:
            self._access.enter()
        while not self._hold.admits() and not self._told_to_stop():
            time.sleep(SLICE_S)
        if not self._inside:
            self._access.enter()

    def _told_to_stop(self) -> bool:
        with self._copier._lock:
            return any(stop.error is not None for stop in self._copier._active)

    def leave(self) -> None:
        self._access.leave()


def hold_at_gate(region: HostRegion, passes: int) -> Hold:
    """Hold what peers do with ``region``, on its owner's side."""
    hold = Hold(passes)
    region.gate = HeldGate(hold)
    return hold


def hold_copies(
    user: TransferEngine, is_held: Callable[[Copy], bool], passes: int, *, inside: bool = False
) -> Hold:
    """Hold those copies of ``user`` that ``is_held`` picks."""
    hold = Hold(passes)
    copier, copy_now = user._copier, user._copier.copy

    async def copy(copy: Copy, deadline_s: float) -> None:
        if is_held(copy):
            copy = copy._replace(access=HeldAccess(copy.access, hold, copier, inside=inside))
        await copy_now(copy, deadline_s)

    copier.copy = copy  # type: ignore[method-assign]
    return hold
