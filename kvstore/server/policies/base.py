"""What an eviction policy is asked.

Owns the interface, and the part of the order that all policies share. A policy orders pages that
may go; whether a page may go at all, and priorities, leaves and quotas, are the evictor's business.

A policy sees a page come in, be touched and leave, and gives it an *order*: a number that never
falls while the page is a candidate. So the queue may hold an old order and look again when it
matters (``candidates.py``). State per page is one integer, ``PageTable.score``.

What a page inherits: when a child leaves memory, its parent takes over the child's recency, heat
and score where they are higher. Until then the child stands before it. So no page goes before a
descendant that was used later, and a touch costs the same at any depth.
"""

from __future__ import annotations

from kvstore.server.key_index import Rows
from kvstore.server.page_table import PageTable

DEPTH_BITS = 20
_DEPTH_MAX = (1 << DEPTH_BITS) - 1


class EvictionPolicy:
    """Base of all policies; see the module's docstring.

    Attributes:
        num_levels: queues per class of candidates; lower levels go first.
    """

    name = "base"
    num_levels = 1

    def __init__(self, table: PageTable) -> None:
        self._table = table

    def admitted(self, row: int, now: int) -> None:
        """A page came in (reserved, or promoted from the SSD)."""

    def touched(self, row: int, now: int) -> None:
        """A page in memory was used."""

    def touched_many(self, rows: Rows, now: int) -> None:
        """Likewise; a row may occur more than once, which counts as one use."""

    def inherit(self, parent: int, child: int) -> None:
        """``child`` leaves memory before ``parent``."""
        scores = self._table.score
        scores[parent] = max(scores[parent], scores[child])

    def cooled(self, row: int) -> None:
        """Nothing speaks for the page any more."""
        self._table.score[row] = 0

    def left(self, row: int) -> None:
        """A page left memory."""

    def level(self, row: int) -> int:
        """The queue that the page belongs to now."""
        return 0

    def order(self, row: int) -> int:
        """Lower goes first; never falls while the page is a candidate, except by ``demote``."""
        raise NotImplementedError

    def overfull(self, level: int) -> bool:
        """Level ``level`` must hand its lowest candidate down."""
        return False

    def demote(self, row: int, now: int) -> None:
        """Move a candidate of an overfull level one level down."""
        raise NotImplementedError

    def by_recency(self, row: int) -> int:
        """Oldest stamp first; within one request the deepest page, so that a prefix is left."""
        depth: int = min(self._table.depth[row], _DEPTH_MAX)
        stamp: int = self._table.stamp[row]
        return stamp << DEPTH_BITS | _DEPTH_MAX - depth
