"""Errors as numbers, for the wires that have no room for names: tcp, shm and ucx.

Owns the mapping, in both directions, and nothing else.
"""

from __future__ import annotations

from transfer.errors import (
    DeadlineExceeded,
    DeviceFailed,
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
    DeviceFailed,
)

MAX_TEXT_NBYTES = 1000  # of a reason, as far as it is kept: it ends up in logs


def status_of(error: TransferError | None) -> int:
    """Return the status code: 0 is success."""
    return 0 if error is None else STATUS_ERRORS.index(type(error)) + 1


def error_of(status: int, text: bytes) -> TransferError | None:
    """Return the error a peer reported; None for success."""
    if status == 0:
        return None
    if not 0 < status <= len(STATUS_ERRORS):
        return FrameInvalid(f"unknown status {status} from the peer")
    told = text[:MAX_TEXT_NBYTES].decode("utf-8", "replace")
    return STATUS_ERRORS[status - 1](told or "refused by the peer")
