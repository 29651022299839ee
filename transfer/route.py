"""Which transport carries an operation, and what is done when it cannot.

Owns the memory of fall-backs, for one engine: a path that is not possible is not tried again for
the same life of a peer, unless it was a single region that kept it from being used; and every
fall-back is said and counted once. Knows no sockets; what is possible in principle is decided by
``transports.choose``.

::

    shm, ucx ──done──▶ end          tcp, loopback ──▶ end
        └── not possible with this peer ──▶ tcp (loud, counted)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from transfer.counters import CounterBoard
from transfer.device_stage import DeviceStages
from transfer.errors import PeerUnreachable
from transfer.shm_peer import RegionNotShared, ShmUnavailable
from transfer.token import Endpoint
from transfer.transports import Move, Transport, choose
from transfer.ucx_binding import UcxUnavailable

_LOG = logging.getLogger(__name__)
MAX_FALLBACKS = 4096  # lives of peers remembered; an older one is tried and said anew
WITH_FALLBACK = ("shm", "ucx")


class Obstacle(NamedTuple):
    """Why the faster transport was not used, and whether it is for this life of the peer."""

    reason: str
    for_good: bool


class Router:
    """Lives on one event loop."""

    def __init__(self, transport: str, counters: CounterBoard, devices: DeviceStages) -> None:
        """Args:
        transport: the one that is configured, or ``auto``.
        """
        self._transport = transport
        self._counters = counters
        self._devices = devices
        # Incarnations, oldest first: True when the faster transport is not tried any more.
        self._fallbacks: dict[str, bool] = {}

    async def move(self, move: Move, here: Endpoint, transports: Mapping[str, Transport]) -> None:
        """Perform an operation by the best transport that reaches the peer.

        Raises:
            PeerUnreachable: none does.
            TransferError: whatever the transport raised.
        """
        there = move.token.endpoint
        name = choose(self._transport, here, move.token)
        if name is None:
            raise PeerUnreachable(
                f"transport {self._transport!r} does not reach {there.incarnation} "
                f"(tcp {there.tcp or 'not offered'}); use 'auto' or 'tcp' on both sides"
            )
        meant, obstacle = name, None
        if name in WITH_FALLBACK:
            obstacle = await self._try(move, transports[name])
            if obstacle is None:
                return
            name = "tcp"
        elif name == "tcp" and self._transport in WITH_FALLBACK:
            meant = self._transport
            obstacle = Obstacle(f"{meant} is not offered for its region", for_good=False)
        await self._devices.carry(move, transports[name])
        if obstacle is not None:
            self._note(there, meant, obstacle)

    async def _try(self, move: Move, transport: Transport) -> Obstacle | None:
        """Move by a fast transport; return why that was not possible, None if it was done."""
        there = move.token.endpoint
        if self._fallbacks.get(there.incarnation, False):
            return Obstacle("it was not possible before", for_good=True)
        try:
            await self._devices.carry(move, transport)
        except (ShmUnavailable, UcxUnavailable) as error:
            if not there.tcp:
                raise
            return Obstacle(str(error), for_good=not isinstance(error, RegionNotShared))
        return None

    def _note(self, there: Endpoint, meant: str, obstacle: Obstacle) -> None:
        """Tcp worked instead of ``meant``: keep to it if it is for good, and say so once."""
        before = self._fallbacks.get(there.incarnation)
        self._fallbacks[there.incarnation] = obstacle.for_good or before is True
        if before is not None:
            return
        if len(self._fallbacks) > MAX_FALLBACKS:
            del self._fallbacks[next(iter(self._fallbacks))]
        self._counters.add(fallbacks=1)
        _LOG.warning(
            "transfer: %s is reached by tcp, not %s: %s", there.tcp, meant, obstacle.reason
        )
