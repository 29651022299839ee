"""Every error that ``transfer`` raises, as one tree.

::

    TransferError
    ├── PeerUnreachable     nothing answered at the address before the deadline
    ├── PeerClosed          the peer said goodbye and closed in order
    ├── PeerLost            the connection broke, or the peer fell silent
    ├── DeadlineExceeded    the operation's absolute deadline passed
    ├── RegionRevoked       the owner withdrew the memory
    ├── Stale               the address answers, but as another incarnation
    ├── Unauthorized        missing right, wrong secret, forged token
    ├── FrameInvalid        bytes from a peer that do not follow the protocol, or bad ranges
    ├── HelloRefused        the peers do not fit together; both sides are in the message
    ├── DeviceFailed        a device refused a copy, or the host has no pinned memory for it
    └── RemoteFailed        the peer's handler answered with an error (``code``, ``message``)

Foreign exceptions (``OSError``, ``zmq.ZMQError``, ...) are translated in one place per transport.
Nothing else may escape from this package, apart from ``asyncio.CancelledError`` and
``AssertionError`` (our own bugs).
"""

from __future__ import annotations


class TransferError(Exception):
    """Root of the tree."""


class PeerUnreachable(TransferError):
    """Nothing answered at the address before the deadline."""


class PeerClosed(TransferError):
    """The peer closed the connection in order."""


class PeerLost(TransferError):
    """The connection broke, or the peer has been silent for longer than the liveness limit."""


class DeadlineExceeded(TransferError):
    """The absolute deadline of the operation passed before it completed."""


class RegionRevoked(TransferError):
    """The region was revoked by its owner."""


class Stale(TransferError):
    """The address answers, but it is another incarnation than the one that was named."""


class Unauthorized(TransferError):
    """The token or the peer does not carry the right that the operation needs."""


class FrameInvalid(TransferError):
    """Bytes from a peer that do not follow the protocol, or ranges outside of a region."""


class HelloRefused(TransferError):
    """The peers do not fit together; the message prints both sides."""


class DeviceFailed(TransferError):
    """A device reported an error, or the host has no pinned memory to reach it through."""


class RemoteFailed(TransferError):
    """The peer's handler answered with an error.

    Attributes:
        code: short machine-readable word, for example ``"unknown_request"``.
        message: text for people; names the value and the remedy.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
