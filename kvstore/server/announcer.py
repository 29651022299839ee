"""From moves in the ledger to KV events: which pages of this node can be read, and from where.

Owns the translation. Only full pages are announced: the format's "block" is one, and nobody routes
by a tail page. Decides nothing, and costs a page's record each time a page comes.

::

    WRITING ──▶ READY      stored in CPU
    READY   ──▶ SPILLED    removed from CPU, stored on DISK     (a copy beside memory is no news)
    SPILLED ──▶ READY      removed from DISK, stored in CPU
    either  ──▶ gone       removed
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.events import KvEventLog, Medium
from kvstore.events.control import SNAPSHOT_PART_KEYS
from kvstore.page import PageKey
from kvstore.server.page_table import DROPPED, READY, SPILLED, PageTable
from kvstore.store import PageRecord

_MEDIA = tuple({READY: Medium.CPU, SPILLED: Medium.DISK}.get(s) for s in range(DROPPED + 1))


class Announcer:
    """Writes the log of one directory."""

    def __init__(self, table: PageTable) -> None:
        self.log = KvEventLog(medium=Medium.CPU, held=self.held)
        self._table = table

    def moving(self, row: int, state: int) -> None:
        """An indexed page is about to be in ``state``."""
        table = self._table
        before, after = _MEDIA[table.state[row]], _MEDIA[state]
        if before is after or table.num_tokens[row] != table.specs[table.spec[row]].page_size:
            return
        key = table.key(row)
        if before is not None:
            self.log.removed_page(key, medium=before)
        if after is not None:
            parent = table.parent_key(row) if table.depth[row] else None
            self.log.stored_page(key, parent=parent, tokens=table.tokens(row), medium=after)

    def found(self, page: PageRecord, page_size: int) -> None:
        """A page of an earlier life has come to be readable from the SSD."""
        if page.num_tokens == page_size:
            parent = PageKey(page.parent) if page.depth else None
            self.log.stored_page(page.key, parent=parent, tokens=page.tokens, medium=Medium.DISK)

    def held(self) -> Iterator[bytes]:
        """Packed keys of all full pages that can be read, a run of rows at a time.

        The pages move between two runs: see ``KvEventLog.snapshot``.
        """
        table = self._table
        start = 0
        while start < table.end_row:
            rows = slice(start, min(table.end_row, start + SNAPSHOT_PART_KEYS))
            states = table.states[rows]
            sizes = np.array([spec.page_size for spec in table.specs] or [0], np.uint16)
            full = table.token_counts[rows] == sizes[table.spec_ids[rows]]
            present = np.flatnonzero(((states == READY) | (states == SPILLED)) & full)
            if len(present):
                yield table.index.packed_keys(present + start)
            start = rows.stop
