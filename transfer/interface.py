"""The bulk-data contract: regions, tokens, one-sided reads and writes.

What every transport implements and every user of ``transfer`` relies on. Knows no pages.

Time: every ``deadline_s`` in kvferry is an **absolute** time on the running loop's clock
(``asyncio.get_running_loop().time()``), in seconds. ``deadline_after`` makes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, runtime_checkable

Rights = Literal["r", "w", "rw"]


class Priority(IntEnum):
    """Which of the operations that wait for one peer goes first.

    ``NOW`` is for bytes that somebody waits for: a pull before a request can run. ``BACKGROUND`` is
    for those that only have to arrive some day, such as pushes. Background work is slowed by
    urgent work, never starved.
    """

    NOW = 0
    BACKGROUND = 1


class Range(NamedTuple):
    """One contiguous run to move. Offsets are bytes from the start of each region."""

    remote_offset: int
    local_offset: int
    nbytes: int


def deadline_after(timeout_s: float) -> float:
    """Return the absolute deadline that lies ``timeout_s`` seconds ahead on the running loop."""
    return asyncio.get_running_loop().time() + timeout_s


def remaining_s(deadline_s: float) -> float:
    """Return the seconds left until ``deadline_s``; negative when it has passed."""
    return deadline_s - asyncio.get_running_loop().time()


@runtime_checkable
class Region(Protocol):
    """Memory known to the transfer engine of this process.

    The buffer must outlive the region. ``revoke`` is idempotent; a peer that uses a token of a
    revoked region gets ``RegionRevoked``.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """The bytes of a host region, format ``B``, writable if the buffer is."""
        ...

    def export(self, rights: Rights) -> bytes:
        """Return an opaque token: addresses, incarnation, region id and a capability."""
        ...

    def revoke(self) -> None: ...


@runtime_checkable
class Transfer(Protocol):
    """Moves bytes between regions of different processes; the owner's code takes no part.

    ``read`` and ``write`` complete exactly once: they return when every byte has arrived (for a
    write: is in the owner's memory), or raise a ``TransferError``. After they have returned,
    raised, or been cancelled, the local region is not touched any more by that operation.
    A failed read leaves undefined bytes in the local ranges; a failed write, in the remote ones.
    """

    @property
    def transport(self) -> str:
        """Name of the transport in use, for people and metrics (``"shm"``, ``"tcp"`` ...)."""
        ...

    async def start(self) -> None: ...

    def register(self, buffer: object) -> Region:
        """Register a C-contiguous numpy array, torch tensor, mmap or bytearray."""
        ...

    def allocate(self, nbytes: int) -> Region:
        """Return zeroed, page-aligned memory that peers can reach by the fastest path."""
        ...

    async def read(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        into: Region,
        deadline_s: float,
        priority: Priority = Priority.NOW,
    ) -> None: ...

    async def write(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        source: Region,
        deadline_s: float,
        priority: Priority = Priority.BACKGROUND,
    ) -> None: ...

    async def close(self) -> None:
        """Stop in order; idempotent. Operations in flight raise ``PeerClosed``."""
        ...

    def abort(self) -> None:
        """Stop at once, synchronously; idempotent."""
        ...
