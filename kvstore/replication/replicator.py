"""The replicator of one store node: everything by which its pages come to lie on other nodes.

Owns the assembly of the cores (``Duties``, ``CopyQueue``, ``HotPages``) and the shells (one
``CopySender`` per other node, ``CopyReceiver``, ``Repair``), and follows the membership. Knows no
directory, no segment: its own node answers it as it answers clients (``OwnNode``).

::

    committed ──▶ Duties: who else? ──▶ CopyQueue ──▶ CopySender ──TakeCopies──▶ CopyReceiver
    view changed ──▶ Repair ──what do you lack?──▶ ▲
    read often ──▶ HotPages ──more nodes───────────┤
    read here, others asked before ──▶ Mending ────┘
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from kvstore.client.background import Background
from kvstore.client.link import StoreLink
from kvstore.config import (
    PAGES_PER_MESSAGE_MAX,
    WAIT_S_MAX,
    WATCHES_MAX,
    StoreClientConfig,
    StoreConfig,
)
from kvstore.messages import StoreDone
from kvstore.page import PageKey
from kvstore.placement import Placement, weight_of
from kvstore.replication.copy_queue import CopyQueue
from kvstore.replication.departures import Departures, WatchedLink
from kvstore.replication.duties import Duties, Nodes
from kvstore.replication.heat import HotPages
from kvstore.replication.holdings import OwnNode, now_s
from kvstore.replication.mending import Mending
from kvstore.replication.messages import (
    AnnounceDrain,
    AwaitCopies,
    CopiesAwaited,
    CopiesTaken,
    SendCopies,
    TakeCopies,
)
from kvstore.replication.receiving import CopyReceiver
from kvstore.replication.repair import Repair
from kvstore.replication.sending import CopySender
from transfer.channel import Caller, Hello, Network, Service
from transfer.errors import RemoteFailed, TransferError
from transfer.identity import Identity, NodeId, Role
from transfer.interface import Transfer
from transfer.membership import Member, MembershipView

REPLY_MARGIN_S = 0.05  # an answer leaves this much before its caller would give up
SPREAD_MAX = 255  # nodes that a hot page may be told to lie on: one byte
ANNOUNCE_TIMEOUT_S = 1.0  # what a drain waits for others to hear of it
LINK_CONFIG = StoreClientConfig()
SHOWN = (  # counters that are there before they have counted anything
    "copies_taken",
    "copies_present",
    "copies_refused",
    "copies_later",
    "copies_torn",
    "copies_broken",
    "copies_cleared",
    "copies_given_up",
    "copies_overflowed",
    "copies_mended",
    "copy_tasks_failed",
    "copies_received",
    "copied_nbytes",
    "compared",
    "repairs",
    "surplus_cooled",
)


class Replicator:
    """See the module's docstring. Make it inside a running loop.

    Args:
        own: the node that it belongs to.
        network, transfer: the node's.
    """

    def __init__(
        self, config: StoreConfig, own: OwnNode, *, network: Network, transfer: Transfer
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._own = own
        self._network = network
        self._replicas = config.replicas
        self._duties = Duties(own.identity.node_id, config.replicas)
        self._queue = CopyQueue()
        self._senders: dict[NodeId, CopySender] = {}
        self._leaving: list[asyncio.Task[None]] = []
        self._background = Background()
        self._arriving: dict[PageKey, None] = {}
        self._repair = Repair(own, self._duties, self._queue, self._senders, self.counters)
        self._receiver = CopyReceiver(own, transfer, self.counters, self._arriving)
        self._hot = None if config.hot_reads is None else HotPages(config.hot_reads, self._replicas)
        name = f"{own.identity.node_id} mending"
        self._mending = Mending(self._duties, self._queue, self._senders, self.counters, name)
        self._departures = Departures(self._others_departed)
        self._view = MembershipView()
        self._draining = False
        self._closed = False

    def add_to(self, service: Service) -> None:
        service.on(TakeCopies, self._take)
        service.on(AwaitCopies, self._await)
        service.on(SendCopies, self._send)
        service.on(AnnounceDrain, self._hear)

    # ---- what happens to the node

    def follow(self, view: MembershipView) -> None:
        """Take over a new view; a view without this node is of a moment that will pass."""
        self._view = view
        own_id = self._own.identity.node_id
        if self._closed or (view.get(own_id) is None and not self._draining):
            return
        members = [m for m in view.with_role(Role.STORE) if self._may_take(m)]
        here = [m for m in view.with_role(Role.STORE) if m.node_id == own_id]
        lasting = members if self._draining else [*members, *here]
        nodes = Nodes(
            Placement([(m.node_id, weight_of(m)) for m in lasting]),
            {m.node_id: str(m.info.identity.incarnation) for m in lasting},
        )
        if not self._duties.follow(nodes):
            return
        self._reach(members)
        if self._hot is not None:
            self._hot.clear()
        self._repair.start()

    def _may_take(self, member: Member) -> bool:
        """Another node that pages can be owed to. What others say of themselves matters to a node
        that drains; else the view will say it to all, and all place pages alike."""
        identity = member.info.identity
        if identity.node_id == self._own.identity.node_id:
            return False
        return not (self._draining and self._departures.has_departed(identity))

    def _others_departed(self) -> None:
        """Look again at whom pages go to; later, as the link that told of it is in use."""
        if self._draining:
            asyncio.get_running_loop().call_soon(lambda: self.follow(self._view))

    def _reach(self, members: Sequence[Member]) -> None:
        """Have a sender for each other node, and owe nothing to those that are gone."""
        infos = {m.node_id: m.info for m in members}
        gone = [s for s in self._senders.values() if infos.get(s.node_id) != s.link.info]
        for sender in gone:
            del self._senders[sender.node_id]
            sender.abort()
            self._leave(sender)
        for node_id, info in infos.items():
            if node_id not in self._senders:
                link = WatchedLink(
                    info,
                    self._departures,
                    network=self._network,
                    hello=Hello(identity=self._own.identity),
                    config=LINK_CONFIG,
                    counters=self.counters,
                )
                self._senders[node_id] = CopySender(
                    link, self._own, self._queue, self.counters, self._repair.progress, self._park
                )
        for sender in gone:
            self._hand_over(sender.node_id)
        self._repair.progress()

    def _hand_over(self, node_id: NodeId) -> None:
        """A node is gone: whom its copies were awaited from, waits for its successors."""
        covered: dict[PageKey, None] = {}
        if node_id not in self._senders:  # else it is back already, as another process
            fresh = self._queue.fresh_keys(node_id)
            for other, some in self._duties.owed(fresh).to.items():
                covered.update(dict.fromkeys(some))
                self._queue.add(other, some, fresh=True)
                self._senders[other].wake()
        self._queue.forget(node_id, covered)

    def _leave(self, sender: CopySender) -> None:
        """Own the end of a sender's tasks."""
        name = f"{self._own.identity.node_id} leaves {sender.node_id}"
        self._leaving = [task for task in self._leaving if not task.done()]
        self._leaving.append(asyncio.create_task(sender.close(), name=name))

    def renew(self, identity: Identity) -> None:
        """The node is another incarnation now; its pages are the same."""
        self._own.identity = identity

    def committed(self, keys: Sequence[PageKey]) -> None:
        """Pages have become visible here; those that a writer brought are copied on."""
        fresh = [key for key in keys if key not in self._arriving]
        if self._duties.others:
            self._own.put_times.note(fresh, now_s())
        self._owe(fresh, num_nodes=None, fresh=True)

    def _owe(self, keys: Sequence[PageKey], *, num_nodes: int | None, fresh: bool) -> None:
        if self._closed or not self._duties.others:
            return
        covered = self._substitute(keys, self._queue.parked()) if fresh else {}
        for node_id, some in self._duties.owed(keys, num_nodes=num_nodes).to.items():
            self._queue.add(node_id, some, fresh=fresh, covered=covered)
            self._senders[node_id].wake()
        if self._queue.lacking:
            self._repair.complete()

    def _substitute(self, keys: Sequence[PageKey], down: list[NodeId]) -> dict[PageKey, None]:
        """Owe fresh pages of nodes that do not answer to the next in rank; returns which."""
        covered: dict[PageKey, None] = {}
        if down:
            for node_id, some in self._duties.substitutes(keys, down).items():
                self.counters["copies_substituted"] += len(some)
                covered.update(dict.fromkeys(some))
                self._queue.add(node_id, some, fresh=True)
                self._senders[node_id].wake()
        return covered

    def _park(self, node_id: NodeId) -> None:
        """A node does not answer: whom its copies were awaited from, waits for the next in rank."""
        down = [*self._queue.parked(), node_id]
        fresh = self._queue.fresh_keys(node_id)
        self._queue.park(node_id, self._substitute(fresh, down))

    def dropped(self, keys: Sequence[PageKey]) -> None:
        """Pages turned out to be damaged here: get them back from those who hold them, too."""
        if self._closed or not keys:
            return
        for node_id, some in self._duties.owed(keys).to.items():
            work = self._ask_for(self._senders[node_id].link, some)
            self._background.spawn(work, f"{self._own.identity.node_id} asks {node_id}")

    async def _ask_for(self, link: StoreLink, keys: Sequence[PageKey]) -> None:
        deadline_s = now_s() + LINK_CONFIG.op_timeout_s
        try:
            await link.call(SendCopies(keys=tuple(keys)), StoreDone, deadline_s=deadline_s)
        except TransferError:
            self.counters["copies_unasked"] += 1  # the next repair will see to it

    def spread(self, keys: Sequence[PageKey]) -> bytes:
        """Pages are being read: count that; returns how many nodes hold each (``HotPages``)."""
        if self._closed or not keys or not self._senders:
            return b""
        self._mending.note(keys)
        if self._hot is None:
            return b""
        num_nodes_max = min(len(self._duties.nodes.placement), SPREAD_MAX)
        for key, num_nodes in self._hot.note(keys, num_nodes_max, now_s()):
            self.counters["pages_heated"] += 1
            self._owe([key], num_nodes=num_nodes, fresh=False)
            self._tell_when_spread(key)
        return self._hot.num_nodes(keys)

    def _tell_when_spread(self, key: PageKey) -> None:
        hot = self._hot
        assert hot is not None
        if not self._queue.wait([key], lambda: hot.spread(key)).num_left:
            hot.spread(key)

    # ---- what others ask

    async def _take(self, message: TakeCopies, caller: Caller) -> CopiesTaken:
        return await self._receiver.take(message, caller)

    async def _send(self, message: SendCopies, caller: Caller) -> StoreDone:
        sender = self._senders.get(caller.peer.node_id)
        here = [key for key in message.keys if self._own.holdings.kept_as(key) is not None]
        if sender is None or len(here) > PAGES_PER_MESSAGE_MAX:
            raise RemoteFailed("stranger", f"{caller.peer.node_id} is no store node of this view")
        self._queue.add(sender.node_id, here, fresh=False)
        sender.wake()
        return StoreDone(len(here))

    async def _hear(self, message: AnnounceDrain, caller: Caller) -> StoreDone:
        self._departures.note_parting(caller.peer)
        return StoreDone(0)

    async def _await(self, message: AwaitCopies, caller: Caller) -> CopiesAwaited:
        num_keys = len(message.keys)
        if num_keys > PAGES_PER_MESSAGE_MAX or self._queue.num_waits + num_keys > WATCHES_MAX:
            raise RemoteFailed("busy", f"{self._queue.num_waits} pages are waited for already")
        settled = asyncio.Event()
        wait = self._queue.wait(message.keys, settled.set)
        if wait.num_left:
            wait_s = min(message.wait_s, WAIT_S_MAX) if message.wait_s > 0 else 0.0
            until_s = min(now_s() + wait_s, caller.deadline_s - REPLY_MARGIN_S)
            try:
                async with asyncio.timeout_at(until_s):
                    await settled.wait()
            except TimeoutError:
                self.counters["copies_late"] += 1
            finally:
                self._queue.stop_waiting(wait)
        return CopiesAwaited(bytes(key not in wait.unmade for key in message.keys))

    # ---- its life

    async def migrate(self) -> None:
        """The node drains: return when all its pages are where they belong without it.

        Nothing is owed to nodes that drain, too, or are gone: at once when there are no others.
        """
        self._departures.count_silence()
        links = [sender.link for sender in self._senders.values()]
        await asyncio.gather(*(self._announce(link) for link in links))
        self._draining = True
        self.follow(self._view)
        await self._repair.done()

    async def _announce(self, link: StoreLink) -> None:
        """Tell one node before this one can be gone: the view may not change any more."""
        deadline_s = now_s() + ANNOUNCE_TIMEOUT_S
        try:
            await link.call(AnnounceDrain(), StoreDone, deadline_s=deadline_s)
        except TransferError:
            self.counters["drains_untold"] += 1  # it finds out by our refusals, or our silence

    def compare_all(self) -> None:
        """Pages have come that nobody has been told of: those of an earlier life."""
        if not self._closed and self._duties.others:
            self._repair.start_anew()

    @property
    def healthy(self) -> bool:
        """Copies are being sent to every node: no task has ended by an error of ours."""
        return all(sender.healthy for sender in self._senders.values()) and self._repair.healthy

    def numbers(self) -> dict[str, float]:
        """Gauges and counters, by name."""
        return {
            "replicas_missing": len(self._queue),
            "repairing": float(self._repair.running),
            "repair_s": self._repair.last_s,
            "hot_pages": 0 if self._hot is None else len(self._hot),
            **dict.fromkeys(SHOWN, 0.0),
            **self._queue.counters,
            **self.counters,
        }

    async def close(self) -> None:
        self.abort()
        await self._repair.close()
        await self._mending.close()
        for sender in self._senders.values():
            await sender.close()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._background.close(0.0)

    def abort(self) -> None:
        """Stop copying at once. Idempotent."""
        self._closed = True
        self._repair.abort()
        self._mending.abort()
        for sender in self._senders.values():
            sender.abort()
        for task in self._leaving:
            task.cancel()
        self._background.abort()

    def check(self) -> None:
        """Assert the invariants of the queue."""
        self._queue.check()
