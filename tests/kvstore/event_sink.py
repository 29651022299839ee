"""A naive sink of KV events: a set, and how often it was told what."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.events import AllPagesCleared, KvEvent, PagesStored
from kvstore.page import PageKey


class Held:
    def __init__(self) -> None:
        self.keys: set[PageKey] = set()
        self.num_replaced = 0
        self.num_forgotten = 0

    def replace(self, keys: Sequence[PageKey]) -> None:
        self.num_replaced += 1
        self.keys = set(keys)

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, AllPagesCleared):
                self.keys.clear()
            elif isinstance(event, PagesStored):
                self.keys |= set(event.keys)
            else:
                self.keys -= set(event.keys)

    def forget(self) -> None:
        self.num_forgotten += 1
        self.keys.clear()
