"""The words by which an owner tells all peers at once what is not theirs any more.

Owns the control page of one engine, on both sides; knows no memory and no sockets. It is one memfd
of 64-bit words::

    word 0           state of the engine: OPEN, CLOSED (said goodbye) or ABORTED
    word 1 + slot    id of the region that lives in this slot; 0 when none does; MOVED when the
                     region lives, but not in shared memory any more

Peers read it before and after each piece of a copy. Region ids are never used twice, so a word
that still equals the id means: not revoked. One word is stored by one aligned 8-byte move.
Byte ``region_id`` of the same file is what peers lock while they are inside (``shm_presence``).
Only the owner can write to it: peers get a descriptor for reading, and the file is sealed.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Callable
from enum import IntEnum

from transfer.errors import PeerClosed, PeerLost, RegionRevoked, TransferError
from transfer.shm_files import check_sealed, create_sealed, opened_again, seal_for_good
from transfer.shm_presence import EVERY_REGION, until_empty, wait_until_empty

_LOG = logging.getLogger(__name__)

MAX_REGIONS = 65_535
CONTROL_NBYTES = 8 * (MAX_REGIONS + 1)
REVOKE_PATIENCE_S = 0.5  # a peer that runs ends its piece in a fraction of a millisecond
STALLED_PATIENCE_S = 0.01  # instead, while a peer that used up the patience is still inside
_MOVED = (1 << 64) - 1


class EngineState(IntEnum):
    """Word 0 of the control page."""

    OPEN = 1
    CLOSED = 2
    ABORTED = 3


def gone_error(state: int) -> TransferError:
    """Return why memory of an engine in ``state`` is not there any more."""
    if state == EngineState.CLOSED:
        return PeerClosed("the peer closed its transfer engine")
    if state == EngineState.ABORTED:
        return PeerLost("the peer's transfer engine was aborted")
    return RegionRevoked("the region was revoked by its owner")


def slot_of(region_id: int) -> int:
    """Return the control slot that a region id carries in its low bits."""
    return region_id & 0xFFFF


def _nobody(region_id: int) -> None:
    """No peer is told."""


class ControlPage:
    """The owner's side of the control words. Thread-safe: each call is one store, or a wait.

    Raises:
        OSError: there is no descriptor or no memory for it.

    Attributes:
        on_withdrawn: called with each region id after its word was withdrawn; must not block.
    """

    def __init__(self) -> None:
        self.fd = create_sealed("kvferry-control", CONTROL_NBYTES)
        try:
            self._words = memoryview(mmap.mmap(self.fd, CONTROL_NBYTES)).cast("Q")
            seal_for_good(self.fd, last_writer=True)
        except OSError:
            os.close(self.fd)
            raise
        self._closed = False
        self._words[0] = EngineState.OPEN
        self._stalled: int | None = None  # the last region in which a peer stayed too long
        self.on_withdrawn: Callable[[int], None] = _nobody

    def open_for_peer(self) -> int:
        """Return a descriptor for one peer, with locks of its own; whoever asks closes it."""
        assert not self._closed, "a peer came after the control page was closed"
        return opened_again(self.fd, writable=False)

    def publish(self, region_id: int) -> None:
        self._words[1 + slot_of(region_id)] = region_id

    def withdraw(self, region_id: int) -> None:
        """Let no peer begin another piece; ``wait_until_empty`` waits for those that run."""
        self._words[1 + slot_of(region_id)] = 0
        self.on_withdrawn(region_id)

    def move_away(self, region_id: int) -> None:
        """The region lives on, but peers have to reach it by another path."""
        self._words[1 + slot_of(region_id)] = _MOVED

    def wait_until_empty(self, region_id: int) -> bool:
        """Wait until no peer touches a region that was withdrawn.

        Blocks for one piece of a copy; for ``REVOKE_PATIENCE_S`` if a peer was stopped in the
        middle of one. Returns False then: the peer may go on at any time.
        """
        if self._closed:
            return True  # the engine waited for all peers when it ended
        patience_s = REVOKE_PATIENCE_S
        if self._stalled is not None:
            if wait_until_empty(self.fd, self._stalled, 0.0):
                self._stalled = None
            else:
                patience_s = STALLED_PATIENCE_S
        if wait_until_empty(self.fd, region_id, patience_s):
            return True
        self._stalled = region_id
        return False

    def end(self, state: EngineState) -> None:
        """Let no peer begin another piece in any region, and wait for those that run.

        Blocks for one piece of a copy; for ``REVOKE_PATIENCE_S`` if a peer was stopped inside.
        """
        self._words[0] = state
        if not self._closed:
            _report(wait_until_empty(self.fd, EVERY_REGION, REVOKE_PATIENCE_S))

    async def end_in_order(self, state: EngineState) -> None:
        """``end`` for a loop that has other things to do; cancelled, it ends as ``end`` does."""
        self._words[0] = state
        if self._closed:
            return
        try:
            _report(await until_empty(self.fd, EVERY_REGION, REVOKE_PATIENCE_S))
        except asyncio.CancelledError:
            self.end(state)
            raise

    def close(self) -> None:
        """Close the file; peers keep their mappings. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)


def _report(is_empty: bool) -> None:
    if not is_empty:
        _LOG.error(
            "a peer that was stopped may still touch memory of this closed engine: release what "
            "allocate() returned, do not reuse it"
        )


class ControlView:
    """A peer's side of the control words; read-only."""

    def __init__(self, fd: int) -> None:
        """Map the page.

        Raises:
            OSError: no memory for a mapping, or not a file that can be mapped.
            ValueError: a file that could shrink under us, or that is too short.
        """
        check_sealed(fd, CONTROL_NBYTES)
        mapped = mmap.mmap(fd, CONTROL_NBYTES, prot=mmap.PROT_READ)
        self._words = memoryview(mapped).cast("Q")

    @property
    def state(self) -> int:
        return self._words[0]

    def holds(self, region_id: int) -> bool:
        return self._words[1 + slot_of(region_id)] == region_id

    def moved(self, region_id: int) -> bool:
        """True if what lives in the region's slot is not in shared memory any more."""
        return self._words[1 + slot_of(region_id)] == _MOVED
