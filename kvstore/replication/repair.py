"""Brings every page of this node to where it belongs, after the store nodes have changed.

Owns one task. Each pass walks over the node's pages in small steps, asks the nodes that should hold
them what they lack (packed, thousands of keys a message), and queues that; a page that does not
belong here goes cold once everybody who should hold it does::

    nodes change ──▶ compare ──▶ queue what is missing ──▶ all arrived ──▶ settled ──▶ cool surplus
         ▲             │ ▲                                     │
         └─────────────┘ └── somebody did not answer, or the queue was full
          anew, from the last settled nodes

Never in a hurry: a step costs the loop less than a millisecond, and nothing is added while the
queue is more than half full.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from kvstore.client.link import check_count
from kvstore.messages import MatchPages, PagesMatched, pack_keys, states_of
from kvstore.page import PageKey
from kvstore.replication.copy_queue import CopyQueue
from kvstore.replication.duties import Duties
from kvstore.replication.holdings import OwnNode, now_s
from kvstore.replication.sending import CopySender
from transfer.errors import TransferError
from transfer.identity import NodeId

SCAN_STEP = 256  # pages looked at without letting others run
ASK_KEYS = 4096  # pages compared by one message
ASK_TIMEOUT_S = 2.0
AGAIN_S, AGAIN_S_MAX = 1.0, 30.0  # pause before what could not be compared is compared again


class Repair:
    """See the module's docstring.

    Attributes:
        last_s: how long the last repair took, from the change of nodes until all was in place.
    """

    def __init__(
        self,
        own: OwnNode,
        duties: Duties,
        queue: CopyQueue,
        senders: Mapping[NodeId, CopySender],
        counters: Counter[str],
    ) -> None:
        self.last_s = 0.0
        self._own = own
        self._duties = duties
        self._queue = queue
        self._senders = senders
        self._counters = counters
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._unsettled = False
        self._full = False  # something was left out: compare all pages, not only changed ones

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def healthy(self) -> bool:
        """The task has not ended by an error of ours."""
        task = self._task
        return task is None or not task.done() or task.cancelled() or task.exception() is None

    def start(self) -> None:
        """The nodes have changed: begin, or begin anew."""
        self._full = self._full or bool(self._queue.lacking)
        self._restart()

    def start_anew(self) -> None:
        """Pages have come that no repair has seen: compare everything."""
        self._full = True
        self._restart()

    def complete(self) -> None:
        """Something was left out of the queue: compare everything, unless that is under way."""
        if not self.running:
            self._full = True
            self._restart()

    def _restart(self) -> None:
        self.abort()
        if not self._unsettled:
            self._unsettled, self._started_s = True, now_s()
        name = f"{self._own.identity.node_id} repair"
        self._task = asyncio.create_task(self._run(), name=name)

    def progress(self) -> None:
        """Copies have arrived or were given up."""
        self._progress.set()
        if self._queue.lacking:
            self.complete()

    async def done(self) -> None:
        """Return when everything is where it belongs."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    # ---- one repair

    async def _run(self) -> None:
        pause_s = AGAIN_S
        while True:
            self._queue.lacking.clear()
            surplus = await self._compare(changed_only=not self._full)
            while len(self._queue):
                await self._made_progress()
            if not self._queue.lacking:
                break
            self._full = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S_MAX)
        self._duties.settle()
        self._unsettled = self._full = False
        self.last_s = now_s() - self._started_s
        self._counters["repairs"] += 1
        if surplus:
            await self._cool()

    async def _made_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def _compare(self, *, changed_only: bool) -> bool:
        """Queue what others lack; True when some pages do not belong here."""
        cursor: int | None = 0
        surplus = False
        asks: dict[NodeId, list[PageKey]] = {}
        while cursor is not None:
            keys, cursor = self._own.holdings.scan(cursor, SCAN_STEP)
            owed = self._duties.owed(keys, changed_only=changed_only)
            surplus = surplus or bool(owed.surplus)
            for node_id, some in owed.to.items():
                asks.setdefault(node_id, []).extend(some)
            full = [n for n, some in asks.items() if cursor is None or len(some) >= ASK_KEYS]
            await asyncio.gather(*(self._compare_with(n, asks.pop(n)) for n in full))
            while self._queue.crowded:
                await self._made_progress()
            await asyncio.sleep(0)
        return surplus

    async def _compare_with(self, node_id: NodeId, keys: list[PageKey]) -> None:
        present = await self._ask(node_id, keys)
        missing = [key for key in keys if key not in present]
        sender = self._senders.get(node_id)
        if sender is not None and missing:
            self._queue.add(node_id, missing, fresh=False)
            sender.wake()

    async def _ask(self, node_id: NodeId, keys: Sequence[PageKey]) -> dict[PageKey, None]:
        """Those of ``keys`` that the node holds; on a failure all of them, and it is lacking."""
        sender = self._senders.get(node_id)
        if sender is None:  # it has left: the repair begins anew
            return dict.fromkeys(keys)
        message = MatchPages(pack_keys(keys), touch=False)
        try:
            deadline_s = now_s() + ASK_TIMEOUT_S
            reply = await sender.link.call(message, PagesMatched, deadline_s=deadline_s)
            check_count(reply.codes, len(keys))
            states = states_of(reply.codes)
        except (TransferError, IndexError):
            self._queue.lacking[node_id] = None
            self._counters["compares_failed"] += 1
            return dict.fromkeys(keys)
        self._counters["compared"] += len(keys)
        return {key: None for key, state in zip(keys, states, strict=True) if state.present}

    async def _cool(self) -> None:
        """Let pages go that all those hold who should."""
        cursor: int | None = 0
        while cursor is not None:
            keys, cursor = self._own.holdings.scan(cursor, SCAN_STEP)
            surplus = dict.fromkeys(self._duties.owed(keys).surplus)
            owed = self._duties.owed(list(surplus))
            for node_id, some in owed.to.items():
                present = await self._ask(node_id, some)
                for key in some:
                    if key not in present or node_id in self._queue.lacking:
                        surplus.pop(key, None)
            self._counters["surplus_cooled"] += self._own.holdings.cool(list(surplus))
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.abort()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
