"""Long polls at a store node: how long they last, and what ends them before.

Owns the wait of one poll. Knows no pages beyond their keys; who is told of changes is ``Watches``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.config import WAIT_S_MAX, WATCHES_MAX
from kvstore.page import PageKey
from kvstore.server.watches import Watches
from transfer.channel import Caller
from transfer.errors import RemoteFailed

REPLY_MARGIN_S = 0.05  # a long poll answers this much before its caller would give up


def poll_end_s(wait_s: float, caller: Caller) -> float:
    """When a poll that may take ``wait_s`` has to be answered."""
    wait_s = min(wait_s, WAIT_S_MAX) if wait_s > 0.0 else 0.0  # a peer's number: may be NaN
    return min(now_s() + wait_s, caller.deadline_s - REPLY_MARGIN_S)


async def changed(watches: Watches, keys: Sequence[PageKey], until_s: float) -> bool:
    """Wait until the state of one of ``keys`` changes; False when the time is over.

    Raises:
        RemoteFailed: too many wait already.
    """
    if now_s() >= until_s:
        return False
    if watches.num_keys + len(keys) > WATCHES_MAX:
        raise RemoteFailed("busy", f"this store node holds {watches.num_keys} waits already")
    event = asyncio.Event()
    watch_id = watches.add(keys, event.set)
    try:
        async with asyncio.timeout_at(until_s):
            await event.wait()
    except TimeoutError:
        return False
    finally:
        watches.remove(watch_id)
    return True


def now_s() -> float:
    return asyncio.get_running_loop().time()
