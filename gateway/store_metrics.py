"""The numbers of all store nodes as Prometheus metrics.

Owns the translation of one membership view. What is exported, and how it is called, is the
catalogue's (``store_numbers.py``); the age of a number is that of its node's heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.store_numbers import FAMILIES, SAMPLES, Family
from transfer.identity import NodeId, Role
from transfer.membership import MembershipView

PREFIX = "kvferry_store_"

_Family = CounterMetricFamily | GaugeMetricFamily


def store_families(view: MembershipView) -> Iterator[Metric]:
    """Yield every metric of the catalogue with the samples of all store nodes of ``view``.

    A counter that a node has not stated yet is 0; a gauge that it does not state has no sample. A
    node without an SSD has no samples about one, a node without a heartbeat none at all.
    """
    found = {name: _family(name, family) for name, family in FAMILIES.items()}
    info = GaugeMetricFamily(
        f"{PREFIX}info", "1 per store node.", labels=["node", "policy", "replicas"]
    )
    for member in view.with_role(Role.STORE, include_draining=True):
        labels, contract = member.info.labels, member.info.contract
        known = [member.node_id, labels.get("policy", ""), contract.get("replicas", "")]
        info.add_metric(known, 1)
        if member.status.gauges:
            _add(found, member.node_id, member.status.gauges)
    yield info
    yield from found.values()


def _family(name: str, family: Family) -> _Family:
    labels = ["node"] if family.label is None else ["node", family.label]
    made = CounterMetricFamily if family.counter else GaugeMetricFamily
    return made(PREFIX + name, family.text, labels=labels)


def _add(found: Mapping[str, _Family], node_id: NodeId, numbers: Mapping[str, float]) -> None:
    has_ssd = "ssd_nbytes" in numbers
    for name, sample in SAMPLES.items():
        of_ssd = sample.metric.startswith("ssd_")
        counts = FAMILIES[sample.metric].counter and (has_ssd or not of_ssd)
        value = numbers.get(name, 0.0 if counts else None)
        if value is None or (of_ssd and not has_ssd):
            continue
        labels = [node_id] if sample.label is None else [node_id, sample.label]
        found[sample.metric].add_metric(labels, value)
