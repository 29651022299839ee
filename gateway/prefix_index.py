"""Which node holds which pages, as far as the gateway knows.

Owns the map node → held page keys, fed by KV events (``kvstore/events``), plus the pages that are
*expected* on a node because a prefill of them was dispatched there. Sans-I/O; knows no scores, no
channels and no sequence numbers: ``KvEventConsumer`` sees to it that events arrive in order.

::

            replace (a snapshot)              apply (events)
    absent ──────────────────────▶ in sync ◀────────────────┐
       ▲                             │  └───────────────────┘
       └──── unsync: entries dropped ┘

Invariants: the number of held entries never exceeds ``pages_max`` (the oldest of the largest node
go first); a removed node leaves nothing behind; recency is stamped so that a page of a prompt is
never older than the pages after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.events import AllPagesCleared, KvEvent, PagesStored
from kvstore.page import PageKey
from transfer.identity import NodeId


class _Held:
    """Keys of one node, oldest first."""

    __slots__ = ("expected", "in_sync", "keys")

    def __init__(self) -> None:
        self.keys: dict[PageKey, None] = {}
        self.expected: dict[PageKey, int] = {}
        self.in_sync = False


class PrefixIndex:
    """Approximate content of the local caches of all nodes, bounded."""

    def __init__(self, pages_max: int) -> None:
        assert pages_max >= 1
        self._pages_max = pages_max
        self._nodes: dict[NodeId, _Held] = {}
        self._num_entries = 0
        self.num_evicted = 0

    @property
    def num_entries(self) -> int:
        """Held entries over all nodes (a page held by two nodes counts twice)."""
        return self._num_entries

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def num_pages(self, node: NodeId) -> int:
        held = self._nodes.get(node)
        return len(held.keys) if held else 0

    def num_expected(self, node: NodeId) -> int:
        held = self._nodes.get(node)
        return len(held.expected) if held else 0

    def in_sync(self, node: NodeId) -> bool:
        """Events of ``node`` are being applied."""
        held = self._nodes.get(node)
        return held is not None and held.in_sync

    def replace(self, node: NodeId, keys: Sequence[PageKey]) -> None:
        """``node`` holds exactly ``keys``."""
        held = self._nodes.setdefault(node, _Held())
        self._drop_keys(held)
        held.in_sync = True
        self._apply_event(held, PagesStored(keys))
        self._enforce_cap()

    def apply(self, node: NodeId, events: Sequence[KvEvent]) -> None:
        """Apply what happened on ``node``; does nothing unless it is in sync."""
        held = self._nodes.get(node)
        if held is None or not held.in_sync:
            return
        for event in events:
            self._apply_event(held, event)
        self._enforce_cap()

    def unsync(self, node: NodeId) -> None:
        """Drop what ``node`` was said to hold, until the next ``replace``."""
        held = self._nodes.get(node)
        if held is not None:
            self._drop_keys(held)
            held.in_sync = False

    def remove(self, node: NodeId) -> None:
        """Forget ``node`` altogether."""
        held = self._nodes.pop(node, None)
        if held is not None:
            self._num_entries -= len(held.keys)

    def expect(self, node: NodeId, keys: Sequence[PageKey]) -> None:
        """These pages are being computed on ``node``. Undone by ``unexpect``, exactly once."""
        expected = self._nodes.setdefault(node, _Held()).expected
        for key in keys:
            expected[key] = expected.get(key, 0) + 1

    def unexpect(self, node: NodeId, keys: Sequence[PageKey]) -> None:
        """End an ``expect``; does nothing for a node that was removed meanwhile."""
        held = self._nodes.get(node)
        if held is None:
            return
        for key in keys:
            count = held.expected.get(key, 0)
            if count > 1:
                held.expected[key] = count - 1
            else:
                held.expected.pop(key, None)

    def match(self, node: NodeId, keys: Sequence[PageKey]) -> int:
        """Return how many leading pages of ``keys`` the node holds or is computing."""
        held = self._nodes.get(node)
        if held is None:
            return 0
        for position, key in enumerate(keys):
            if key not in held.keys and key not in held.expected:
                return position
        return len(keys)

    def touch(self, node: NodeId, keys: Sequence[PageKey]) -> None:
        """Mark ``keys`` as used now; the first of them ends up the most recent."""
        held = self._nodes.get(node)
        if held is None:
            return
        for key in reversed(keys):
            if key in held.keys:
                del held.keys[key]
                held.keys[key] = None

    def _apply_event(self, held: _Held, event: KvEvent) -> None:
        if isinstance(event, AllPagesCleared):
            self._drop_keys(held)
        elif isinstance(event, PagesStored):
            for key in reversed(event.keys):
                if held.keys.pop(key, held) is held:
                    self._num_entries += 1
                held.keys[key] = None
        else:
            for key in event.keys:
                if held.keys.pop(key, held) is None:
                    self._num_entries -= 1

    def _drop_keys(self, held: _Held) -> None:
        self._num_entries -= len(held.keys)
        held.keys = {}

    def _enforce_cap(self) -> None:
        while self._num_entries > self._pages_max:
            largest = max(self._nodes.values(), key=lambda held: len(held.keys))
            # One pass frees all that this node has above the others' fair share of the excess.
            excess = self._num_entries - self._pages_max
            fair = self._pages_max // len(self._nodes)
            count = max(1, min(excess, len(largest.keys) - fair))
            for key in list(islice(largest.keys, count)):
                del largest.keys[key]
            self._num_entries -= count
            self.num_evicted += count
