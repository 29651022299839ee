"""Waiting for pages that others write: Mooncake tells nobody, so one poller asks for all.

Owns the table of waited-for keys and the poller, which lives only while somebody waits. However
many calls wait, there is one existence query per pause; the pause grows while nothing comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvstore.mooncake.calls import within
from kvstore.mooncake.config import PROBE_KEYS_MAX, WAITS_MAX

_GROWTH = 1.5


class _Wait:
    """One call that waits for any of its keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.found: set[str] = set()
        self.event = asyncio.Event()


class Appearances:
    """Keys that somebody waits for.

    Args:
        probe: which of these keys are committed, in their order.
    """

    def __init__(
        self,
        probe: Callable[[list[str]], Awaitable[list[bool]]],
        *,
        poll_s: float,
        poll_max_s: float,
    ) -> None:
        self._probe = probe
        self._poll_s = poll_s
        self._poll_max_s = poll_max_s
        self._pause_s = poll_s
        self._waits: dict[str, dict[_Wait, None]] = {}
        self._num_waits = 0
        self._closed = False
        self._poller: asyncio.Task[None] | None = None

    async def any_of(self, keys: Sequence[str], *, deadline_s: float) -> set[str]:
        """Return the keys that have come, as soon as one has; none at the deadline."""
        if self._closed:
            return set()
        if self._num_waits + len(keys) > WAITS_MAX:
            await within(asyncio.Event().wait(), deadline_s)  # as if nothing came
            return set()
        wait = _Wait(list(dict.fromkeys(keys)))
        self._add(wait)
        try:
            await within(wait.event.wait(), deadline_s)
        finally:
            self._remove(wait)
        return wait.found

    def _add(self, wait: _Wait) -> None:
        for key in wait.keys:
            self._waits.setdefault(key, {})[wait] = None
        self._num_waits += len(wait.keys)
        self._pause_s = self._poll_s
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    def _remove(self, wait: _Wait) -> None:
        for key in wait.keys:
            waits = self._waits.get(key, {})
            waits.pop(wait, None)
            if not waits:
                self._waits.pop(key, None)
        self._num_waits -= len(wait.keys)

    async def _poll(self) -> None:
        while self._waits:
            await asyncio.sleep(self._pause_s)
            keys = list(self._waits)
            came = False
            for start in range(0, len(keys), PROBE_KEYS_MAX):
                some = keys[start : start + PROBE_KEYS_MAX]
                for key, is_there in zip(some, await self._probe(some), strict=True):
                    came |= is_there and self._tell(key)
            grown_s = min(self._pause_s * _GROWTH, self._poll_max_s)
            self._pause_s = self._poll_s if came else grown_s

    def _tell(self, key: str) -> bool:
        waits = self._waits.get(key, {})
        for wait in waits:
            wait.found.add(key)
            wait.event.set()
        return bool(waits)

    async def close(self) -> None:
        """End all waits, as if their deadlines had come; later ones end at once."""
        self._closed = True
        for waits in list(self._waits.values()):
            for wait in waits:
                wait.event.set()
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait({self._poller})
