"""Errors as numbers, for the wires that have no room for names: tcp and shm.

Owns the mapping, in both directions, and nothing else.
"""

from __future__ import annotations

from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    HelloRefused,
    PeerClosed,
    RegionRevoked,
    Stale,
    TransferError,
    Unauthorized,
)

# The order is the wire format: append only. RemoteFailed and PeerLost never travel.
STATUS_ERRORS: tuple[type[TransferError], ...] = (
    FrameInvalid,
    Unauthorized,
    RegionRevoked,
    Stale,
    HelloRefused,
    PeerClosed,
    DeadlineExceeded,
)


def status_of(error: TransferError | None) -> int:
    """Return the status code: 0 is success."""
    return 0 if error is None else STATUS_ERRORS.index(type(error)) + 1


def error_of(status: int, text: bytes) -> TransferError | None:
    """Return the error a peer reported; None for success."""
    if status == 0:
        return None
    if status > len(STATUS_ERRORS):
        return FrameInvalid(f"unknown status {status} from the peer")
    return STATUS_ERRORS[status - 1](text.decode("utf-8", "replace") or "refused by the peer")
