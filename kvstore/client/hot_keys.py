"""Pages that lie on more nodes than usual, as store nodes have told this client.

Owns a bounded table; what was told is believed for a while and then forgotten. Knows no network.
Reads of such a page go to its nodes in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.page import PageKey

HOT_KEYS_MAX = 4096
BELIEVED_S = 10.0


class _Hot(NamedTuple):
    num_nodes: int
    until_s: float


class HotKeys:
    """Number of nodes by hot key.

    Args:
        first_turn: where this client begins; differs between clients.
    """

    def __init__(self, first_turn: int = 0) -> None:
        self._hot: dict[PageKey, _Hot] = {}
        self._turn = first_turn

    def __len__(self) -> int:
        return len(self._hot)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._hot

    def note(self, key: PageKey, num_nodes: int, now_s: float) -> None:
        """A node says that ``num_nodes`` nodes hold ``key``."""
        self._hot.pop(key, None)  # the youngest last
        self._hot[key] = _Hot(num_nodes, now_s + BELIEVED_S)
        if len(self._hot) > HOT_KEYS_MAX:
            del self._hot[next(iter(self._hot))]

    def forget(self, key: PageKey) -> None:
        """It was not where it should be."""
        self._hot.pop(key, None)

    def turns(self, keys: Sequence[PageKey], now_s: float) -> list[tuple[int, int]]:
        """For those of ``keys`` that are hot: their position, and the rank to read from now."""
        if not self._hot:
            return []
        out = []
        for i, key in enumerate(keys):
            hot = self._hot.get(key)
            if hot is None:
                continue
            if hot.until_s <= now_s:
                del self._hot[key]
                continue
            self._turn += 1
            out.append((i, self._turn % hot.num_nodes))
        return out
