"""Ends read leases soon, many in one message: a reader does not pay for the end of its lease.

Owns the leases of one client that have been read under and not been given back yet, for each link
and incarnation. They go with the next request for pages, or ``DELAY_S`` after the first of them in
the background; reports of corrupt pages go at once. A lease that cannot be released ends by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from kvstore.client.background import Background
from kvstore.client.link import StoreLink
from kvstore.config import PAGES_PER_MESSAGE_MAX
from kvstore.messages import PageGrant, ReleasePages, StoreDone
from transfer.errors import TransferError

DELAY_S = 0.005  # how much longer than it must a page stay leased; a thousandth of a lease

_Place = tuple[StoreLink, str]  # link, incarnation of the grants


class Releases:
    """See the module's docstring."""

    def __init__(self, background: Background, counters: Counter[str], op_timeout_s: float) -> None:
        self._background = background
        self._counters = counters
        self._op_timeout_s = op_timeout_s
        self._ended: dict[_Place, list[int]] = {}

    def add(
        self,
        link: StoreLink,
        incarnation: str,
        lease_id: int,
        corrupt: tuple[PageGrant, ...] = (),
    ) -> None:
        """Nobody reads under this lease any more. ``corrupt`` pages did not verify."""
        place = (link, incarnation)
        name = f"release at {link.node_id}"
        if corrupt:
            message = ReleasePages(incarnation=incarnation, lease_id=lease_id, corrupt=corrupt)
            self._background.spawn(self._send(link, message), name)
            return
        ended = self._ended.get(place)
        if ended is None:
            if self._background.spawn(self._send_soon(place), name):
                self._ended[place] = [lease_id]
            return
        ended.append(lease_id)
        if len(ended) >= PAGES_PER_MESSAGE_MAX:
            self._background.spawn(self._send(link, _message(incarnation, ended)), name)
            ended.clear()

    def claim(self, link: StoreLink) -> ReleasePages | None:
        """What is to be released at the present incarnation of ``link``'s node; the caller does."""
        incarnation = link.incarnation
        ended = self._ended.get((link, incarnation)) if incarnation is not None else None
        if not ended or incarnation is None:
            return None
        message = _message(incarnation, ended)
        ended.clear()
        return message

    async def _send_soon(self, place: _Place) -> None:
        try:
            await asyncio.sleep(DELAY_S)
        finally:
            ended = self._ended.pop(place, None)
        if ended:
            await self._send(place[0], _message(place[1], ended))

    async def _send(self, link: StoreLink, message: ReleasePages) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._op_timeout_s
        try:
            await link.call(message, StoreDone, deadline_s=deadline_s)
        except TransferError:
            self._counters["lost_releases"] += 1


def _message(incarnation: str, ended: list[int]) -> ReleasePages:
    first, *others = ended
    return ReleasePages(incarnation=incarnation, lease_id=first, others=tuple(others))
