"""What may be asked of a prefill node beside ``PrefillRequest`` and ``WatchKvEvents``.

Owns wire structs only.
"""

from __future__ import annotations

import msgspec


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Forget the radix cache. Pages of running requests stay theirs. Reply: ``CacheCleared``."""


class CacheCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cache_cleared"):
    num_pages: int


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Reply: ``StatsReply``."""


class StatsReply(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counters (only ever rise) and gauges of one node, by name."""

    counters: dict[str, float]
    gauges: dict[str, float]
    healthy: bool
