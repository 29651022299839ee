"""Whether the peer of a tcp connection is still there. A pure rule on what the kernel knows.

A peer that *vanished* (power, cable) must be noticed within ``LIVENESS_S``; one that is merely
*slow* (SIGSTOP, full receive buffer) must never be cut off, however long it takes.
TCP_USER_TIMEOUT cannot do that: Linux also counts a receiver that keeps answering zero-window
probes. But the kernel of a stopped process still acknowledges, and that of a dead machine does not:

* With bytes in flight, ``Liveness`` watches for retransmissions and probes that stay unanswered.
  Silence alone means nothing: perhaps nothing was sent. Nor does the age of the last answer: a
  single packet that is lost after a long pause would end a healthy connection.
* With nothing to send, while an answer is awaited, the kernel's keepalive probes after
  ``KEEPALIVE_IDLE_S``. There is time for one such probe only; it gets ``KEEPALIVE_SUSPECT_S``. The
  kernel itself would give up after a second (``tcp_sockets.tune``), as it does when nobody waits.

::

    trusted ──repeated or probed, unanswered──▶ suspect ──for its limit──▶ vanished
       ▲───────────────an answer────────────────┘

Arithmetic, in seconds: first retransmission 0.2, two checks 0.2, ``SUSPECT_S`` 1.5: 1.9 in all. The
kernel has repeated at 0.2, 0.6 and 1.4 by then: three packets in a row must be lost to err. Waiting
only: keepalive 1.0, two checks 0.2, ``KEEPALIVE_SUSPECT_S`` 0.7: 1.9 as well.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

LIVENESS_S = 2.0  # a host that vanished is noticed within
LIVENESS_CHECK_S = 0.1
SUSPECT_S = 1.5
KEEPALIVE_SUSPECT_S = 0.7
KEEPALIVE_IDLE_S = 1
_TCP_INFO = struct.Struct("<8B24I4Q3I")


class TcpInfo(NamedTuple):
    """What the kernel knows of a connection (linux/tcp.h, struct tcp_info)."""

    retransmits: int  # of the oldest packet that is not acknowledged
    probes: int  # zero-window or keepalive probes without an answer
    last_ack_s: float  # since the last acknowledgement of anything
    to_send: bool  # something is sent and not acknowledged, or waits to be sent


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Return the kernel's view; None where it is not available."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO.size)
    except OSError:
        return None
    if len(raw) < _TCP_INFO.size:
        return None
    fields = _TCP_INFO.unpack(raw)
    unacked, not_sent = fields[12], fields[38]
    return TcpInfo(fields[2], fields[3], fields[20] / 1000, bool(unacked or not_sent))


class Liveness:
    """One per connection; asked every ``LIVENESS_CHECK_S`` while something is outstanding."""

    def __init__(self) -> None:
        self._suspect_since_s: float | None = None

    def has_vanished(self, info: TcpInfo, now_s: float) -> bool:
        """Take in the kernel's view of ``now_s``; True if the peer has vanished."""
        if not (info.retransmits or info.probes):
            self._suspect_since_s = None
            return False
        since_s = self._suspect_since_s
        if since_s is None or info.last_ack_s < now_s - since_s:
            self._suspect_since_s = now_s  # new, or it has answered meanwhile
            return False
        return now_s - since_s >= (SUSPECT_S if info.to_send else KEEPALIVE_SUSPECT_S)
