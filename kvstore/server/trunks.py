"""Who has children: one record per parent key, whether that page is here or not.

Owns the parent keys of all indexed pages, how many children each has, and the row of the parent
when it is in this directory too. A page refers to its parent by *trunk* number, so that a parent
may come, go and come back under any number of children at constant cost. On a node of a large
cluster most parents are elsewhere: they cost a trunk and nothing more.

The children of a trunk are all of one depth, and its page is one above: so no page is its own
ancestor, whatever clients say. Children that claim another depth under the same key are *strays*:
a trunk of their own, which nobody finds and which never has a page.
"""

from __future__ import annotations

from typing import Any

from kvstore.server.columns import NULL_ROW, Columns, RowPool
from kvstore.server.key_index import KeyIndex


class Trunks:
    """See the module's docstring. Trunk 0 is none. ``seed``: of the index."""

    def __init__(self, seed: bytes = b"") -> None:
        self._columns = Columns(
            page="i4",
            depth="u4",
            stray="u1",
            num_children="i4",
            num_resident="i4",
            num_staying="i4",
        )
        self._index = KeyIndex(seed)
        self._pool = RowPool()
        self._num_strays = 0
        self._fetch()

    def __len__(self) -> int:
        return len(self._pool)

    def _fetch(self) -> None:
        view = self._columns.view
        self.page: Any = view("page")  # row of the parent, or NULL_ROW
        self.depth: Any = view("depth")  # of the children
        self.stray: Any = view("stray")
        self.num_children: Any = view("num_children")
        self.num_resident: Any = view("num_resident")  # those of them with a slot in memory
        self.num_staying: Any = view("num_staying")  # those again that are not in line to go

    def reserve(self, num: int) -> None:
        """Make room for ``num`` trunks ahead."""
        if num >= self._columns.num_rows:
            self._columns.grow(num + 1, self._pool.end)
            self._index.grow(num + 1, self._pool.end)
            self._fetch()

    def prime(self, hashes: dict[bytes, int]) -> None:
        """See ``KeyIndex.primed``."""
        self._index.primed = hashes

    def find(self, key: bytes, depth: int) -> int:
        """The trunk of the children of ``key``, if their depth is this one; else 0."""
        trunk = self._index.find(key)
        return trunk if trunk and self.depth[trunk] == depth else 0

    def key(self, trunk: int) -> bytes:
        return self._index.key(trunk)

    def join(self, key: bytes, page: int, depth: int) -> int:
        """One more child of ``key``, of this depth; ``page`` is the row of ``key`` if it is here,
        one above."""
        trunk, stray = self._index.find(key), False
        if trunk and self.depth[trunk] != depth:
            stray = not page
            if page:  # the children of the page that is here are no strays
                self._index.remove(trunk)
                self.stray[trunk] = True
            self._num_strays += 1
            trunk = 0
        if not trunk:
            trunk = self._pool.take()
            if trunk >= self._columns.num_rows:
                self.reserve(2 * self._columns.num_rows)
            if stray:
                self._index.note(trunk, key)
                self.stray[trunk] = True
            else:
                self._index.insert(trunk, key)
            self.page[trunk], self.depth[trunk] = page, depth
            self.num_children[trunk] = self.num_resident[trunk] = self.num_staying[trunk] = 0
        self.num_children[trunk] += 1
        return trunk

    def leave(self, trunk: int) -> bool:
        """One child less; True when it was the last and the trunk is gone."""
        self.num_children[trunk] -= 1
        if self.num_children[trunk]:
            return False
        assert self.num_resident[trunk] == self.num_staying[trunk] == 0, trunk
        if self.stray[trunk]:
            self.stray[trunk] = False
            self._num_strays -= 1
        else:
            self._index.remove(trunk)
        self.page[trunk] = NULL_ROW
        self._pool.give_back(trunk)
        return True

    def check(self) -> None:
        self._index.check()
        assert len(self._index) + self._num_strays == len(self._pool)
