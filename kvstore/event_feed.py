"""KV events for subscribers: a snapshot, then numbered batches, without end.

Owns one wake-up flag per subscriber. The log is bounded and each subscriber reads it at its own
pace: one that stalls costs the node nothing, and gets a new snapshot when the log has moved on
without it (counted).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

from kvstore.events import KvEventBatch, KvEventLog, WatchKvEvents
from transfer.channel import Caller
from transfer.errors import RemoteFailed

WATCHERS_MAX = 64


class EventFeed:
    """Serves one log to up to ``WATCHERS_MAX`` subscribers."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._flags: dict[int, asyncio.Event] = {}
        self._serials = count()
        self._notified_seq = log.seq
        self.num_resyncs = 0

    @property
    def num_watchers(self) -> int:
        return len(self._flags)

    def notify(self) -> None:
        """Wake subscribers if the log has grown; never waits for any of them."""
        if self._log.seq != self._notified_seq:
            self._notified_seq = self._log.seq
            for flag in self._flags.values():
                flag.set()

    async def watch(self, message: WatchKvEvents, caller: Caller) -> AsyncIterator[KvEventBatch]:
        """Yield a snapshot, then every batch after it, in order and without gaps."""
        if len(self._flags) >= WATCHERS_MAX:
            raise RemoteFailed("overloaded", f"{WATCHERS_MAX} subscribers watch this node already")
        serial, flag = next(self._serials), asyncio.Event()
        self._flags[serial] = flag
        try:
            snapshot = self._log.snapshot()
            seq = snapshot.seq
            yield snapshot
            while True:
                flag.clear()
                for batch in self._after(seq):
                    seq = batch.seq
                    yield batch
                if seq == self._log.seq:
                    await flag.wait()
        finally:
            del self._flags[serial]

    def _after(self, seq: int) -> list[KvEventBatch]:
        batches = self._log.since(seq)
        if batches is None:
            self.num_resyncs += 1
            return [self._log.snapshot()]
        return batches
