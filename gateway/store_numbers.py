"""Every number that a store node states with its heartbeats, and the metric that it becomes.

Owns the catalogue: metric name (behind ``kvferry_store_``), what it counts in words, and the labels
that tell apart what one metric counts. Labels have fixed values: how many series there are follows
from the number of nodes alone. A number that is missing here is not exported
(``tests/gateway/test_store_metrics.py`` fails then).
"""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """Where a number goes: the metric, and the value of its label if it has one."""

    metric: str
    label: str | None = None


class Family(NamedTuple):
    """One metric.

    Attributes:
        text: its HELP.
        label: name of the label beside ``node``.
        counter: only ever grows in one life of a node.
    """

    text: str
    label: str | None = None
    counter: bool = False


def _gauge(text: str, label: str | None = None) -> Family:
    return Family(text, label)


def _counter(text: str, label: str | None = None) -> Family:
    return Family(text, label, counter=True)


FAMILIES = {
    # what is where
    "pages": _gauge("Pages by state: ready, writing, fenced, dropped in memory; spilled.", "state"),
    "owed_pages": _gauge("Slots that nobody can reach and that are not free yet."),
    "oldest_owed_seconds": _gauge("How long the oldest of these has waited to be free."),
    "free_page_slots": _gauge("Free slots for pages of the size reserved last."),
    "capacity_bytes": _gauge("Size of each tier.", "tier"),
    "free_bytes": _gauge("Free memory of the segment."),
    "ssd_used_bytes": _gauge("Bytes of slots in use on the SSD."),
    "pinned_bytes": _gauge("Memory of pages that are never evicted."),
    "namespaces": _gauge("Namespaces that have pages."),
    "start_time_seconds": _gauge("When the node was started, in seconds since the epoch."),
    # promises
    "leases": _gauge("Read leases held."),
    "sessions": _gauge("Clients whose end would be noticed."),
    "waits": _gauge("Long polls for pages being written."),
    "leased_pages": _counter("Pages handed to readers."),
    "leased_tokens": _counter("Tokens of these."),
    "renewed_leases": _counter("Read leases renewed at half-life."),
    "expired_leases": _counter("Read leases that ended by time."),
    "late_releases": _counter("Releases of leases that had ended."),
    "renewed_writes": _counter("Reservations renewed at half-life."),
    "expired_writes": _counter("Reservations that ended by time."),
    "buried_writes": _counter("Reservations given up because their writer's process was gone."),
    "reclaimed_slots": _counter("Owed slots that became free."),
    "reclaim_seconds": _counter("Time that these took, from given up to free."),
    "reclaim_seconds_max": _gauge("The longest of these times."),
    # looking, writing
    "matched_pages": _counter("Keys asked for, by whether the page was there.", "result"),
    "hit_tokens": _counter("Tokens of keys that were there."),
    "reserved_pages": _counter("Reservations granted."),
    "refused_pages": _counter("Reservations refused for lack of room."),
    "committed_pages": _counter("Pages that became readable."),
    "committed_tokens": _counter("Tokens of these."),
    "aborted_pages": _counter("Reservations given up by their writers."),
    "late_aborts": _counter("Aborts of reservations that were gone."),
    "stale_commits": _counter("Commits of reservations that were gone."),
    "fenced_requests": _counter("Requests with a grant of another process life."),
    "collisions": _counter("Pages whose key is taken by other tokens."),
    "taken_pages": _counter("Pages that this node read from their writers, in one message."),
    "unread_pages": _counter("Pages so offered that could not be read."),
    "torn_writes": _counter("Commits whose bytes were not those declared."),
    "corrupt_reports": _counter("Pages that readers reported as damaged."),
    "corrupt_dropped": _counter("Pages that were really damaged here."),
    "dropped_pages": _counter("Pages forgotten because they were damaged."),
    # eviction
    "evictions": _counter("Pages that left memory, by reason.", "reason"),
    "evicted_pages": _counter("Pages that left memory, for whatever reason."),
    "evicted_to_ssd_pages": _counter("Pages of these that the SSD has."),
    "room_waits": _counter("Requests that waited for the SSD to make room in memory."),
    "room_waits_over": _counter("Requests of these for which it made none in time."),
    "candidates": _gauge("Pages that were chosen to be evicted next."),
    "evicted_tokens": _counter("Tokens of these."),
    "cleared_pages": _counter("Pages forgotten by order of the operator."),
    "lapsed_priorities": _counter("Pages whose raised priority ran out."),
    "pins_refused": _counter("Pins refused because too much is pinned."),
    # replicas
    "replicas_missing": _gauge("Copies that this node owes others."),
    "repairing": _gauge("1 while holdings are compared with other nodes."),
    "repair_seconds": _gauge("Length of the last repair."),
    "repairs": _counter("Repairs begun."),
    "compared_pages": _counter("Pages that other nodes were asked about."),
    "compares_failed": _counter("Nodes that could not be asked."),
    "surplus_pages": _counter("Pages that belong elsewhere and were made the first to go."),
    "hot_pages": _gauge("Pages spread over more nodes than usual."),
    "heated_pages": _counter("Times that a page became hot, or hotter."),
    "copies": _counter("Copies offered to other nodes, by what became of them.", "result"),
    "copies_received": _counter("Pages copied from other nodes to this one."),
    "copies_substituted": _counter("Copies owed to the next in rank of a node that is silent."),
    "copies_mended": _counter("Copies owed to nodes that evicted a page that is still read."),
    "copies_late": _counter("Writers that were told before their copies were made."),
    "drains_untold": _counter("Nodes that could not be told that this one drains."),
    "copy_tasks_failed": _counter("Copying tasks that ended by an error; the node is unhealthy."),
    "copied_bytes": _counter("Bytes of copies made on other nodes."),
    "lost_releases": _counter("Leases for copies that ended by time."),
    "node_connects": _counter("Channels opened to other store nodes."),
    "node_backoffs": _counter("Times that another store node was left alone for a while."),
    "node_bulk_failures": _counter("Transfers with other store nodes that broke."),
    # SSD
    "ssd_pages": _gauge("Pages on the SSD."),
    "ssd_indexed_pages": _gauge("Pages on the SSD that readers can have."),
    "ssd_degraded": _gauge("1 while the SSD takes no pages."),
    "ssd_direct": _gauge("1 when the SSD is used without the page cache of the system."),
    "ssd_stores_under_way": _gauge("Pages being written to the SSD."),
    "ssd_loads_under_way": _gauge("Pages being read from the SSD."),
    "ssd_index_backlog": _gauge("Changes that the index on the SSD does not have yet."),
    "ssd_spilling": _gauge("Pages on their way down."),
    "ssd_promoting": _gauge("Pages on their way up."),
    "ssd_pages_to_index": _gauge("Pages of an earlier life that are not served yet."),
    "ssd_spilled_pages": _counter("Pages copied to the SSD ahead of eviction."),
    "ssd_promoted_pages": _counter("Pages brought back to memory for readers."),
    "ssd_promotions_refused": _counter("Pages not brought back for lack of memory."),
    "ssd_displaced_pages": _counter("Pages that left the SSD for hotter ones."),
    "ssd_evicted_pages": _counter("Pages that the SSD gave up by itself."),
    "ssd_lost_pages": _counter("Pages that the SSD was to have and had not."),
    "ssd_stored_pages": _counter("Pages written to the SSD."),
    "ssd_stored_bytes": _counter("Bytes of these."),
    "ssd_loaded_pages": _counter("Pages read from the SSD and verified."),
    "ssd_loaded_bytes": _counter("Bytes of these."),
    "ssd_missed_pages": _counter("Pages asked of the SSD that it had not."),
    "ssd_refused_pages": _counter("Pages that the SSD did not take, by reason.", "reason"),
    "ssd_refused_loads": _counter("Pages not read because too many were being read."),
    "ssd_dropped_pages": _counter("Pages on the SSD that did not verify, by damage.", "reason"),
    "ssd_rows_dropped": _counter("Entries of the index that did not verify at the start."),
    "ssd_slabs_emptied": _counter("Slabs of the SSD emptied for another page size."),
    "ssd_errors": _counter("Errors of the disk, by what failed.", "operation"),
    # KV events
    "event_batches": _counter("Batches of KV events published."),
    "event_drops": _counter("Batches that subscribers did not take in time."),
    "event_overflows": _counter("Times that events were lost before they were published."),
    "event_replays": _counter("Requests for batches that were published before."),
    "event_snapshots": _counter("Contents sent whole to subscribers."),
}

SAMPLES = {
    "num_pages": Sample("pages", "ready"),
    "num_writing": Sample("pages", "writing"),
    "num_fenced": Sample("pages", "fenced"),
    "num_dropped": Sample("pages", "dropped"),
    "num_spilled": Sample("pages", "spilled"),
    "num_owed": Sample("owed_pages"),
    "oldest_owed_s": Sample("oldest_owed_seconds"),
    "num_free_pages": Sample("free_page_slots"),
    "segment_nbytes": Sample("capacity_bytes", "memory"),
    "ssd_nbytes": Sample("capacity_bytes", "ssd"),
    "free_nbytes": Sample("free_bytes"),
    "ssd_used_nbytes": Sample("ssd_used_bytes"),
    "pinned_nbytes": Sample("pinned_bytes"),
    "num_namespaces": Sample("namespaces"),
    "start_time_s": Sample("start_time_seconds"),
    "num_leases": Sample("leases"),
    "num_sessions": Sample("sessions"),
    "num_waits": Sample("waits"),
    "leased_pages": Sample("leased_pages"),
    "leased_tokens": Sample("leased_tokens"),
    "renewed_leases": Sample("renewed_leases"),
    "expired_leases": Sample("expired_leases"),
    "late_releases": Sample("late_releases"),
    "renewed_writes": Sample("renewed_writes"),
    "expired_writes": Sample("expired_writes"),
    "buried_writes": Sample("buried_writes"),
    "reclaimed": Sample("reclaimed_slots"),
    "reclaim_s_sum": Sample("reclaim_seconds"),
    "reclaim_s_max": Sample("reclaim_seconds_max"),
    "hits": Sample("matched_pages", "hit"),
    "misses": Sample("matched_pages", "miss"),
    "hit_tokens": Sample("hit_tokens"),
    "reserved": Sample("reserved_pages"),
    "refused": Sample("refused_pages"),
    "committed": Sample("committed_pages"),
    "committed_tokens": Sample("committed_tokens"),
    "aborted": Sample("aborted_pages"),
    "late_aborts": Sample("late_aborts"),
    "stale_commits": Sample("stale_commits"),
    "fenced": Sample("fenced_requests"),
    "collisions": Sample("collisions"),
    "taken": Sample("taken_pages"),
    "unread_takes": Sample("unread_pages"),
    "torn_writes": Sample("torn_writes"),
    "corrupt_reports": Sample("corrupt_reports"),
    "corrupt_dropped": Sample("corrupt_dropped"),
    "dropped": Sample("dropped_pages"),
    "evicted": Sample("evicted_pages"),
    "evicted_to_ssd": Sample("evicted_to_ssd_pages"),
    "num_in_line": Sample("candidates"),
    "room_waits": Sample("room_waits"),
    "room_waits_over": Sample("room_waits_over"),
    "evicted_tokens": Sample("evicted_tokens"),
    "cleared": Sample("cleared_pages"),
    "lapsed_priorities": Sample("lapsed_priorities"),
    "pins_refused": Sample("pins_refused"),
    "replicas_missing": Sample("replicas_missing"),
    "repairing": Sample("repairing"),
    "repair_s": Sample("repair_seconds"),
    "repairs": Sample("repairs"),
    "compared": Sample("compared_pages"),
    "compares_failed": Sample("compares_failed"),
    "surplus_cooled": Sample("surplus_pages"),
    "hot_pages": Sample("hot_pages"),
    "pages_heated": Sample("heated_pages"),
    "copies_received": Sample("copies_received"),
    "copies_substituted": Sample("copies_substituted"),
    "copies_mended": Sample("copies_mended"),
    "copies_late": Sample("copies_late"),
    "drains_untold": Sample("drains_untold"),
    "copy_tasks_failed": Sample("copy_tasks_failed"),
    "copied_nbytes": Sample("copied_bytes"),
    "lost_releases": Sample("lost_releases"),
    "connects": Sample("node_connects"),
    "backoffs": Sample("node_backoffs"),
    "bulk_failures": Sample("node_bulk_failures"),
    "ssd_pages": Sample("ssd_pages"),
    "num_on_ssd": Sample("ssd_indexed_pages"),
    "ssd_degraded": Sample("ssd_degraded"),
    "ssd_direct": Sample("ssd_direct"),
    "ssd_stores_under_way": Sample("ssd_stores_under_way"),
    "ssd_loads_under_way": Sample("ssd_loads_under_way"),
    "ssd_index_backlog": Sample("ssd_index_backlog"),
    "num_spilling": Sample("ssd_spilling"),
    "num_promoting": Sample("ssd_promoting"),
    "num_to_adopt": Sample("ssd_pages_to_index"),
    "spilled": Sample("ssd_spilled_pages"),
    "promoted": Sample("ssd_promoted_pages"),
    "promotions_refused": Sample("ssd_promotions_refused"),
    "ssd_displaced": Sample("ssd_displaced_pages"),
    "ssd_evicted": Sample("ssd_evicted_pages"),
    "ssd_lost": Sample("ssd_lost_pages"),
    "ssd_stored": Sample("ssd_stored_pages"),
    "ssd_stored_nbytes": Sample("ssd_stored_bytes"),
    "ssd_promoted": Sample("ssd_loaded_pages"),
    "ssd_loaded_nbytes": Sample("ssd_loaded_bytes"),
    "ssd_misses": Sample("ssd_missed_pages"),
    "ssd_loads_refused": Sample("ssd_refused_loads"),
    "ssd_rows_dropped": Sample("ssd_rows_dropped"),
    "ssd_slabs_emptied": Sample("ssd_slabs_emptied"),
    "ssd_read_errors": Sample("ssd_errors", "read"),
    "ssd_write_errors": Sample("ssd_errors", "write"),
    "ssd_index_errors": Sample("ssd_errors", "index"),
    "event_batches": Sample("event_batches"),
    "event_drops": Sample("event_drops"),
    "event_overflows": Sample("event_overflows"),
    "event_replays": Sample("event_replays"),
    "event_snapshots": Sample("event_snapshots"),
}

_LABELLED = {  # families of numbers that differ in their last word
    ("evicted", "evictions"): ("watermark", "demand", "quota", "slab", "unspilled"),
    ("copies", "copies"): (
        *("taken", "present", "writing", "refused", "torn", "broken", "given_up", "overflowed"),
        *("interrupted", "gone", "unread", "unasked", "cleared", "later"),
    ),
    ("ssd_refused", "ssd_refused_pages"): (
        *("format", "busy", "degraded", "budget", "corrupt", "size", "full"),
    ),
    ("ssd_dropped", "ssd_dropped_pages"): ("truncated", "header", "misplaced", "page", "error"),
}
SAMPLES.update(
    (f"{prefix}_{word}", Sample(metric, word))
    for (prefix, metric), words in _LABELLED.items()
    for word in words
)
