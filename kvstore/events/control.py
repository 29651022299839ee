"""What is asked of a node about its cache, over a channel: a snapshot, its counters, to clear it.

Owns these structs. Events themselves do not travel on channels (``kvstore/events/wire.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvstore.page import KEY_NBYTES, PageKey

SNAPSHOT_PART_KEYS = 4096  # 128 KiB


class WatchKvEvents(msgspec.Struct, frozen=True, tag="watch_kv_events"):
    """Stream request: a snapshot in ``KvSnapshotPart`` items, then nothing more, without end.

    The open stream is how each side notices that the other has gone while no event is sent.
    """


class KvSnapshotPart(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of pages that the node holds, ``SNAPSHOT_PART_KEYS`` of them at most.

    Pages that come or go while a snapshot is being sent may be in it or not: the batches from
    ``next_seq`` on say what became of them.

    Attributes:
        epoch: of the publisher.
        next_seq: of the first batch that is to be applied to the snapshot.
        keys: packed, one after the other.
        last: no part follows.
    """

    epoch: str
    next_seq: Annotated[int, msgspec.Meta(ge=0)]
    keys: bytes
    last: bool

    def unpacked(self) -> list[PageKey]:
        keys = self.keys
        assert len(keys) % KEY_NBYTES == 0, "checked when the part was made"
        return [PageKey(keys[at : at + KEY_NBYTES]) for at in range(0, len(keys), KEY_NBYTES)]

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_NBYTES:
            raise ValueError(f"{len(self.keys)} bytes are no whole number of page keys")


def packed_chunks(packed: bytes) -> Iterator[bytes]:
    """Cut packed keys into what goes into one part of a snapshot each."""
    for start in range(0, len(packed), SNAPSHOT_PART_KEYS * KEY_NBYTES):
        yield packed[start : start + SNAPSHOT_PART_KEYS * KEY_NBYTES]


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Forget the local cache, or one namespace of it (``kvstore.keys.namespace_of``).

    Pages of running requests stay theirs. ``clear_id``: as in ``kvstore.messages.ClearStore``.
    Reply: ``CacheCleared``.
    """

    namespace: bytes | None = None
    clear_id: str = ""


class CacheCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cache_cleared"):
    num_pages: int


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Reply: ``StatsReply``."""


class StatsReply(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counters (only ever rise) and gauges of one node, by name."""

    counters: dict[str, float]
    gauges: dict[str, float]
    healthy: bool
