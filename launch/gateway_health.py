"""Whether the services of the gateway process live, as nodes see them.

Owns a client of the gateway's own registry, over the gateway's own listener: what no task or flag
of the services could say (a socket that is gone, a handler that hangs, a timer that stopped) shows
there. Knows no HTTP and no requests.

``listener``: the registry answers a watch that came in through the listener. ``registry``: the
registry keeps time: no lease is older than it may be. ``membership``: the gateway itself is listed.
Each turns False within ``LEASE_TTL_S`` plus a margin, and True again when the service works again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transfer.channel import Network
from transfer.identity import NodeId, Role, new_identity
from transfer.membership import Membership
from transfer.registry import LEASE_TTL_S
from transfer.registry_client import RegistryMembership

MARGIN_S = 1.0  # a loop that was busy for a moment is not a dead service
FIRST_VIEW_S = 5.0


class GatewayHealth:
    """Watches the services of one gateway process. ``start`` after they listen."""

    def __init__(
        self, network: Network, address: str, node_id: NodeId, membership: Membership
    ) -> None:
        self._node_id = node_id
        self._membership = membership
        self._probe = RegistryMembership(network, address, new_identity(Role.OBSERVER))
        self._stopped = False

    async def start(self) -> None:
        """Watch the registry through the listener.

        Raises:
            PeerUnreachable: the listener does not answer.
        """
        loop = asyncio.get_running_loop()
        await self._probe.watch_only(deadline_s=loop.time() + FIRST_VIEW_S)

    @property
    def checks(self) -> dict[str, Callable[[], bool]]:
        """Name → "alive?", for ``gateway.app.create_app``."""
        return {
            "listener": lambda: self._probe.connected,
            "registry": self._registry_keeps_time,
            "membership": lambda: self._membership.view.get(self._node_id) is not None,
        }

    def _registry_keeps_time(self) -> bool:
        members = self._membership.view.members
        return all(member.heartbeat_age_s <= LEASE_TTL_S + MARGIN_S for member in members)

    async def close(self) -> None:
        """Stop watching; idempotent."""
        if not self._stopped:
            self._stopped = True
            await self._probe.leave()

    def abort(self) -> None:
        self._stopped = True
        self._probe.abort()
