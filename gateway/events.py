"""Following one node's KV events: the shell around ``PrefixIndex``.

Owns the subscription: opens it, feeds batches to the index, subscribes again once after a gap or
when its time is up. Knows no routing. Returns only by raising: when the channel breaks, the
index keeps what it knows until the link says otherwise.
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


async def watch_kv_events(
    channel: Channel, index: PrefixIndex, node: NodeId, watch_s: float
) -> None:
    """Keep ``index`` in step with ``node`` until the channel closes.

    Raises:
        TransferError: the channel broke or was closed.
    """
    while not channel.closed:
        try:
            await _subscribe_once(channel, index, node, watch_s)
        except DeadlineExceeded:
            pass  # the subscription was renewed in time; a dead peer raises PeerLost instead
        except RemoteFailed as error:
            logger.warning("KV events of %s: %s", node, error)
        index.unsync(node)
        await asyncio.sleep(RESUBSCRIBE_PAUSE_S)
    raise PeerClosed(f"channel to {node} is closed")


async def _subscribe_once(
    channel: Channel, index: PrefixIndex, node: NodeId, watch_s: float
) -> None:
    deadline_s = deadline_after(watch_s)
    stream = channel.stream(WatchKvEvents(), KvEventBatch, deadline_s=deadline_s)
    async with aclosing(cast("AsyncGenerator[KvEventBatch, None]", stream)) as batches:
        async for batch in batches:
            if not index.apply(node, batch):
                logger.info("KV events of %s: gap before %d, subscribing again", node, batch.seq)
                return
