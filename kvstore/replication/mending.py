"""Gives pages that are read back to nodes that have evicted them.

Nodes evict on their own, so of R copies of a page one may go before the others. Nothing is done
about a page that nobody reads: it was on its way out. A page that *is* read, here, although readers
ask other nodes before this one, may be missing there: these are asked, and what they lack is owed
to them like any other copy. So what is in use is on R nodes again within seconds, and a page that
nobody wants is not copied to and fro.

Owns the reads noted, bounded, and one task. Knows no pages: what is owed is the ``CopyQueue``'s.
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
from kvstore.replication.holdings import now_s
from kvstore.replication.sending import CopySender
from kvstore.store import PageState
from transfer.errors import TransferError
from transfer.identity import NodeId

NOTED_MAX = 1024  # pages read here since the last look; others are noted when read again
PAUSE_S = 1.0  # between looks
ASK_TIMEOUT_S = 2.0


class Mending:
    """See the module's docstring.

    Args:
        name: of the task.
    """

    def __init__(
        self,
        duties: Duties,
        queue: CopyQueue,
        senders: Mapping[NodeId, CopySender],
        counters: Counter[str],
        name: str,
    ) -> None:
        self._duties = duties
        self._queue = queue
        self._senders = senders
        self._counters = counters
        self._name = name
        self._noted: dict[PageKey, None] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, keys: Sequence[PageKey]) -> None:
        """Pages were read here."""
        if len(self._noted) + len(keys) <= NOTED_MAX:
            self._noted.update(dict.fromkeys(keys))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def _run(self) -> None:
        while self._noted:
            await asyncio.sleep(PAUSE_S)
            noted, self._noted = list(self._noted), {}
            down = self._queue.parked()
            for node_id, keys in self._duties.asked_before(noted).items():
                if node_id in self._senders and node_id not in down and not self._queue.crowded:
                    await self._give_back(self._senders[node_id], keys)

    async def _give_back(self, sender: CopySender, keys: Sequence[PageKey]) -> None:
        message = MatchPages(pack_keys(keys), touch=False)
        try:
            deadline_s = now_s() + ASK_TIMEOUT_S
            reply = await sender.link.call(message, PagesMatched, deadline_s=deadline_s)
            check_count(reply.codes, len(keys))
            states = states_of(reply.codes)
        except (TransferError, IndexError):
            return  # whoever reads next asks again
        here = zip(keys, states, strict=True)
        missing = [key for key, state in here if state is PageState.ABSENT]
        if missing and self._senders.get(sender.node_id) is sender:
            self._counters["copies_mended"] += len(missing)
            self._queue.add(sender.node_id, missing, fresh=False)
            sender.wake()

    async def close(self) -> None:
        self.abort()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
