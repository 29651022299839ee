"""One ``match``: ask all nodes that may hold the pages at once, and merge their answers.

Owns the life of a single call: one round trip to all nodes involved, in parallel, in few large
packed messages. With replicas, every node that should hold a page is asked: that costs a message
more, not a round trip more, and keeps the page young on all of them. The call returns as soon as
every page is known to be in some node's memory; a node that does not answer delays only pages that
nobody else has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from kvstore.client.link import StoreLink, check_count
from kvstore.client.links import ClientParts
from kvstore.messages import STATES, MatchPages, PagesMatched, pack_keys
from kvstore.page import PageKey
from kvstore.store import PageState
from transfer.errors import FrameInvalid, TransferError

# The better answer wins: absent < being written < on an SSD < in memory.
_ORDER = [PageState.ABSENT, PageState.WRITING, PageState.SPILLED, PageState.READY]
_RANK_OF_CODE = np.array([_ORDER.index(state) for state in STATES], dtype=np.uint8)
_BEST = len(_ORDER) - 1


class PageMatcher:
    """One call of ``StoreClient.match``."""

    def __init__(self, parts: ClientParts, keys: Sequence[PageKey], *, deadline_s: float) -> None:
        self._parts = parts
        self._keys = keys
        self._deadline_s = deadline_s
        self._found = np.zeros(len(keys), dtype=np.uint8)  # positions in _ORDER

    async def run(self) -> list[PageState]:
        groups = self._parts.links.reading(self._keys).all_groups()
        if len(groups) == 1:
            await self._ask(*groups[0])
        elif groups:
            await self._ask_all([self._ask(link, indexes) for link, indexes in groups])
        return [_ORDER[rank] for rank in self._found.tolist()]

    async def _ask_all(self, asks: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Return when all have answered, or nothing better can come."""
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        try:
            left = set(tasks)
            while left and not (self._found == _BEST).all():
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        for result in done:
            if isinstance(result, Exception):
                raise result

    async def _ask(self, link: StoreLink, indexes: list[int]) -> None:
        all_keys = len(indexes) == len(self._keys)
        self._parts.counters["match_messages"] += 1
        packed = pack_keys(self._keys if all_keys else [self._keys[i] for i in indexes])
        try:
            reply = await link.call(MatchPages(packed), PagesMatched, deadline_s=self._deadline_s)
            check_count(reply.codes, len(indexes))
            codes = np.frombuffer(reply.codes, dtype=np.uint8)
            if codes.size and int(codes.max()) >= len(STATES):
                raise FrameInvalid(f"{link.node_id} answers with a state that is none")
        except TransferError:
            self._parts.counters["broken_matches"] += 1
            return
        where = slice(None) if all_keys else indexes
        self._found[where] = np.maximum(self._found[where], _RANK_OF_CODE[codes])
