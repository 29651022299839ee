"""What a node's local cache tells others: a numbered stream of events, and answers when asked.

Owns the wire structs (events are named after vLLM's ``BlockStored``/``BlockRemoved``/
``AllBlocksCleared``) and ``KvEventLog``, the sans-I/O publisher side. A subscriber first receives a
snapshot, then batches whose ``seq`` rises by one; a gap means: subscribe again. Prefill and decode
nodes speak the same words: whoever asks need not know which kind of node answers.

The log is bounded. A subscriber that stalls loses batches (counted), never slows the node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from kvstore.page import PageKey

BATCHES_MAX = 4096  # batches kept for subscribers that lag


class PagesStored(msgspec.Struct, frozen=True, tag="stored"):
    """These pages are in the local cache now."""

    keys: tuple[PageKey, ...]


class PagesRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """These pages left the local cache."""

    keys: tuple[PageKey, ...]


class AllPagesCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The local cache is empty now."""


KvEvent = PagesStored | PagesRemoved | AllPagesCleared


class KvEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one step. The first batch of a subscription is ``snapshot=True``: it replaces all
    that the subscriber knew of this node."""

    seq: int
    events: tuple[KvEvent, ...]
    snapshot: bool = False


class WatchKvEvents(msgspec.Struct, frozen=True, tag="watch_kv_events"):
    """Stream request: answered with ``KvEventBatch`` items without end."""


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Forget the local cache. Pages of running requests stay theirs. Reply: ``CacheCleared``."""


class CacheCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cache_cleared"):
    num_pages: int


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Reply: ``StatsReply``."""


class StatsReply(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counters (only ever rise) and gauges of one node, by name."""

    counters: dict[str, float]
    gauges: dict[str, float]
    healthy: bool


class KvEventLog:
    """Publisher side: the held keys, and the last batches."""

    def __init__(self) -> None:
        self._held: dict[PageKey, None] = {}
        self._batches: deque[KvEventBatch] = deque(maxlen=BATCHES_MAX)
        self._seq = 0

    @property
    def seq(self) -> int:
        """Sequence number of the last batch."""
        return self._seq

    @property
    def num_held(self) -> int:
        return len(self._held)

    def record(self, stored: Iterable[PageKey] = (), removed: Iterable[PageKey] = ()) -> None:
        """Append one batch for the keys that really changed; no change, no batch."""
        gone = tuple(key for key in removed if self._held.pop(key, self) is None)
        new = tuple(key for key in dict.fromkeys(stored) if key not in self._held)
        self._held.update(dict.fromkeys(new))
        events: list[KvEvent] = []
        if gone:
            events.append(PagesRemoved(gone))
        if new:
            events.append(PagesStored(new))
        self._append(events)

    def clear(self) -> None:
        """Append a batch that says the cache is empty."""
        self._held.clear()
        self._append([AllPagesCleared()])

    def _append(self, events: list[KvEvent]) -> None:
        if events:
            self._seq += 1
            self._batches.append(KvEventBatch(seq=self._seq, events=tuple(events)))

    def snapshot(self) -> KvEventBatch:
        """Return all held keys as one batch at the present sequence number."""
        events = (PagesStored(tuple(self._held)),) if self._held else ()
        return KvEventBatch(seq=self._seq, events=events, snapshot=True)

    def since(self, seq: int) -> list[KvEventBatch] | None:
        """Return the batches after ``seq``; None when some of them are gone (send a snapshot)."""
        if seq == self._seq:
            return []
        if seq > self._seq or not self._batches or self._batches[0].seq > seq + 1:
            return None
        return [batch for batch in self._batches if batch.seq > seq]
