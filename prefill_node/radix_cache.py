"""The radix cache: which prefixes have their KV in local pages, as a tree of runs of pages.

Owns the tree, its recency and one reference (``PageAllocator``) on every page in it. Knows no
requests, no time, no network. Sans-I/O: every method is synchronous and pure bookkeeping.

One root per namespace (model, page spec, tenant salt), so that tenants never meet. An edge is a
run of *full* pages; edges split at page borders only; the children of a node differ in their first
page. Recency is a counter, not a clock::

    root(ns) ──[p0 p1 p2]──┬──[p3 p4]          who holds p1:  the cache              1
                           └──[p7]                            + each page table       n
                                                              + each put in flight    m
      match  ─▶ caller gets page ids, each retained for it     refs == 1 + n + m
      insert ─▶ new pages: the cache retains them, the caller keeps its own reference
                known pages: the caller's copy is released, its table gets the tree's page
      evict  ─▶ only pages with refs == 1, from the tails of the least recently used leaves

Invariants: every page is in the tree at most once and has refs >= 1; a node's stamp is never older
than its children's, so no page is staler than its descendants; the KV event log holds exactly the
keys of the tree.

The idea is SGLang's RadixAttention (Zheng et al., 2024, arXiv:2312.07104).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from engine.page_allocator import PageAllocator
from kvstore.events import KvEventLog
from kvstore.keys import Namespace, page_key
from kvstore.page import PageId, PageKey

TOKEN_NBYTES = 4  # int32
_HEAP_SLACK = 64  # stale heap entries tolerated before the heap is rebuilt


class InsertResult(NamedTuple):
    """``page_ids`` is the page table to use from now on; ``duplicates`` were released."""

    page_ids: list[PageId]
    duplicates: list[PageId]


class _Node:
    """A run of pages below ``parent``. ``parent`` is None for roots and for removed nodes."""

    __slots__ = ("children", "keys", "page_ids", "parent", "serial", "stamp", "tokens")

    def __init__(self, parent: _Node | None, serial: int, stamp: int) -> None:
        self.parent = parent
        self.serial = serial
        self.stamp = stamp
        self.children: dict[bytes, _Node] = {}
        self.tokens = b""
        self.page_ids: list[PageId] = []
        self.keys: list[PageKey] = []

    def __lt__(self, other: _Node) -> bool:
        return self.serial < other.serial

    @property
    def is_evictable_leaf(self) -> bool:
        return self.parent is not None and not self.children


class RadixCache:
    """Prefixes with KV in local pages. Tokens are packed int32 little-endian throughout."""

    def __init__(self, allocator: PageAllocator, page_size: int, log: KvEventLog) -> None:
        self._allocator = allocator
        self._stride = page_size * TOKEN_NBYTES
        self._log = log
        self._roots: dict[Namespace, _Node] = {}
        self._serials = count()
        self._clock = 0
        self._num_pages = 0
        self._num_nodes = 0
        self._leaves: list[tuple[int, _Node]] = []  # lazy heap: (stamp, node), stale entries stay
        self.version = 0
        self.num_evicted_pages = 0

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that only the cache holds; O(pages)."""
        return sum(self._allocator.refs(page_id) == 1 for page_id in self.held())

    def count(self, namespace: Namespace, tokens: bytes) -> int:
        """Return how many leading full pages of ``tokens`` are cached; changes nothing."""
        return sum(n for _, n in self._walk(namespace, tokens))

    def match(self, namespace: Namespace, tokens: bytes) -> list[PageId]:
        """Return the pages of the longest cached prefix, each retained for the caller.

        Mutates recency, and splits the edge in which the match ends.
        """
        path = self._walk(namespace, tokens)
        if not path:
            return []
        nodes = self._whole_nodes(path)
        self._touch(nodes)
        page_ids = [page_id for node in nodes for page_id in node.page_ids]
        self._allocator.retain(page_ids)
        return page_ids

    def insert(
        self,
        namespace: Namespace,
        tokens: bytes,
        keys: Sequence[PageKey],
        page_ids: Sequence[PageId],
    ) -> InsertResult:
        """Add the prefix ``tokens`` (full pages only), whose KV lies in ``page_ids``.

        The caller holds one reference on every page of ``page_ids`` before, and one on every page
        of the result after: where the tree has the same prefix in another page already, the
        caller's reference moves from its duplicate to the tree's page.
        """
        assert len(tokens) == len(page_ids) * self._stride, (len(tokens), len(page_ids))
        assert len(keys) == len(page_ids), (len(keys), len(page_ids))
        nodes = self._whole_nodes(self._walk(namespace, tokens))
        known = [page_id for node in nodes for page_id in node.page_ids]
        swapped = [
            (ours, mine) for ours, mine in zip(known, page_ids, strict=False) if ours != mine
        ]
        duplicates = [mine for _, mine in swapped]
        self._allocator.retain([ours for ours, _ in swapped])
        self._allocator.release(duplicates)
        num_known = len(known)
        if num_known < len(page_ids):
            tail = nodes[-1] if nodes else self._root(namespace)
            nodes.append(
                self._append(
                    tail, tokens[num_known * self._stride :], keys[num_known:], page_ids[num_known:]
                )
            )
            self._log.stored(
                keys[num_known:],
                parent=keys[num_known - 1] if num_known else None,
                tokens=tokens[num_known * self._stride :],
            )
        self._touch(nodes)
        return InsertResult([*known, *page_ids[num_known:]], duplicates)

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` pages that nobody but the cache holds; return how many.

        Least recently used leaves first, each from its tail. A held page stops its leaf, and with
        it all its ancestors, which are held by the same prefix.
        """
        removed: list[PageKey] = []
        blocked: list[_Node] = []
        while len(removed) < num_pages and self._leaves:
            stamp, node = heapq.heappop(self._leaves)
            if not node.is_evictable_leaf or node.stamp != stamp:
                continue
            self._evict_tail(node, num_pages - len(removed), removed)
            if node.page_ids:
                blocked.append(node)
            else:
                self._detach(node)
        for node in blocked:
            self._push_leaf(node)
        self.num_evicted_pages += len(removed)
        if removed:
            self.version += 1
            self._log.removed(removed)
        return len(removed)

    def clear(self) -> int:
        """Forget everything; pages that others hold live on with them. Return the pages dropped."""
        dropped = self._num_pages
        for node in self._nodes():
            self._allocator.release(node.page_ids)
            node.parent = None
        self._roots.clear()
        self._leaves.clear()
        self._num_pages = self._num_nodes = 0
        self.version += 1
        self._log.clear()
        return dropped

    def clear_namespace(self, namespace: Namespace) -> int:
        """Forget one namespace, as ``clear`` does; costs what it forgets."""
        root = self._roots.pop(namespace, None)
        if root is None:
            return 0
        removed: list[PageKey] = []
        for node in list(self._below(root)):
            self._allocator.release(node.page_ids)
            removed.extend(node.keys)
            node.parent = None  # what is left of it in the heap of leaves is stale
            self._num_nodes -= 1
        self._num_pages -= len(removed)
        self.version += 1
        self._log.removed(removed[::-1])
        return len(removed)

    def held(self) -> Iterator[PageId]:
        """Every page on which the cache holds its reference."""
        for node in self._nodes():
            yield from node.page_ids

    def check(self) -> None:
        """Assert the invariants; O(pages), hashes every key again."""
        seen: dict[PageId, None] = {}
        keys: list[PageKey] = []
        for namespace, root in self._roots.items():
            assert root.children, "a root without pages stays behind"
            self._check_node(root, namespace, seen, keys)
        assert len(seen) == self._num_pages, (len(seen), self._num_pages)
        assert sum(1 for _ in self._nodes()) == self._num_nodes
        assert sorted(self._log.held()) == sorted(keys), "the event log differs from the tree"

    # ── the tree ────────────────────────────────────────────────────────────────────────────────

    def _walk(self, namespace: Namespace, tokens: bytes) -> list[tuple[_Node, int]]:
        """Return the nodes along ``tokens`` and the pages matched in each; only the last may be
        matched in part."""
        path: list[tuple[_Node, int]] = []
        node = self._roots.get(namespace)
        offset = 0
        while node is not None:
            node = node.children.get(tokens[offset : offset + self._stride])
            if node is None:
                break
            num_common = self._common_pages(node.tokens, tokens, offset)
            path.append((node, num_common))
            if num_common < len(node.page_ids):
                break
            offset += num_common * self._stride
        return path

    def _common_pages(self, edge: bytes, tokens: bytes, offset: int) -> int:
        """Pages that ``edge`` and ``tokens[offset:]`` have in common: bisect on equal prefixes."""
        stride = self._stride
        high = min(len(edge), len(tokens) - offset) // stride
        if edge[: high * stride] == tokens[offset : offset + high * stride]:
            return high
        low = 1  # the first page led here
        while high - low > 1:  # low pages are equal, high pages are not
            middle = (low + high) // 2
            start, end = low * stride, middle * stride
            if edge[start:end] == tokens[offset + start : offset + end]:
                low = middle
            else:
                high = middle
        return low

    def _whole_nodes(self, path: list[tuple[_Node, int]]) -> list[_Node]:
        """Split the last node where the path ends inside of it; return the nodes of the path."""
        nodes = [node for node, _ in path]
        if path:
            last, num_common = path[-1]
            if num_common < len(last.page_ids):
                nodes[-1] = self._split(last, num_common)
        return nodes

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Put the first ``num_pages`` of ``node`` into a new node above it; return the new one."""
        parent = node.parent
        assert parent is not None
        assert 0 < num_pages < len(node.page_ids)
        border = num_pages * self._stride
        upper = _Node(parent, next(self._serials), node.stamp)
        upper.tokens, node.tokens = node.tokens[:border], node.tokens[border:]
        upper.page_ids, node.page_ids = node.page_ids[:num_pages], node.page_ids[num_pages:]
        upper.keys, node.keys = node.keys[:num_pages], node.keys[num_pages:]
        parent.children[upper.tokens[: self._stride]] = upper
        upper.children[node.tokens[: self._stride]] = node
        node.parent = upper
        self._num_nodes += 1
        return upper

    def _append(
        self, tail: _Node, tokens: bytes, keys: Sequence[PageKey], page_ids: Sequence[PageId]
    ) -> _Node:
        """Add new pages below ``tail``: a leaf grows, any other node gets a child."""
        node = tail
        if not tail.is_evictable_leaf:
            node = _Node(tail, next(self._serials), self._clock)
            tail.children[tokens[: self._stride]] = node
            self._num_nodes += 1
        node.tokens += tokens
        node.page_ids.extend(page_ids)
        node.keys.extend(keys)
        self._allocator.retain(page_ids)
        self._num_pages += len(page_ids)
        self.version += 1
        return node

    def _evict_tail(self, node: _Node, num_pages: int, removed: list[PageKey]) -> None:
        num_left = len(node.page_ids)
        lowest = max(0, num_left - num_pages)
        while num_left > lowest and self._allocator.refs(node.page_ids[num_left - 1]) == 1:
            num_left -= 1
        self._allocator.release(node.page_ids[num_left:][::-1])
        removed.extend(node.keys[num_left:][::-1])
        self._num_pages -= len(node.page_ids) - num_left
        if num_left:
            node.tokens = node.tokens[: num_left * self._stride]
        del node.page_ids[num_left:], node.keys[num_left:]

    def _detach(self, node: _Node) -> None:
        """Remove a node that has lost all its pages; its parent may become a leaf."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[: self._stride]]
        node.parent = None
        self._num_nodes -= 1
        if parent.children:
            return
        if parent.parent is not None:
            self._push_leaf(parent)
        else:
            self._roots = {ns: root for ns, root in self._roots.items() if root is not parent}

    def _touch(self, nodes: list[_Node]) -> None:
        """Stamp a whole path from the root: no node becomes staler than one below it."""
        self._clock += 1
        for node in nodes:
            node.stamp = self._clock
        if nodes and nodes[-1].is_evictable_leaf:
            self._push_leaf(nodes[-1])

    def _push_leaf(self, node: _Node) -> None:
        heapq.heappush(self._leaves, (node.stamp, node))
        if len(self._leaves) > 2 * self._num_nodes + _HEAP_SLACK:
            self._leaves = [(n.stamp, n) for n in self._nodes() if n.is_evictable_leaf]
            heapq.heapify(self._leaves)

    def _root(self, namespace: Namespace) -> _Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(None, next(self._serials), 0)
        return root

    def _nodes(self) -> Iterator[_Node]:
        """Every node with pages, parents first."""
        for root in self._roots.values():
            yield from self._below(root)

    def _below(self, root: _Node) -> Iterator[_Node]:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_node(
        self,
        node: _Node,
        parent_key: PageKey | Namespace,
        seen: dict[PageId, None],
        keys: list[PageKey],
    ) -> None:
        assert len(node.tokens) == len(node.page_ids) * self._stride
        for i, (page_id, key) in enumerate(zip(node.page_ids, node.keys, strict=True)):
            assert page_id not in seen, f"page {page_id} is in the tree twice"
            assert self._allocator.refs(page_id) >= 1, f"page {page_id} is in the tree and free"
            page = node.tokens[i * self._stride : (i + 1) * self._stride]
            assert page_key(parent_key, np.frombuffer(page, dtype="<i4").tolist()) == key
            seen[page_id] = None
            keys.append(key)
            parent_key = key
        for first_page, child in node.children.items():
            assert child.parent is node
            assert child.tokens[: self._stride] == first_page
            assert node.parent is None or node.stamp >= child.stamp, "staler than a descendant"
            self._check_node(child, parent_key, seen, keys)
