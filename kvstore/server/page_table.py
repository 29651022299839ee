"""The page records of one store node, in columns.

Owns what the node knows of each page: identity, checksum, geometry, where its bytes lie, recency
and heat; about 250 bytes for a page of 16 tokens, and no object. Also the index by key and the
links from children to parents (``Trunks``). Decides nothing: the ledger moves rows between states.

::

    row     state     key   tokens  checksum  offset  generation  stamp  heat  ...
     0    (null row)
     1     READY      ...                                            indexed: found by key
     2     WRITING    ...
     3     DROPPED    ...   not indexed any more; the slot is owed to a reader
     4     (free)

The codes of the indexed states are those of the wire (``messages.STATES``): a match is a gather.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.checksum import CHECKSUM_NBYTES
from kvstore.messages import STATES
from kvstore.page import PageKey, PageSpec
from kvstore.server.columns import NULL_ROW, Columns, RowPool
from kvstore.server.key_index import KeyIndex, Rows
from kvstore.server.names import Names
from kvstore.server.token_store import TokenStore
from kvstore.server.trunks import Trunks
from kvstore.store import PageIdentity, PageRecord, PageState

ABSENT, WRITING, READY, SPILLED = (STATES.index(state) for state in PageState)
FENCED, DROPPED = len(STATES), len(STATES) + 1  # not indexed, slot still owed
CANDIDATE, IN_LINE = 1, 2  # values of ``queued``

ROWS_AHEAD_MAX = 1 << 24  # rows made at once: memory that is not touched is not used
SPECS_MAX = 1024  # page geometries on one node

_DTYPES = {
    "state": "u1",
    "pinned": "u1",
    "on_ssd": "u1",
    "queued": "u1",
    "priority": "u1",
    "num_tokens": "u2",
    "spec": "u2",
    "namespace": "u4",
    "depth": "u4",
    "num_holds": "u4",
    "tokens": "i4",
    "slab": "i4",
    "trunk": "i4",
    "children": "i4",
    "offset": "i8",
    "generation": "i8",
    "stamp": "i8",
    "score": "i8",
    "heat": "f8",
}


class PageTable:
    """See the module's docstring. Columns are attributes; those named ``*s`` are numpy arrays.

    Args:
        seed: of the indexes by key.

    Attributes:
        state, pinned, on_ssd, priority, depth: of the page.
        num_holds: read leases and other reasons to keep the slot as it is.
        queued: ``CANDIDATE`` for eviction, ``IN_LINE`` once chosen to go next, or 0.
        offset, generation, slab: the granted slot; 0 without one.
        stamp: logical time of the last touch; heat, score: see the policies.
        trunk: of the page's parent; children: the trunk of its children, 0 without any.
    """

    def __init__(self, seed: bytes = b"") -> None:
        self.index = KeyIndex(seed)
        self.trunks = Trunks(seed)
        self.namespaces = Names()
        self.specs: list[PageSpec] = []
        self._page_nbytes: list[int] = []  # by spec: asked for often, a spec computes it each time
        self._num_of_spec: list[int] = []  # rows by spec; the number of one without any is free
        self._spec_ids: dict[PageSpec, int] = {}
        self._tokens: dict[int, TokenStore] = {}
        self._columns = Columns(**_DTYPES)
        self._checksums = bytearray(CHECKSUM_NBYTES * self._columns.num_rows)
        self._rows = RowPool()
        self._fetch()

    def __len__(self) -> int:
        """Rows in use, those not indexed included."""
        return len(self._rows)

    def _fetch(self) -> None:
        view, arrays = self._columns.view, self._columns.arrays
        self.state: Any = view("state")
        self.pinned: Any = view("pinned")
        self.on_ssd: Any = view("on_ssd")
        self.queued: Any = view("queued")
        self.priority: Any = view("priority")
        self.num_tokens: Any = view("num_tokens")
        self.spec: Any = view("spec")
        self.namespace: Any = view("namespace")
        self.depth: Any = view("depth")
        self.num_holds: Any = view("num_holds")
        self.slab: Any = view("slab")
        self.trunk: Any = view("trunk")
        self.children: Any = view("children")
        self.offset: Any = view("offset")
        self.generation: Any = view("generation")
        self.stamp: Any = view("stamp")
        self.score: Any = view("score")
        self.heat: Any = view("heat")
        self._place: Any = view("tokens")
        self.states: npt.NDArray[np.uint8] = arrays["state"]
        self.spec_ids: npt.NDArray[np.uint16] = arrays["spec"]
        self.slabs: npt.NDArray[np.int32] = arrays["slab"]
        self.stamps: npt.NDArray[np.int64] = arrays["stamp"]
        self.scores: npt.NDArray[np.int64] = arrays["score"]
        self.heats: npt.NDArray[np.float64] = arrays["heat"]
        self.token_counts: npt.NDArray[np.uint16] = arrays["num_tokens"]

    # ---- rows

    def reserve(self, num_rows: int) -> None:
        """Make room for up to ``num_rows`` rows ahead, within ``ROWS_AHEAD_MAX``."""
        num_rows = min(num_rows, ROWS_AHEAD_MAX) + 1
        if num_rows > self._columns.num_rows:
            self._grow(num_rows)

    def _grow(self, num_rows: int) -> None:
        used = self._rows.end
        self._columns.grow(num_rows, used)
        self.index.grow(num_rows, used)
        self.trunks.reserve(num_rows)
        checksums = bytearray(CHECKSUM_NBYTES * num_rows)
        checksums[: len(self._checksums)] = self._checksums
        self._checksums = checksums
        self._fetch()

    @contextlib.contextmanager
    def adding(self, keys: Sequence[bytes]) -> Iterator[None]:
        """Within it, what these keys cost to hash, as keys or parents, is paid once for all."""
        hashes = self.index.hashed(keys)
        self.index.primed = hashes
        self.trunks.prime(hashes)
        try:
            yield
        finally:
            self.index.primed = {}
            self.trunks.prime({})

    def add(self, page: PageIdentity | PageRecord, spec_id: int, namespace: bytes) -> int:
        """Index a page that is absent; returns its row. State and slot are the caller's."""
        row = self._rows.take()
        if row >= self._columns.num_rows:
            self._grow(2 * self._columns.num_rows)
        self.index.insert(row, page.key)
        self.spec[row] = spec_id
        self._num_of_spec[spec_id] += 1
        self.depth[row] = depth = page.depth
        self.num_tokens[row] = page.num_tokens
        self._place[row] = self._tokens_of(spec_id).put(page.tokens)
        self.namespace[row] = self.namespaces.join(namespace)
        parent = self.index.find(page.parent)
        if parent and self.depth[parent] + 1 != depth:
            parent = NULL_ROW  # what a client says is no ancestry: two pages could be each other's
        self.trunk[row] = trunk = self.trunks.join(page.parent, parent, depth)
        if parent:
            self.children[parent] = trunk
        self.children[row] = children = self.trunks.find(page.key, depth + 1)
        if children:
            self.trunks.page[children] = row
        return row

    def unlink(self, row: int) -> None:
        """Take the key out of the index; the row stays until ``free``."""
        self.index.remove(row)
        children = self.children[row]
        if children:
            self.trunks.page[children] = NULL_ROW
            self.children[row] = 0
        trunk = self.trunk[row]
        parent = self.trunks.page[trunk]
        if self.trunks.leave(trunk) and parent:
            self.children[parent] = 0
        self.trunk[row] = 0

    def free(self, row: int) -> None:
        """Give an unlinked row back."""
        spec_id: int = self.spec[row]
        self._tokens_of(spec_id).drop(self._place[row])
        self._num_of_spec[spec_id] -= 1
        self.namespaces.leave(self.namespace[row])
        self.state[row] = self.pinned[row] = self.on_ssd[row] = self.queued[row] = 0
        self.offset[row] = self.generation[row] = self.score[row] = 0
        self.heat[row] = 0.0
        self._rows.give_back(row)

    # ---- geometry

    def known_spec(self, spec: PageSpec) -> int | None:
        """The small number of ``spec``; None before ``spec_id`` has given it one."""
        return self._spec_ids.get(spec)

    def takes_spec(self, spec: PageSpec) -> bool:
        """``spec`` has a number, or could get one."""
        return spec in self._spec_ids or len(self.specs) < SPECS_MAX or 0 in self._num_of_spec

    def spec_id(self, spec: PageSpec) -> int | None:
        """Likewise, given now: its pages must fit, and one is added next. It holds while pages of
        it are here, then until another needs it. None when there are too many."""
        known = self._spec_ids.get(spec)
        if known is not None or not self.takes_spec(spec):
            return known
        if len(self.specs) < SPECS_MAX:
            known = len(self.specs)
            self.specs.append(spec)
            self._page_nbytes.append(spec.page_nbytes)
            self._num_of_spec.append(0)
        else:
            known = self._num_of_spec.index(0)
            del self._spec_ids[self.specs[known]]
            self.specs[known], self._page_nbytes[known] = spec, spec.page_nbytes
        self._spec_ids[spec] = known
        return known

    def spec_of(self, row: int) -> PageSpec:
        spec_id: int = self.spec[row]
        return self.specs[spec_id]

    def page_nbytes(self, row: int) -> int:
        """Bytes of the page and of its slot."""
        spec_id: int = self.spec[row]
        return self._page_nbytes[spec_id]

    def _tokens_of(self, spec_id: int) -> TokenStore:
        page_size = self.specs[spec_id].page_size
        store = self._tokens.get(page_size)
        if store is None:
            store = self._tokens[page_size] = TokenStore(page_size)
        return store

    # ---- looking

    def find(self, key: bytes) -> int:
        """The row of an indexed key, or ``NULL_ROW``."""
        return self.index.find(key)

    def find_many(self, packed: bytes) -> Rows:
        return self.index.find_many(packed)

    def key(self, row: int) -> PageKey:
        return PageKey(self.index.key(row))

    def parent_key(self, row: int) -> PageKey:
        """The key of the page before, here or not; the namespace for a first page."""
        return PageKey(self.trunks.key(self.trunk[row]))

    def parent_row(self, row: int) -> int:
        """The row of the page before, or ``NULL_ROW`` when it is not here."""
        return self.trunks.page[self.trunk[row]]  # type: ignore[no-any-return]

    def num_resident_children(self, row: int) -> int:
        """Children with a slot in memory."""
        return self.trunks.num_resident[self.children[row]]  # type: ignore[no-any-return]

    def tokens(self, row: int) -> bytes:
        return self._tokens_of(self.spec[row]).get(self._place[row], self.num_tokens[row])

    def is_page(self, row: int, page: PageIdentity, spec_id: int | None) -> bool:
        """The row is about exactly this page and geometry."""
        return (
            self.spec[row] == spec_id
            and self.num_tokens[row] == page.num_tokens
            and self.depth[row] == page.depth
            and self.tokens(row) == page.tokens
            and self.trunks.key(self.trunk[row]) == page.parent
        )

    def checksum(self, row: int) -> bytes:
        at = row * CHECKSUM_NBYTES
        return bytes(self._checksums[at : at + CHECKSUM_NBYTES])

    def set_checksum(self, row: int, checksum: bytes) -> None:
        assert len(checksum) == CHECKSUM_NBYTES, len(checksum)
        at = row * CHECKSUM_NBYTES
        self._checksums[at : at + CHECKSUM_NBYTES] = checksum

    def record(self, row: int) -> PageRecord:
        """What an indexed, committed page claims to be."""
        return PageRecord(
            key=self.key(row),
            parent=self.trunks.key(self.trunk[row]),
            depth=self.depth[row],
            tokens=self.tokens(row),
            checksum=self.checksum(row),
            page_nbytes=self.page_nbytes(row),
        )

    @property
    def end_row(self) -> int:
        """The first row that was never used."""
        return self._rows.end

    def present_rows(self, start: int, end: int) -> list[int]:
        """Rows ``start..end-1`` of pages in memory or on the SSD."""
        states = self.states[start : min(end, self._rows.end)]
        found = np.flatnonzero((states == READY) | (states == SPILLED))
        return [row + start for row in found.tolist()]

    def indexed_rows(self) -> list[int]:
        """All indexed rows, in order; O(rows)."""
        end = self._rows.end
        states = self.states[:end]
        found = (states != ABSENT) & (states < FENCED)
        return [int(row) for row in np.flatnonzero(found)]

    def used_rows(self) -> list[int]:
        """All rows in use, in order; O(rows)."""
        return [int(row) for row in np.flatnonzero(self.states[: self._rows.end])]

    def check(self) -> None:
        """Assert that rows, index, trunks and namespaces agree; O(rows)."""
        self.index.check()
        self.trunks.check()
        used, indexed = self.used_rows(), self.indexed_rows()
        of_spec = Counter(self.spec[row] for row in used)
        assert self._num_of_spec == [of_spec[i] for i in range(len(self.specs))]
        assert self._spec_ids == {spec: i for i, spec in enumerate(self.specs)}
        assert len(used) == len(self._rows) == sum(len(store) for store in self._tokens.values())
        assert len(indexed) == len(self.index)
        trunks: dict[int, list[int]] = {}
        namespaces: dict[int, int] = {}
        for row in used:
            number = self.namespace[row]
            namespaces[number] = namespaces.get(number, 0) + 1
        for row in indexed:
            assert self.index.find(self.index.key(row)) == row
            trunks.setdefault(self.trunk[row], []).append(row)
        names = self.namespaces
        assert names.counts() == {names.name(n): count for n, count in namespaces.items()}
        assert len(trunks) == len(self.trunks)
        for trunk, children in trunks.items():
            depth = self.trunks.depth[trunk]
            assert all(self.depth[row] == depth for row in children), trunk
            parent = self.index.find(self.trunks.key(trunk))
            if self.trunks.stray[trunk] or (parent and self.depth[parent] + 1 != depth):
                parent = NULL_ROW
            assert self.trunks.page[trunk] == parent, trunk
            assert not parent or self.children[parent] == trunk, trunk
            assert self.trunks.num_children[trunk] == len(children), trunk
            resident = sum(self.state[row] in (WRITING, READY) for row in children)
            assert self.trunks.num_resident[trunk] == resident, trunk
            in_line = sum(self.queued[row] == IN_LINE for row in children)
            assert self.trunks.num_staying[trunk] == resident - in_line, trunk
        for row in indexed:
            assert not self.children[row] or self.children[row] in trunks, row
