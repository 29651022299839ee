"""Open channels to every prefill and decode node, kept warm.

Owns one ``Link`` per node incarnation in the membership view: it connects as soon as the node
appears (so the first request pays no connect), watches the node's KV events, reopens a broken
channel with back-off, and ends when the incarnation leaves the view. Knows no requests.

::

            ┌──────── back-off ◀──────── lost / refused ───────┐
            ▼                                                  │
    CONNECTING ──hello──▶ OPEN ── watch events, until the channel closes
            └──── incarnation left the view ────▶ CLOSED ◀── from anywhere

A new incarnation on an old node id is another link; the old one is closed and everything known of
the node is forgotten first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.config import DispatcherConfig
from gateway.events import KvEventFollower
from gateway.prefix_index import PrefixIndex
from kvstore.events import EventCounters
from transfer.channel import Channel, Hello, Network
from transfer.errors import TransferError
from transfer.identity import Identity, NodeId, Role
from transfer.interface import deadline_after
from transfer.membership import Member, MembershipView

logger = logging.getLogger(__name__)

LINKED_ROLES = (Role.PREFILL, Role.DECODE)


class Link:
    """The channel to one node incarnation; ``channel`` is None while it is not open."""

    def __init__(
        self,
        member: Member,
        *,
        identity: Identity,
        network: Network,
        index: PrefixIndex,
        counters: EventCounters,
        config: DispatcherConfig,
        on_change: Callable[[], None],
    ) -> None:
        self.member = member
        self.last_error = ""
        self.num_connects = 0
        self._identity = identity
        self._network = network
        self._index = index
        self._counters = counters
        self._config = config
        self._on_change = on_change
        self._channel: Channel | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"link {self.name}")

    @property
    def name(self) -> NodeId:
        return self.member.node_id

    @property
    def role(self) -> Role:
        return self.member.info.identity.role

    @property
    def channel(self) -> Channel | None:
        channel = self._channel
        return None if channel is None or channel.closed else channel

    @property
    def connecting_first(self) -> bool:
        """True until the first attempt to connect has ended."""
        return self.num_connects == 0 and not self.last_error

    @property
    def alive(self) -> bool:
        """False when the task of this link ended though nobody closed it."""
        return not self._task.done()

    def stop(self) -> None:
        """Do nothing more; ``close`` waits for it."""
        self._task.cancel()

    async def close(self) -> None:
        """Close the channel and stop; idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def abort(self) -> None:
        self._task.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()

    async def _run(self) -> None:
        pause_s = self._config.reconnect_min_s
        while True:
            try:
                self._channel = await self._connect()
                self.num_connects += 1
                self.last_error = ""
                self._on_change()
                pause_s = self._config.reconnect_min_s
                await self._follow(self._channel)
            except TransferError as error:
                self.last_error = f"{type(error).__name__}: {error}"
                logger.info("link to %s: %s; again in %.2f s", self.name, self.last_error, pause_s)
            self._drop_channel()
            self._on_change()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._config.reconnect_max_s)

    async def _follow(self, channel: Channel) -> None:
        """Keep the index in step with the node until the channel closes; then raise."""
        follower = KvEventFollower(
            channel,
            self._network,
            self.member.info.labels,
            index=self._index,
            counters=self._counters,
            watch_s=self._config.watch_s,
        )
        await follower.run()

    async def _connect(self) -> Channel:
        hello = Hello(identity=self._identity, contract=self.member.info.contract)
        deadline_s = deadline_after(self._config.connect_timeout_s)
        address = self.member.info.address
        channel = await self._network.connect(address, hello, deadline_s=deadline_s)
        if channel.peer != self.member.info.identity:
            channel.abort()
            raise TransferError(
                f"{address} answers as {channel.peer.node_id} {channel.peer.incarnation}, "
                f"expected {self.name} {self.member.info.identity.incarnation}"
            )
        return channel

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()
        self._index.unsync(self.name)


class Links:
    """All links; follows the membership view."""

    def __init__(
        self,
        *,
        identity: Identity,
        network: Network,
        index: PrefixIndex,
        config: DispatcherConfig,
        on_change: Callable[[], None],
        on_gone: Callable[[Role, NodeId], None],
    ) -> None:
        self._identity = identity
        self._network = network
        self._index = index
        self._config = config
        self._on_change = on_change
        self._on_gone = on_gone
        self.event_counters = EventCounters()
        self._links: dict[NodeId, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def follow(self, view: MembershipView) -> None:
        """Open links to new incarnations, close those that left; synchronous."""
        if self._closed:
            return
        wanted = {m.node_id: m for m in view.members if m.info.identity.role in LINKED_ROLES}
        for node_id, link in list(self._links.items()):
            member = wanted.get(node_id)
            if member is None or member.info.identity != link.member.info.identity:
                self._remove(node_id)
            else:
                link.member = member
        for node_id, member in wanted.items():
            if node_id not in self._links:
                self._links[node_id] = Link(
                    member,
                    identity=self._identity,
                    network=self._network,
                    index=self._index,
                    counters=self.event_counters,
                    config=self._config,
                    on_change=self._on_change,
                )
        self._on_change()

    def of_role(self, role: Role) -> list[Link]:
        """All links to nodes of ``role``, by node id."""
        return [self._links[n] for n in sorted(self._links) if self._links[n].role is role]

    def usable(self, role: Role) -> list[Link]:
        """Open links to nodes that take new work."""
        return [
            link
            for link in self.of_role(role)
            if link.channel is not None and not link.member.status.draining
        ]

    @property
    def alive(self) -> bool:
        return all(link.alive for link in self._links.values())

    async def close(self) -> None:
        self._closed = True
        for node_id in list(self._links):
            self._remove(node_id)
        if self._closing:
            await asyncio.wait(set(self._closing))

    def abort(self) -> None:
        self._closed = True
        for link in self._links.values():
            link.abort()
        self._links.clear()

    def _remove(self, node_id: NodeId) -> None:
        link = self._links.pop(node_id)
        link.stop()  # before the index forgets the node: nothing brings it back
        self._index.remove(node_id)
        self._on_gone(link.role, node_id)
        task = asyncio.get_running_loop().create_task(link.close(), name=f"close {node_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
