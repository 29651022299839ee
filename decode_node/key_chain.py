"""The key chain of one growing sequence, extended page by page as tokens arrive.

Owns the keys of the full pages of one sequence. Knows no page ids. A tail page's key commits to
exactly its tokens, hence it is made when it is asked for and not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.keys import Namespace, page_key
from kvstore.page import PageKey
from kvstore.store import PageIdentity

TokenIds = npt.NDArray[np.int32]


class KeyChain:
    """Keys of the full pages, in order.

    Args:
        namespace: root of the chain.
        page_size: tokens of a full page.
        keys: of the first full pages, where they are known already.
    """

    def __init__(self, namespace: Namespace, page_size: int, keys: Sequence[PageKey] = ()) -> None:
        self._namespace = namespace
        self._page_size = page_size
        self._keys = list(keys)

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def keys(self) -> Sequence[PageKey]:
        return self._keys

    def extend(self, tokens: TokenIds) -> None:
        """Add the keys of pages that ``tokens`` (all tokens of the sequence) has filled."""
        size = self._page_size
        while (end := (len(self._keys) + 1) * size) <= len(tokens):
            parent = self._keys[-1] if self._keys else self._namespace
            self._keys.append(page_key(parent, tokens[end - size : end].tolist()))

    def parent_key(self, index: int) -> PageKey | None:
        """Key of the page before ``index``; None for the first page."""
        return self._keys[index - 1] if index else None

    def identity(self, tokens: TokenIds, index: int, end: int) -> PageIdentity:
        """Identity of page ``index`` of the sequence when it holds the tokens up to ``end``."""
        start = index * self._page_size
        end = min(end, start + self._page_size)
        part = tokens[start:end]
        assert len(part) == end - start > 0, (index, start, end, len(tokens))
        parent: PageKey | Namespace = self._keys[index - 1] if index else self._namespace
        full = end - start == self._page_size
        key = self._keys[index] if full else page_key(parent, part.tolist())
        packed = part.astype("<i4", copy=False).tobytes()
        return PageIdentity(key=key, parent=parent, depth=index, tokens=packed)
