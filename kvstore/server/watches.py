"""Who wants to hear when the state of a key changes.

Owns callbacks by key; knows no states. A watch fires at most once, at the first change of any of
its keys, and is gone then. Callbacks run synchronously and must only note the event (wake a
future): they must not call back into the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.page import PageKey


class Watch(NamedTuple):
    """One watcher: its keys, and what to call."""

    keys: tuple[PageKey, ...]
    callback: Callable[[], None]


class Watches:
    """Watchers of keys."""

    def __init__(self) -> None:
        self._watches: dict[int, Watch] = {}
        self._by_key: dict[PageKey, dict[int, None]] = {}
        self._last_id = 0
        self.num_keys = 0  # keys x watches held

    def __len__(self) -> int:
        return len(self._watches)

    def add(self, keys: Sequence[PageKey], callback: Callable[[], None]) -> int:
        """Call ``callback`` once, at the next change of any of ``keys``; returns the watch id."""
        self._last_id += 1
        watch = Watch(tuple(dict.fromkeys(keys)), callback)
        self._watches[self._last_id] = watch
        self.num_keys += len(watch.keys)
        for key in watch.keys:
            self._by_key.setdefault(key, {})[self._last_id] = None
        return self._last_id

    def remove(self, watch_id: int) -> Watch | None:
        """Forget a watch; unknown and fired ones are ignored."""
        watch = self._watches.pop(watch_id, None)
        if watch is None:
            return None
        self.num_keys -= len(watch.keys)
        for key in watch.keys:
            watchers = self._by_key[key]
            del watchers[watch_id]
            if not watchers:
                del self._by_key[key]
        return watch

    def fire(self, key: PageKey) -> None:
        """The state of ``key`` has changed."""
        for watch_id in tuple(self._by_key.get(key, ())):
            watch = self.remove(watch_id)
            assert watch is not None
            watch.callback()
