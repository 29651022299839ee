"""What may be asked of a decode node beside decoding and KV events.

Owns wire structs only. The same names and fields as a prefill node's: whoever asks need not know
which kind of node answers.
"""

from __future__ import annotations

import msgspec


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Forget the cached pages. Pages of running sequences stay theirs. Reply: ``CacheCleared``."""


class CacheCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cache_cleared"):
    num_pages: int


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Reply: ``StatsReply``."""


class StatsReply(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counters (only ever rise) and gauges of one node, by name."""

    counters: dict[str, float]
    gauges: dict[str, float]
    healthy: bool
