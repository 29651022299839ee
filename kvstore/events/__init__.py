"""What the caches of the cluster's nodes hold, told to whoever routes: KV events.

vLLM's wire format (docs/kv-events.md), a log and a publisher for nodes, a consumer that never
misses anything silently. Prefill, decode and store nodes speak the same words: whoever listens need
not know which kind of node speaks.
"""

from kvstore.events.consumer import EventCounters, KvEventConsumer, KvEventSink, Want
from kvstore.events.control import (
    CacheCleared,
    ClearCache,
    GetStats,
    KvSnapshotPart,
    StatsReply,
    WatchKvEvents,
)
from kvstore.events.log import KvEventLog
from kvstore.events.publisher import (
    EVENTS_LABEL,
    REPLAY_LABEL,
    WATCHERS_MAX,
    KvEventPublisher,
)
from kvstore.events.wire import (
    AllPagesCleared,
    Encoding,
    KvEvent,
    Medium,
    PagesRemoved,
    PagesStored,
)

__all__ = [
    "EVENTS_LABEL",
    "REPLAY_LABEL",
    "WATCHERS_MAX",
    "AllPagesCleared",
    "CacheCleared",
    "ClearCache",
    "Encoding",
    "EventCounters",
    "GetStats",
    "KvEvent",
    "KvEventConsumer",
    "KvEventLog",
    "KvEventPublisher",
    "KvEventSink",
    "KvSnapshotPart",
    "Medium",
    "PagesRemoved",
    "PagesStored",
    "StatsReply",
    "Want",
    "WatchKvEvents",
]
