"""Prometheus metrics of the gateway, in a registry of their own.

Owns the histograms of the HTTP side and the export of ``DispatchStats`` and of the cluster's state
at scrape time. Knows no routes.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.dispatch import Dispatcher
from gateway.store_metrics import store_families
from transfer.identity import Role
from transfer.membership import PAGE_STORE_LOSSES, PAGE_STORE_LOST, Membership

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

_COUNTERS = {
    "generations": ("requests", "Generations taken on."),
    "generations_cancelled": ("cancelled", "Generations whose client left."),
    "generations_failed": ("failed", "Generations that ended with an error."),
    "refused_busy": ("refused_busy", "Requests refused for being beyond capacity."),
    "refused_no_capacity": ("refused_no_capacity", "Requests refused without a decode node."),
    "prefill_failovers": ("prefill_failovers", "Prefill legs that were replaced."),
    "decode_failovers": ("decode_failovers", "Decode legs that were replaced."),
    "prefill_fallbacks": ("prefill_fallbacks", "Prompts that decode computed by itself."),
    "updates_lost": ("updates_lost", "News of prefill that decode could not be told."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens taken on."),
    "output_tokens": ("output_tokens", "Output tokens given to clients."),
    "computed_tokens": ("computed_tokens", "Prompt tokens computed, by all legs."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed again, after the first token."),
    "cached_tokens_expected": ("cached_tokens_expected", "Local hits that routing expected."),
}

# Of the streams of all nodes; the names are those of ``kvstore.events.EventCounters``.
_EVENT_COUNTERS = {
    "batches": "Batches of KV events applied.",
    "gaps": "Gaps in KV event streams.",
    "restarts": "Publishers of KV events that began anew.",
    "replayed": "Batches that were asked for again.",
    "snapshots": "Contents of caches that were fetched whole.",
    "repeats": "Batches that came twice.",
    "unanswered": "Requests for batches that were not answered.",
    "invalid": "Messages that are no KV events.",
}

# Of every node, from its heartbeats; the names are those of ``transfer.counters``. Descriptors per
# request are ranges_sent over operations.
_TRANSFER_COUNTERS = {
    "bytes_read": "Payload of reads that succeeded.",
    "bytes_written": "Payload of writes that succeeded.",
    "bytes_served": "Payload moved for peers.",
    "operations": "Reads and writes that ended.",
    "errors": "Reads and writes that failed or were cancelled.",
    "ranges_asked": "Ranges that were asked for.",
    "ranges_sent": "Contiguous runs left of them: descriptors.",
    "fallbacks": "Peers reached by a slower transport than the chosen one.",
    "faults_injected": "Reads and writes hit by fault injection.",
}


class _Scrape(Collector):
    """Reads the dispatcher and the membership when asked."""

    def __init__(self, dispatcher: Dispatcher, membership: Membership) -> None:
        self._dispatcher = dispatcher
        self._membership = membership

    def collect(self) -> Iterator[Metric]:
        stats = self._dispatcher.stats
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"kvferry_{name}", text, value=getattr(stats, field))
        cached = CounterMetricFamily(
            "kvferry_cached_tokens", "Prompt tokens found in a cache.", labels=["tier"]
        )
        cached.add_metric(["local"], stats.cached_tokens_local)
        cached.add_metric(["store"], stats.cached_tokens_store)
        yield cached
        yield GaugeMetricFamily(
            "kvferry_in_flight", "Generations in flight.", value=stats.num_in_flight
        )
        yield GaugeMetricFamily(
            "kvferry_lingering_legs", "Legs still pushing pages.", value=stats.num_lingering
        )
        yield from self._cluster()
        yield from self._transfers()
        yield from self._page_stores()
        yield from store_families(self._membership.view)

    def _cluster(self) -> Iterator[Metric]:
        nodes = GaugeMetricFamily(
            "kvferry_nodes", "Members of the cluster.", labels=["role", "state"]
        )
        placement = self._dispatcher.placement
        view = self._membership.view
        for role in (Role.PREFILL, Role.DECODE, Role.STORE):
            nodes.add_metric([role.value, "member"], len(view.with_role(role)))
            if role is not Role.STORE:
                nodes.add_metric([role.value, "usable"], len(placement.links.usable(role)))
        yield nodes
        index = placement.index
        yield GaugeMetricFamily(
            "kvferry_index_pages", "Entries of the prefix index.", value=index.num_entries
        )
        yield CounterMetricFamily(
            "kvferry_index_evicted", "Index entries dropped at the cap.", value=index.num_evicted
        )
        counters = placement.links.event_counters
        for name, text in _EVENT_COUNTERS.items():
            value = getattr(counters, f"num_{name}")
            yield CounterMetricFamily(f"kvferry_event_{name}", text, value=value)

    def _transfers(self) -> Iterator[Metric]:
        for name, text in _TRANSFER_COUNTERS.items():
            family = CounterMetricFamily(f"kvferry_transfer_{name}", text, labels=["node", "role"])
            for member in self._membership.view.members:
                value = member.status.counters.get(f"transfer_{name}")
                if value is not None:
                    family.add_metric([member.node_id, member.info.identity.role.value], value)
            yield family

    def _page_stores(self) -> Iterator[Metric]:
        """What nodes say of an engine of pages that is not the cluster's own."""
        labels = ["node", "role"]
        lost = GaugeMetricFamily(
            "kvferry_page_store_lost",
            "1 while the node's page store does not answer.",
            labels=labels,
        )
        losses = CounterMetricFamily(
            "kvferry_page_store_losses", "Times that it stopped answering.", labels=labels
        )
        for member in self._membership.view.members:
            node = [member.node_id, member.info.identity.role.value]
            status = member.status
            if PAGE_STORE_LOST in status.gauges:
                lost.add_metric(node, status.gauges[PAGE_STORE_LOST])
                losses.add_metric(node, status.counters.get(PAGE_STORE_LOSSES, 0.0))
        yield lost
        yield losses


class Metrics:
    """All metrics of one gateway."""

    def __init__(self, dispatcher: Dispatcher, membership: Membership) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "kvferry_http_requests",
            "HTTP requests by route and status; 499: the client left.",
            ["route", "status"],
            registry=self.registry,
        )
        self.ttft = Histogram(
            "kvferry_ttft_seconds",
            "From the start of a generation to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "kvferry_itl_seconds",
            "Between tokens of one choice.",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_Scrape(dispatcher, membership))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
