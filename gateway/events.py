"""Following one node's KV events: the shell around ``PrefixIndex``.

Owns the subscription: opens it, feeds batches to the index, subscribes again once after a gap or
when its time is up. Knows no routing. Returns only by raising: when the channel breaks, the
index keeps what it knows until the link says otherwise.

A node whose event handler keeps failing is asked less and less often, and logged once: failures
are one streak as long as no subscription ends well or holds for ``RESUBSCRIBE_PAUSE_MAX_S``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from gateway.prefix_index import PrefixIndex
from kvstore.events import KvEventBatch, WatchKvEvents
from transfer.channel import Channel
from transfer.errors import DeadlineExceeded, PeerClosed, RemoteFailed
from transfer.identity import NodeId
from transfer.interface import deadline_after

logger = logging.getLogger(__name__)

RESUBSCRIBE_PAUSE_S = 0.1  # also bounds what a node with a broken event log can cost us
RESUBSCRIBE_PAUSE_MAX_S = 5.0


async def watch_kv_events(
    channel: Channel, index: PrefixIndex, node: NodeId, watch_s: float
) -> None:
    """Keep ``index`` in step with ``node`` until the channel closes.

    Raises:
        TransferError: the channel broke or was closed.
    """
    loop = asyncio.get_running_loop()
    pause_s: float | None = None  # None: no streak of failures
    while not channel.closed:
        opened_s = loop.time()
        failure = await _subscribe_once(channel, index, node, watch_s)
        index.unsync(node)
        if failure is None or loop.time() - opened_s >= RESUBSCRIBE_PAUSE_MAX_S:
            pause_s = None
        if failure is not None and pause_s is None:
            logger.warning("KV events of %s fail, trying on: %s", node, failure)
        await _pause(channel, pause_s or RESUBSCRIBE_PAUSE_S)
        if failure is not None:
            pause_s = min(2 * (pause_s or RESUBSCRIBE_PAUSE_S), RESUBSCRIBE_PAUSE_MAX_S)
    raise PeerClosed(f"channel to {node} is closed")


async def _pause(channel: Channel, pause_s: float) -> None:
    """Sleep in short pieces: a channel that closes meanwhile is opened again without delay."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + pause_s
    while not channel.closed and loop.time() < end_s:  # noqa: ASYNC110 - a channel has no event
        await asyncio.sleep(min(end_s - loop.time(), RESUBSCRIBE_PAUSE_S))


async def _subscribe_once(
    channel: Channel, index: PrefixIndex, node: NodeId, watch_s: float
) -> RemoteFailed | None:
    """Feed the index until a gap or the end of the subscription; return why the node failed it."""
    try:
        await _follow(channel, index, node, watch_s)
    except DeadlineExceeded:
        pass  # the subscription was renewed in time; a dead peer raises PeerLost instead
    except RemoteFailed as error:
        return error
    return None


async def _follow(channel: Channel, index: PrefixIndex, node: NodeId, watch_s: float) -> None:
    deadline_s = deadline_after(watch_s)
    stream = channel.stream(WatchKvEvents(), KvEventBatch, deadline_s=deadline_s)
    async with aclosing(cast("AsyncGenerator[KvEventBatch, None]", stream)) as batches:
        async for batch in batches:
            if not index.apply(node, batch):
                logger.info("KV events of %s: gap before %d, subscribing again", node, batch.seq)
                return
